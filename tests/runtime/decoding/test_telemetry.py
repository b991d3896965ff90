"""What the meter of a request reports. Most tests give it made-up blocks, or a clock that stands
still.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

import pytest

from thor_dflash.core.results import DraftCounts
from thor_dflash.plugins.accept.record import Record
from thor_dflash.runtime.decoding.block import (
    Block,
    BlockPhase,
    DecodeProgress,
    DraftTail,
    Reason,
)
from thor_dflash.runtime.decoding.proposers import Proposal
from thor_dflash.runtime.decoding.telemetry import RequestMeter, RequestReport


@dataclass
class Clock:
    """Stands in for time.perf_counter and shows `now`, which only the test moves."""

    now: float = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    it = Clock()
    monkeypatch.setattr(time, "perf_counter", it)
    return it


def totals(
    meter: RequestMeter, finish: str, count: int, busy: Mapping[str, float]
) -> RequestReport:
    """The report of a request that committed and emitted `count` tokens without thinking."""
    progress = DecodeProgress((1,))
    progress.commit([5] * count)
    return meter.report(finish, progress, count, busy)


def test_a_request_has_the_times_of_its_steps(clock: Clock) -> None:
    meter = RequestMeter(16, {}, start=clock())
    clock.now += 2
    meter.prompt_done()
    for seconds, count, phase in ((1, 4, "thinking"), (2, 3, "thinking"), (5, 1, "answer")):
        clock.now += seconds
        record = Record(count, -1, 0, count, 0, tokens=(5,) * count, choices=(5,) * 16)
        meter.cycle(Block(cap=count, phase=phase), record, count, Proposal(15))  # type: ignore[arg-type]
    report = totals(meter, "stop", 8, {})
    assert (report.timings.prefill_ms, report.timings.ttft_ms) == (2000, 3000)
    assert {name: part.ms for name, part in report.phases.items()} == {
        "thinking": 3000,
        "answer": 5000,
    }
    assert report.timings.tok_s == pytest.approx(7 / 8)
    assert report.spec.accept_len == pytest.approx(8 / 3)


def test_blocks_in_a_row_share_a_note_and_notes_are_in_order() -> None:
    meter, record = RequestMeter(8, {}), Record(1, -1, 0, 0, 0, tokens=(5,), choices=(5,) * 8)
    capped, gated = Reason("capped", "budget"), Reason("gated", "gate")
    for reason in (capped, capped, gated, capped):
        meter.cycle(Block(cap=1, reasons=(reason,)), record, 1, Proposal(0))
    notes = [(n.what, n.why, n.cycle, n.cycles) for n in totals(meter, "stop", 4, {}).notes]
    assert notes == [
        ("capped", "budget", 0, 2),
        ("gated", "gate", 2, 1),
        ("capped", "budget", 3, 1),
    ]


@pytest.mark.parametrize(
    ("forced", "count", "agreed", "drafted", "want"),
    [
        # Drafts only, at most one in each row but the first. In turn: fewer are committed than
        # agreed, all are committed, one disagreed, fewer than the block can hold were drafted.
        ((), 3, 7, 7, (7, (1, 1, 1, 0, 0, 0, 0), 0)),
        ((), 8, 7, 7, (7, (1, 1, 1, 1, 1, 1, 1), 0)),
        ((), 3, 2, 7, (7, (1, 1, 0, 0, 0, 0, 0), 0)),
        ((), 3, 7, 2, (2, (1, 1, 0, 0, 0, 0, 0), 0)),
        # A forced id takes the place of a draft. It is counted as forced if it was committed.
        ((9, 9, 9), 2, 7, 7, (4, (0, 0, 0, 0, 0, 0, 0), 2)),
        ((-1, 9, -1, 9), 3, 7, 7, (5, (1, 0, 1, 0, 0, 0, 0), 1)),
    ],
)
def test_what_a_block_counts_for(
    forced: tuple[int, ...],
    count: int,
    agreed: int,
    drafted: int,
    want: tuple[int, tuple[int, ...], int],
) -> None:
    meter = RequestMeter(8, {})
    record = Record(count, -1, 0, agreed, 0, tokens=(5,) * count, choices=(5,) * 8)
    meter.cycle(Block(cap=count, forced=forced), record, count, Proposal(drafted))
    report = totals(meter, "length", count, {})
    spec, part = report.spec, report.phases["answer"]
    assert (spec.drafted, spec.accepted_per_position, spec.forced) == want
    assert (part.drafted, part.accepted) == (spec.drafted, spec.accepted) == (want[0], sum(want[1]))
    assert part.committed == count == spec.accept_hist.index(1) + 1


def test_an_id_that_a_grammar_forces_behind_the_drafts_is_the_texts_place() -> None:
    meter, tail = RequestMeter(8, {}), DraftTail((9,) * 4, "session")
    record = Record(6, -1, 0, 6, 0, tokens=(5,) * 6, choices=(5,) * 8)
    block = Block(cap=8, forced=(-1, 9, -1, 9, 9, 9))
    # Rows 0 to 2 are the drafter's, then the text's.
    meter.cycle(block, record, 6, Proposal(7, tail=tail))
    assert totals(meter, "length", 6, {}).spec.sources == {
        "drafter": DraftCounts(1, 2, 2),
        "session": DraftCounts(0, 1, 0),
    }


@pytest.mark.parametrize(
    ("phase", "forced", "softened", "want"),
    [
        ("closing", (5, 6), 0, "hard"),
        ("thinking", (), 0, "natural"),
        ("thinking", (), 1, "soft"),
        # Ids that a grammar forces after the closing mark, in the same block, did not close it.
        ("thinking", (-1, -1, 5, 6), 0, "natural"),
        ("thinking", (-1, -1, 5, 6), 1, "soft"),
    ],
)
def test_how_thinking_closed(
    phase: BlockPhase, forced: tuple[int, ...], softened: int, want: str
) -> None:
    meter, record = (
        RequestMeter(8, {}),
        Record(4, -1, 0, 3, softened, tokens=(5,) * 4, choices=(5,) * 8),
    )
    meter.closed(Block(cap=8, phase=phase, forced=forced), record)
    assert totals(meter, "length", 4, {}).close == want
