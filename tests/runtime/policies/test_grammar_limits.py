"""Limits of a matcher: a request may hit one by its own work, never by that of earlier requests."""

from __future__ import annotations

import itertools
import threading
import time
from typing import Any

import pytest
from constrained import PLAN, asked, constrained, session, text
from llguidance import LLParserLimits

from thor_dflash.errors import RequestError
from thor_dflash.runtime.policies.grammar_compile import Grammars
from thor_dflash.runtime.policies.grammar_schema import (
    MAX_CHAIN,
    MAX_TOGETHER,
    check_together,
    text_of,
)
from thor_dflash.runtime.propose import Dflash, Nobody

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
    ends = [constrained(asked(False), Nobody(), first)]
    assert little.compile(PLAN) is not first
    ends.append(constrained(asked(False), Nobody(), little.compile(PLAN)))
    assert ends[0] == ends[1] != []


def test_what_others_had_computed_ends_no_request() -> None:
    """The states of the lexer are counted over all requests of a grammar. One request stays below
    this limit, all nine together do not.
    """
    made = grammars(max_lexer_states=600).compile(WIDE)
    spent: list[bool] = []
    for number, proposer in zip(range(9), itertools.cycle([Nobody(), Dflash()]), strict=False):
        one = asked(False, f"Say {number}.", 40)
        got = constrained(one, proposer, made)
        assert session().report().finish == "length", number
        spent.append(made.spent.is_set())
        alone = grammars(max_lexer_states=600).compile(WIDE)
        assert got == constrained(one, Nobody(), alone), number
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


def test_a_grammar_that_cannot_be_compiled_again_is_a_dead_end() -> None:
    little = grammars(max_lexer_states=20)
    made = little.compile(PLAN)
    little.seconds = 0.0
    got = constrained(asked(False), Nobody(), made)
    assert session().report().finish == "grammar_dead_end"
    whole = constrained(asked(False), Nobody(), session().grammar(PLAN))
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
        check_together(text_of(schema))
    for schema, where in together(MAX_TOGETHER + 1):
        with pytest.raises(RequestError, match=f"{where}.* must apply at most 4 patterns"):
            check_together(text_of(schema))
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
        check_together(text_of(schema))


def test_long_chains_of_references_are_refused_at_once_instead_of_followed() -> None:
    def chain(length: int, step: int) -> str:
        names = {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(length)[::step]}
        ends = {f"a{length}": patterns(1)[0], **{f"p{i}": p for i, p in enumerate(patterns(9))}}
        return text_of({"$ref": "#/$defs/a0", "$defs": {**names, **ends}})

    check_together(chain(2000, 1))
    check_together(chain(MAX_CHAIN - 1, -1))
    start = time.perf_counter()
    with pytest.raises(RequestError, match=r"chains of at most 31 \$ref .got longer"):
        check_together(chain(2000, -1))  # following them to the end would take ten seconds
    assert time.perf_counter() - start < 2
