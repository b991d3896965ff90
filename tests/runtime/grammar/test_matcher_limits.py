"""Limits of a matcher: a request may hit one by its own work, never by that of earlier requests."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLParserLimits
from support.constrained_model import PLAN, asked, constrained, session, text

from thor_dflash.core.errors import RequestError
from thor_dflash.runtime.decoding.proposers import DflashDrafter, NoDrafter
from thor_dflash.runtime.grammar.compiler import Grammars
from thor_dflash.runtime.grammar.schema import (
    MAX_CHAIN,
    MAX_LEVELS,
    MAX_TOGETHER,
    read,
)

WIDE = {
    "type": "object",
    "properties": {"say": {"type": "string", "pattern": "^[a-z ]*e[a-z ]{12}$"}},
    "required": ["say"],
    "additionalProperties": False,
}
"""A schema whose lexer makes new states with nearly every token."""


def grammars(**limits: int) -> Grammars:
    manifest = session().manifest
    few = LLParserLimits(verbose_errors=False, **limits)
    return Grammars(text(), manifest.vocab_limit, manifest.stop_tokens, few)


def test_a_grammar_at_its_limit_is_made_anew_for_the_next_request() -> None:
    little = grammars(step_lexer_fuel=50)
    first = little.compile(PLAN)
    ends = [constrained(asked(False), NoDrafter(), first)]
    assert little.compile(PLAN) is not first
    ends.append(constrained(asked(False), NoDrafter(), little.compile(PLAN)))
    assert ends[0] == ends[1] != []


def test_what_others_had_computed_ends_no_request() -> None:
    """The states of the lexer are counted over all requests of a grammar. One request stays below
    this limit, all nine together do not.
    """
    made = grammars(max_lexer_states=600).compile(WIDE)
    spent: list[bool] = []
    for number, proposer in zip(
        range(9), itertools.cycle([NoDrafter(), DflashDrafter()]), strict=False
    ):
        one = asked(False, f"Say {number}.", 40)
        got = constrained(one, proposer, made)
        assert session().report().finish == "length", number
        spent.append(made.spent.is_set())
        alone = grammars(max_lexer_states=600).compile(WIDE)
        assert got == constrained(one, NoDrafter(), alone), number
    assert not spent[0]
    assert spent[-3:] == [True] * 3  # so the last ones began with a spent grammar
    assert made.anew() is made.anew() is not made


def test_a_thread_that_the_system_did_not_give_holds_up_no_later_schema(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def none(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    made = grammars()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", none)
        with pytest.raises(RuntimeError, match="can't start"):
            made.compile(PLAN)
    made.compile(PLAN)


LINKS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "$ref": lambda to: to,
    "prefixItems": lambda to: {"type": "array", "prefixItems": [to], "minItems": 1},
    "items": lambda to: {"type": "array", "items": to, "minItems": 1},
    "properties": lambda to: {"type": "object", "properties": {"k": to}, "required": ["k"]},
    "allOf": lambda to: {"allOf": [to]},
    "anyOf": lambda to: {"anyOf": [to, {"type": "null"}]},
}
"""Keyword -> a schema that leads to another one by it."""


def chain(form: str, links: int, backwards: bool = False) -> dict[str, Any]:
    """A schema of definitions each of which leads to the next one."""
    bodies = [(f"a{i}", LINKS[form]({"$ref": f"#/$defs/a{i + 1}"})) for i in range(links)]
    made = dict(reversed(bodies) if backwards else bodies)
    return {
        "type": "object",
        "properties": {"k": {"$ref": "#/$defs/a0"}},
        "required": ["k"],
        "$defs": {**made, f"a{links}": {"type": "object", "additionalProperties": False}},
    }


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("form", LINKS)
def test_definitions_may_not_lead_too_far(form: str, backwards: bool) -> None:
    """llguidance recurses, and would overflow its stack: no error, but the end of the process."""
    each = 1 if form == "$ref" else 2
    most = (MAX_LEVELS - 4) // each  # but for the top, its property, the last definition's two
    read(chain(form, most, backwards))
    for links in (most + 1, 900):
        got = 4 + each * links
        with pytest.raises(RequestError, match=rf"256 schemas deep .* \(got {got}\)"):
            read(chain(form, links, backwards))


def test_definitions_that_lead_to_each_other_count_together() -> None:
    def ring(count: int) -> dict[str, Any]:
        made = chain("properties", count)
        made["$defs"][f"a{count}"] = {"anyOf": [{"$ref": "#/$defs/a0"}, {"type": "null"}]}
        return made

    read(ring(126))
    with pytest.raises(RequestError, match=r"256 schemas deep .* \(got 258\)"):
        read(ring(127))
    for schema in ({"$ref": "#"}, {"type": "object", "properties": {"next": {"$ref": "#"}}}):
        read(schema)  # its depth does not grow with its values


@pytest.mark.parametrize("form", LINKS)
def test_the_longest_chains_are_compiled_whatever_stack_the_shell_gives(form: str) -> None:
    links = (MAX_LEVELS - 4) // (1 if form == "$ref" else 2)
    script = (
        "import json, sys\n"
        "sys.path.insert(0, sys.argv[1])\n"
        "from support.constrained_model import session, text\n"
        "from thor_dflash.core.errors import RequestError\n"
        "from thor_dflash.runtime.grammar.compiler import Grammars\n"
        "m = session().manifest\n"
        "made = Grammars(text(), m.vocab_limit, m.stop_tokens)\n"
        "try:\n    made.compile(json.loads(sys.argv[2]))\n"
        "except RequestError as e:\n    print(e)\n"
        "print('here')\n"
    )
    shell = ["sh", "-c", 'ulimit -s 1024 && exec "$@"', "sh"]
    words = [*shell, sys.executable, "-c", script, str(Path(__file__).parents[2])]
    done = subprocess.run(
        [*words, json.dumps(chain(form, links))], capture_output=True, text=True, check=False
    )
    assert done.stdout == "here\n", (done.returncode, done.stdout, done.stderr[-500:])


def test_a_grammar_that_cannot_be_compiled_again_is_a_dead_end() -> None:
    little = grammars(max_lexer_states=20)
    made = little.compile(PLAN)
    little.seconds = 0.0
    got = constrained(asked(False), NoDrafter(), made)
    assert session().report().finish == "grammar_dead_end"
    whole = constrained(asked(False), NoDrafter(), session().grammar(PLAN))
    assert got == whole[: len(got)]


def patterns(count: int) -> list[dict[str, Any]]:
    """With twenty of them for one value, the compiler takes seconds for one mask."""
    each = [f"(x[0-9]{{{i}}}y|.*z{{{i + 3}}}.{{{7 * i}}})*" for i in range(2, count + 2)]
    return [{"type": "string", "maxLength": 99, "pattern": text} for text in each]


def named(value: object) -> dict[str, Any]:
    return {"type": "object", "properties": {"x": value}, "required": ["x"]}


def together(count: int) -> list[tuple[dict[str, Any], str]]:
    """Schemas in which `count` patterns apply to one value, and where."""
    every = patterns(count)
    chain = {f"a{i}": {**each, "$ref": f"#/$defs/a{i + 1}"} for i, each in enumerate(every)}
    chain[f"a{count}"] = {"type": "string"}
    first, *others = every
    return [
        (named({"allOf": every}), r"schema\.properties\.x"),
        (named({**first, "allOf": [{"anyOf": [one, first]} for one in others]}), ""),
        (named({**first, "allOf": [{"allOf": others}]}), ""),
        ({"allOf": [named(each) for each in every]}, "schema"),
        ({**named(first), "allOf": [named({"items": each}) for each in others]}, "schema"),
        ({**named({"$ref": "#/$defs/a0"}), "$defs": chain}, r"schema\.\$defs\.a0"),
        (named({**first, "anyOf": [{"allOf": others}, {"type": "string"}]}), ""),
    ]


def test_a_value_that_must_obey_many_patterns_is_refused() -> None:
    for schema, _ in together(MAX_TOGETHER):
        read(schema).check_patterns()
    for schema, where in together(MAX_TOGETHER + 1):
        with pytest.raises(RequestError, match=f"{where}.* must apply at most 4 patterns"):
            read(schema).check_patterns()
    with pytest.raises(RequestError, match=r"schema\.properties\.x must apply at most 4 patterns"):
        session().grammar(named({"allOf": patterns(20)}))


def test_many_patterns_for_different_values_are_not_counted_together() -> None:
    every = patterns(20)
    node = {"properties": {**{f"k{i}": p for i, p in enumerate(every)}, "n": {"$ref": "#/$defs/n"}}}
    for schema in (
        named({"anyOf": every}),
        {"properties": {f"k{i}": each for i, each in enumerate(every)}},
        {"prefixItems": every, "$defs": {f"d{i}": each for i, each in enumerate(every)}},
        {"$ref": "#/$defs/n", "$defs": {"n": node}},
    ):
        read(schema).check_patterns()


def test_long_chains_of_references_are_refused_at_once_instead_of_followed() -> None:
    def chain(length: int, step: int) -> str:
        names = {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(length)[::step]}
        ends = {f"a{length}": patterns(1)[0], **{f"p{i}": p for i, p in enumerate(patterns(9))}}
        return read({"$ref": "#/$defs/a0", "$defs": {**names, **ends}})

    chain(250, 1).check_patterns()
    chain(MAX_CHAIN - 1, -1).check_patterns()
    with pytest.raises(RequestError, match=r"chains of at most 31 \$ref .got longer"):
        chain(250, -1).check_patterns()
