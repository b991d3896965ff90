"""Lookup beside the drafter: the tokens are those of plain decoding, bit for bit, and the drafter
misses nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial

import numpy as np
import pytest
from support import constrained_model
from support.constrained_model import constrained
from support.loop_models import answer, oracle, prompt, session

from thor_dflash.config.decode import BudgetConfig, SamplingConfig
from thor_dflash.core.errors import RequestError
from thor_dflash.plugins.accept.record import LOG_MARGIN
from thor_dflash.runtime.decoding.block import AcceptRule, Block, DecodeProgress, Policy
from thor_dflash.runtime.decoding.draft_chooser import DraftChooser
from thor_dflash.runtime.decoding.lookup import LookupTexts
from thor_dflash.runtime.decoding.proposers import DflashDrafter, NoDrafter
from thor_dflash.runtime.session import Request
from thor_dflash.runtime.session.turn_cache import Conversation

ONE = Request(prompt=prompt(40, seed=1), max_tokens=48)
QWEN = SamplingConfig(temperature=1.0, top_k=20, top_p=0.95, seed=11)


@cache
def truth(sampled: bool = False) -> tuple[int, ...]:
    return tuple(answer(session(), request(sampled), NoDrafter()))


def request(sampled: bool = False) -> Request:
    return replace(ONE, sampling=QWEN) if sampled else ONE


def edited(tokens: Sequence[int], every: int) -> tuple[int, ...]:
    """The answer as an earlier one may have been: every so many tokens another id, or none."""
    kept = [(t + 1) % 240 if i % every == every - 1 else t for i, t in enumerate(tokens)]
    return (*ONE.prompt[-4:], *(t for i, t in enumerate(kept) if i % (2 * every) != 2))


def chooser(sampled: bool = False, every: int = 12, *, drafter: bool = True) -> DraftChooser:
    texts = LookupTexts(session=(edited(truth(sampled), every),))
    return DraftChooser(DflashDrafter() if drafter else NoDrafter(), ONE.prompt, lambda: texts)


def test_it_is_the_plain_answer_and_the_drafter_misses_nothing() -> None:
    s, plain = session(), [*truth()]
    assert answer(s, ONE, DflashDrafter()) == plain
    want = s.model.state.snapshot()
    assert answer(s, ONE, chooser()) == plain
    sources = s.report().spec.sources
    assert {"session", "drafter"} <= sources.keys(), "both were used"
    assert sum(one.blocks for one in sources.values()) == s.report().spec.cycles
    got = s.model.state.snapshot()
    layers = [i for i, layer in enumerate(s.manifest.drafter.layers) if not layer.window]  # type: ignore[union-attr]
    assert layers
    rows = min(want.length, got.length)
    for i in layers:
        for name in (f"drafter.{i}.k", f"drafter.{i}.v"):
            assert np.array_equal(want.arrays[name][:, :rows], got.arrays[name][:, :rows]), name
    assert want.first == got.first


@pytest.mark.parametrize("drafter", [True, False])
@pytest.mark.parametrize("every", [3, 100])
def test_it_is_the_plain_sampled_answer(every: int, drafter: bool) -> None:
    s = session()
    assert answer(s, request(True), chooser(True, every, drafter=drafter)) == [*truth(True)]
    assert s.report().spec.sources["session"].accepted > 0


class Gated(Policy):
    """Shuts the drafter out of every other pair of blocks."""

    def shape(self, progress: DecodeProgress, block: Block) -> Block:
        self.blocks = getattr(self, "blocks", 0) + 1
        return block.undrafted("test") if self.blocks // 2 % 2 else block


def test_a_gate_that_holds_rows_back_loses_none() -> None:
    s = session()
    assert answer(s, ONE, chooser(every=20), (Gated(),)) == [*truth()]
    assert s.model.state.length == len(ONE.prompt) + len(truth()) - 1
    held = sum(len(rows) for rows in s.model.state.behind)
    s.model.catch_up()
    got = s.model.state.snapshot()
    assert held < 40
    answer(s, ONE, DflashDrafter())
    want = s.model.state.snapshot()
    rows = min(want.length, got.length)
    full = [n for n in want.arrays if n.startswith("drafter.") and want.arrays[n].shape[1] >= rows]
    assert full
    for name in full:
        assert np.array_equal(want.arrays[name][:, :rows], got.arrays[name][:, :rows]), name


@pytest.mark.parametrize("sampled", [False, True])
def test_under_a_grammar(sampled: bool) -> None:
    grammar = constrained_model.session().grammar(constrained_model.SMALL)
    asked = constrained_model.asked(True, max_tokens=120)
    asked = replace(asked, sampling=QWEN) if sampled else asked
    plain = constrained(asked, NoDrafter(), grammar, thinking=True)
    for given in (plain, [*reversed(plain)]):
        proposer = DraftChooser(
            DflashDrafter(),
            asked.prompt,
            partial(LookupTexts, session=((*asked.prompt[-4:], *given),)),
        )
        assert constrained(asked, proposer, grammar, thinking=True) == plain


class Relaxed(Policy):
    """Takes near misses in every block."""

    def shape(self, progress: DecodeProgress, block: Block) -> Block:
        return replace(block, relaxed=AcceptRule(rule=LOG_MARGIN, top_k=240, margin=9.0))


def test_near_misses_of_a_text_are_not_taken() -> None:
    s, plain = session(), [*truth()]
    assert answer(s, ONE, chooser(every=3, drafter=False), (Relaxed(),)) == plain
    assert s.report().spec.sources == {}


def test_under_a_budget_and_from_a_stored_prefix() -> None:
    s = constrained_model.session()
    budget = BudgetConfig(tokens=9, message="Done.</think>")
    asked = replace(constrained_model.asked(True, max_tokens=40), budget=budget)
    plain = [t for c in s.generate(replace(asked, drafter="none")) for t in c.tokens]
    again = replace(asked, drafter="auto", drafts=(tuple(plain[14:]), tuple(plain)))
    assert [t for c in s.generate(again) for t in c.tokens] == plain
    forced = s.report().spec.forced
    assert forced >= 2
    s.prefixes.put("here", asked.prompt[: len(asked.prompt) - 2])
    try:
        assert [t for c in s.generate(again) for t in c.tokens] == plain
    finally:
        s.prefixes.drop("here")


def test_an_answer_that_was_abandoned_does_not_disturb_the_next() -> None:
    s, proposer, plain = session(), chooser(), [*truth()]
    assert answer(s, ONE, proposer) == plain
    sources = s.report().spec.sources
    chunks = s.run(ONE, proposer)
    for _ in range(5):
        next(chunks)
    chunks.close()
    assert answer(s, ONE, proposer) == plain
    assert s.report().spec.sources == sources


def test_a_session_finds_its_earlier_answer_and_no_other_does() -> None:
    s = session()

    def sources(scope: str, name: str) -> set[str]:
        conversation = Conversation(scope=scope, session=name)
        asked = replace(ONE, drafter="auto", max_tokens=16, conversation=conversation)
        assert [t for c in s.generate(asked) for t in c.tokens] == [*truth()[:16]]
        return {*s.report().spec.sources}

    assert "session" not in sources("a", "arm")
    assert "session" not in sources("b", "arm")
    assert "session" not in sources("a", "leg")
    assert "session" not in sources("a", ""), "without a name nothing is kept"
    assert "session" not in sources("a", "")
    assert "session" in sources("a", "arm")


def test_drafts_need_a_proposer_that_reads_them() -> None:
    for drafter in ("dflash", "none"):
        with pytest.raises(RequestError, match="drafts must go with drafter auto or lookup"):
            session().admit(replace(ONE, drafter=drafter, drafts=((1, 2),)))
    with pytest.raises(RequestError, match=r"drafts\[1\] must be ids"):
        session().admit(replace(ONE, drafter="auto", drafts=((1,), (-1,))))


def test_a_text_that_goes_wrong_does_not_replace_a_good_drafter() -> None:
    s, plain = session(), [*truth()]
    texts = LookupTexts(session=(edited(plain, 2), edited(plain, 3)))
    good = oracle([*plain, *[0] * 16])
    assert answer(s, ONE, DraftChooser(good, ONE.prompt, lambda: texts)) == plain
    assert s.report().spec.accept_hist == (0,) * 15 + (3,)
