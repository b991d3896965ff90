"""Limits of a matcher: a request may hit one by its own work, never by that of earlier requests."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
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


@pytest.mark.parametrize(
    "form",
    [form if form == "$ref" else pytest.param(form, marks=pytest.mark.slow) for form in LINKS],
)
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
