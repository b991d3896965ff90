"""Builds the JSON schema of a plan, `tdp.plan.v1`, from the skills of a robot.

Keys are in the order in which the model writes them: first the goal, which states the intent, then
the steps, then whether something is unclear. A plan either has steps or asks a question. An answer
under this schema is compact JSON, as planner-nano was trained to write it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

from thor_dflash.core.errors import RequestError
from thor_dflash.core.message_text import show

Schema = dict[str, Any]
Kind = str | Mapping[str, Any]
"""The kind of an argument: the name of a set of ids, or a schema (`{"type": "integer", ...}`)."""

NAME = "tdp.plan.v1"
ON_FAIL = ("retry", "skip", "replan", "abort")
"""What a controller may do when a step fails."""
MAX_STEPS = 24
"""Longest plan, steps. A longer task has to be replanned on the way."""
MAX_GOAL = 120
"""Longest goal, characters."""
MAX_QUESTION = 160
"""Longest question, characters."""


def from_skills(
    skills: Mapping[str, Mapping[str, Kind]],
    ids: Mapping[str, Sequence[str]],
    *,
    on_fail: Sequence[str] = ON_FAIL,
    expect: int = 0,
    max_steps: int = MAX_STEPS,
    numbered: bool = True,
) -> Schema:
    """Return the schema of plans over `skills`: skill -> argument, in the order written -> kind.

    `ids` are the sets of argument values, as {"object": ["mug", "cup"], "place": [...]}. A skill
    with an argument from an empty set is left out, as it cannot be done. `expect` is the longest
    expectation that a step states, characters; 0 leaves expectations out. With `numbered` the
    grammar counts the steps, which repeats the skills for every step; without it the model counts
    and the schema is `max_steps` times shorter.

    Raises:
        RequestError: no skill is possible, an argument is of an unknown kind, or a value is not of
            its type.
    """
    for what, texts in (
        {f"ids.{kind}": texts for kind, texts in ids.items()} | {"on_fail": on_fail}
    ).items():
        _check_texts(what, texts)
    able = possible(skills, ids)
    if max_steps < 1:
        raise RequestError(f"max_steps must be >= 1 (got {max_steps})")
    shared = _definitions(able, ids)
    shared["on_fail"] = {"enum": list(on_fail)}
    if expect:
        shared["expect"] = {"type": "string", "maxLength": expect}
    shared |= {"goal": {"type": "string", "maxLength": MAX_GOAL}}
    steps = _steps(list(able), shared, max_steps, numbered)
    nothing: Schema = {"type": "array", "maxItems": 0}
    question: Schema = {
        "anyOf": [{"type": "null"}, {"type": "string", "minLength": 1, "maxLength": MAX_QUESTION}]
    }
    acts, asks = _plan(steps, {"type": "null"}), _plan(nothing, question)
    return {"title": NAME, "anyOf": [acts, asks], "$defs": shared}


def possible(
    skills: Mapping[str, Mapping[str, Kind]], ids: Mapping[str, Sequence[str]]
) -> dict[str, Mapping[str, Kind]]:
    """Return the skills that have an id for every argument.

    Raises:
        RequestError: there are none, or an argument is of an unknown kind.
    """
    able = {name: args for name, args in skills.items() if _able(name, args, ids)}
    if not able:
        raise RequestError(f"skills must have one that is possible here (got {show(list(skills))})")
    return able


def steps_schema(
    able: Mapping[str, Mapping[str, Kind]], ids: Mapping[str, Sequence[str]], most: int
) -> Schema:
    """Return the schema of 1 to `most` steps over possible skills, each with `id`, `skill` and
    `args` alone.
    """
    number: Schema = {"type": "integer", "minimum": 1}
    step = _step(list(able), shared := _definitions(able, ids), number)
    return {"type": "array", "minItems": 1, "maxItems": most, "items": step, "$defs": shared}


def _definitions(
    able: Mapping[str, Mapping[str, Kind]], ids: Mapping[str, Sequence[str]]
) -> Schema:
    used = {kind for args in able.values() for kind in args.values() if isinstance(kind, str)}
    shared: Schema = {f"ids.{kind}": {"enum": list(ids[kind])} for kind in ids if kind in used}
    return shared | {f"args.{name}": _args(args) for name, args in able.items()}


def _check_texts(what: str, value: object) -> None:
    """Refuse a single text: it, too, is a sequence of texts, its characters."""
    if isinstance(value, str):
        raise RequestError(f"{what} must be a list of texts (got {show(value)})")


def _able(name: str, args: Mapping[str, Kind], ids: Mapping[str, Sequence[str]]) -> bool:
    for arg, kind in args.items():
        if isinstance(kind, str) and kind not in ids:
            raise RequestError(
                f"skills.{name}.{arg} must be one of {', '.join(ids)} or a schema "
                f"(got {show(kind)})"
            )
    return all(not isinstance(kind, str) or ids[kind] for kind in args.values())


def _args(args: Mapping[str, Kind]) -> Schema:
    return closed_object(
        {
            arg: _ref(f"ids.{kind}") if isinstance(kind, str) else dict(kind)
            for arg, kind in args.items()
        }
    )


def _plan(steps: Schema, question: Schema) -> Schema:
    return closed_object({"goal": _ref("goal"), "steps": steps, "needs_clarification": question})


def _steps(names: list[str], shared: Schema, count: int, numbered: bool) -> Schema:
    if not numbered:
        any_id: Schema = {"type": "integer", "minimum": 1, "maximum": count}
        return {
            "type": "array",
            "minItems": 1,
            "maxItems": count,
            "items": _step(names, shared, any_id),
        }
    each = [_step(names, shared, {"const": number}) for number in range(1, count + 1)]
    return {
        "type": "array",
        "minItems": 1,
        "maxItems": count,
        "prefixItems": each,
    }


def _step(names: list[str], shared: Schema, number: Schema) -> Schema:
    tail: Schema = {key: _ref(key) for key in ("expect", "on_fail") if key in shared}
    return {
        "anyOf": [
            closed_object(
                {"id": number, "skill": {"const": name}, "args": _ref(f"args.{name}"), **tail}
            )
            for name in names
        ]
    }


def closed_object(properties: Schema) -> Schema:
    """Return the schema of an object with exactly these keys."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def _ref(name: str) -> Schema:
    # A JSON pointer inside a URI: the name of a skill is escaped for both.
    return {"$ref": f"#/$defs/{_pointer(name)}"}


def _pointer(name: str) -> str:
    return quote(name.replace("~", "~0").replace("/", "~1"), safe="")
