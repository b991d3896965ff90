"""Limits of a matcher: a request may hit one by its own work, never by that of earlier requests."""

from __future__ import annotations

import itertools
import threading

import pytest
from constrained import PLAN, asked, constrained, session, text
from llguidance import LLParserLimits

from thor_dflash.runtime.policies.grammar_compile import Grammars
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
