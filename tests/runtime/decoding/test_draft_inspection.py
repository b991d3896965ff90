"""The step that is split in two because a policy must see the drafts before they are verified."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from support.loop_models import answer, drafts, oracle, prompt, session

from thor_dflash.core.tensors import Array
from thor_dflash.plugins.accept.record import Record
from thor_dflash.runtime.decoding.block import Block, DecodeProgress, Policy, Reason
from thor_dflash.runtime.decoding.proposers import DflashDrafter, NoDrafter, Proposer
from thor_dflash.runtime.session import Request

REQUEST = Request(prompt=prompt(40, seed=1), max_tokens=40)


@dataclass
class Looking(Policy):
    """A policy that looks at the drafts of every block, keeps them, and lets `narrow` change the
    block.
    """

    narrow: Callable[[tuple[int, ...], Block], Block]
    seen: list[tuple[int, ...]] = field(default_factory=list)

    def shape(self, progress: DecodeProgress, block: Block) -> Block:
        return replace(block, look=self._look)

    def _look(self, tokens: tuple[int, ...], block: Block) -> Block:
        self.seen.append(tokens)
        return self.narrow(tokens, block)


@dataclass
class Watching(Policy):
    """A policy that forces the beginning of every other block, and keeps the tokens of every block
    as they were verified.
    """

    seen: list[tuple[int, ...]] = field(default_factory=list)
    odd: bool = False

    def shape(self, progress: DecodeProgress, block: Block) -> Block:
        self.odd = not self.odd
        return block.forcing((5, 6, 7), "a test") if self.odd else block

    def judge(self, progress: DecodeProgress, block: Block, record: Record) -> int:
        self.seen.append(tuple(session().model.read("tokens").tolist()))
        return record.count


def whole() -> Array:
    """A mask that allows every id after every row."""
    width = session().model.graphs["accept_masked"].inputs["mask"].at({})[1]
    return np.full((16, width), -1, np.int32)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("proposer", [NoDrafter(), DflashDrafter()], ids=["nobody", "dflash"])
def test_looking_changes_nothing(proposer: Proposer, masked: bool) -> None:
    truth = answer(session(), REQUEST, proposer)
    plain = session().report().spec
    looking = Looking(lambda _, block: replace(block, mask=whole) if masked else block)
    assert answer(session(), REQUEST, proposer, (looking,)) == truth
    assert session().report().spec == plain
    assert len(looking.seen) == plain.cycles


def test_a_drafter_that_is_seen_drafts_what_it_does_unseen() -> None:
    """The drafter must begin at the newest token and take account of the ids that this block
    forces, whether it runs by itself, before a look, or together with the verify.
    """
    unseen, beside = Watching(), Watching()
    truth = answer(session(), REQUEST, DflashDrafter(), (unseen,))
    looking = Looking(lambda _, block: block)
    assert answer(session(), REQUEST, DflashDrafter(), (beside, looking)) == truth
    assert looking.seen == beside.seen == unseen.seen
    assert len(unseen.seen) > 2
    assert {tokens[1:4] == (5, 6, 7) for tokens in unseen.seen} == {True, False}


def test_what_a_look_did_is_noted() -> None:
    looking = Looking(lambda _, block: replace(block, forced=(-1, 7), cap=4))
    answer(session(), REQUEST, NoDrafter(), (looking,))
    notes = {(n.what, n.why): n.cycles for n in session().report().notes}
    cycles = session().report().spec.cycles
    assert notes["forced", "grammar"] == cycles
    assert 0 < notes["capped", "grammar"] <= cycles


@pytest.mark.parametrize(
    ("before", "forced", "cap", "found"),
    [
        ((), (), 8, []),
        ((), (-1, -1), 8, []),
        ((), (-1, 7), 8, ["forced"]),
        ((), (-1, 7), 7, ["forced", "capped"]),
        # The block already forced ids before the look and has the reason for that.
        ((5,), (5, -1), 8, []),
        ((5,), (5, 7), 7, ["capped"]),
    ],
)
def test_reasons_of_a_look(
    before: tuple[int, ...], forced: tuple[int, ...], cap: int, found: list[str]
) -> None:
    block = Block(cap=8, forced=before, reasons=(Reason("gated", "a test"),))
    seen = replace(block, forced=forced, cap=cap).because(block, "a look")
    assert [(r.what, r.why) for r in seen.reasons[1:]] == [(what, "a look") for what in found]
    assert seen.reasons[:1] == block.reasons


def test_the_drafts_are_seen_and_replaced() -> None:
    truth = answer(session(), REQUEST, NoDrafter())
    wrong = drafts(lambda n: [(t + 1) % 240 for t in (*truth, *[0] * 16)[n : n + 15]])
    force = Looking(lambda tokens, block: replace(block, forced=(-1, 7, -1, 9), cap=4))
    right = answer(session(), REQUEST, oracle(truth), (force,))
    assert force.seen[0][1:] == tuple(truth[:15])
    # The first token is the model's own choice, as drafted; the second is forced to be 7, so that
    # the oracle's drafts after it are wrong.
    assert right[:2] == [truth[0], 7]
    assert session().report().spec.forced > 0
    assert answer(session(), REQUEST, wrong, (force,)) == answer(
        session(), REQUEST, NoDrafter(), (force,)
    )


@pytest.mark.parametrize("row", [0, 1, 5])
def test_a_row_nothing_may_follow_is_a_fault_unless_a_policy_stops_before_it(row: int) -> None:
    truth = answer(session(), REQUEST, NoDrafter())

    def mute() -> Array:
        mask = whole()
        mask[row] = 0
        return mask

    @dataclass
    class Stopping(Looking):
        def judge(self, progress: DecodeProgress, block: Block, record: Record) -> int:
            return record.fault if record.fault >= 0 else record.count

    looking = Stopping(lambda _, block: replace(block, mask=mute))
    got = answer(session(), REQUEST, oracle(truth), (looking,))
    assert session().report().finish == ("grammar_dead_end" if row == 0 else "length")
    assert got == ([] if row == 0 else truth)
    with pytest.raises(Exception, match="leave a token to choose"):
        answer(session(), REQUEST, oracle(truth), (Looking(looking.narrow),))
