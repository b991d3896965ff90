"""The step that is split in two because a policy must see the drafts before they are verified."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from support.loop_models import answer, drafts, oracle, prompt, session

from thor_dflash.core.tensors import Array
from thor_dflash.plugins.accept.record import Record
from thor_dflash.runtime.decoding.block import Block, DecodeProgress, Policy
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
