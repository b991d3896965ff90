"""Puts the parts of a replay of agent_trace.py together, and checks them against the design.

    python tests/gpu/agent_whole.py TRACE.jsonl REPORT.json ... --tokenizer DIR
        [--without WHOLE.json ...] [--json]

A REPORT.json is what one call of `agent_trace.py --reports` wrote (accept-*.json); of a turn that
is in several, the last one counts. What a turn reads follows from its ids: the whole chunks up to
the last boundary of the turn before are held. Turns that were replayed must have read just that;
turns that were not are given the measured time of a step and of a cycle. A WHOLE.json
(whole-*.json) is a conversation without reuse, which is set beside the same one with it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from support.agent_thor import REFERENCE_S, SHARE, VENDOR_S, cycles_of

from thor_dflash.calib.replay.recorded_trace import RecordedTrace, read_trace
from thor_dflash.calib.replay.replay_report import ReplayReport, ReplayTurn
from thor_dflash.calib.replay.session_replay import TurnEncoder
from thor_dflash.core import strict_records
from thor_dflash.core.errors import RequestError
from thor_dflash.runtime.measure.bench_report import THOR_READ, Figure, table
from thor_dflash.runtime.text.tokenizer import Tokenizer

CYCLE_BYTES, PREFILL_BYTES, TOKEN_BYTES = 16.066e9, 14.871e9, 32_768
"""Bytes of a cycle and of a prefill step without the cache, and of the cache per token: as
agent_trace.py counts them."""
ACCEPTS = (3.5, 4.5, 5.9)
LONG_STEP = 512, 75.2
"""Rows of the prefill step with which a prompt would be read whole, and its ms on an H100:
prompts-diary.json."""


@dataclass(frozen=True, slots=True)
class Work:
    """What one turn has to do."""

    conversation: str
    turn: int
    prompt: int
    held: int
    answer: int

    def steps(self, chunk: int) -> int:
        """Prefill steps: the prompt's last token is read by the first cycle."""
        return -(-(self.prompt - 1 - self.held) // chunk)


@dataclass(frozen=True, slots=True)
class Done:
    """A turn: what it has to do, and what was measured of it, if anything was."""

    work: Work
    turn: ReplayTurn | None


def joined(
    trace: RecordedTrace, encoder: TurnEncoder, chunk: int, reports: Sequence[ReplayReport]
) -> list[Done]:
    """Every turn of the trace. A report begins with an empty memory."""
    found = {(w.conversation, w.turn): Done(w, None) for w in works(trace, encoder, chunk)}
    for report in reports:
        names = {turn.conversation for turn in report.turns}
        part = tuple(one for one in trace.conversations if one.name in names)
        own = {
            (w.conversation, w.turn): w
            for w in works(RecordedTrace(trace.sha256, part), encoder, chunk)
        }
        found |= {
            (t.conversation, t.turn): Done(own[t.conversation, t.turn], t)
            for t in report.turns
            if not t.error
        }
    return list(found.values())


def works(trace: RecordedTrace, encoder: TurnEncoder, chunk: int) -> list[Work]:
    """Every turn, as the design has it: conversations one after the other, and enough memory."""
    found = list[Work]()
    seen: dict[tuple[int, ...], None] = {}
    for conversation in trace.conversations:
        for number, turn in enumerate(conversation.turns, 1):
            text = encoder.encode(conversation, turn)
            ids = text.prompt.ids
            ends = {min(at, len(ids) - 1) // chunk * chunk for at, _ in text.prompt.boundaries}
            begins = (length for length in range(len(ids) - 1, 0, -1) if length % chunk == 0)
            held = next((n for n in begins if ids[:n] in seen), 0)
            found.append(Work(conversation.name, number, len(ids), held, len(text.answer)))
            seen |= {ids[:end]: None for end in ends if end}
    return found


def check(every: Sequence[Done], chunk: int) -> Iterator[Figure]:
    """How many replayed turns did what the design says."""
    pairs = [(done.work, done.turn) for done in every if done.turn is not None]
    same = [
        (w.prompt, w.held, w.answer, w.steps(chunk))
        == (t.prompt_tokens, t.cached_tokens, t.answer_tokens, t.prefill_steps)
        for w, t in pairs
    ]
    yield Figure("design", "turns replayed", len(pairs), "")
    yield Figure(
        "design", "of them with the tokens, steps and answers of the design", sum(same), ""
    )


def whole(turns: Sequence[Done], forced: str, chunk: int) -> Iterator[Figure]:
    """The sums over all turns."""
    section = "whole trace"
    every = [one.work for one in turns]
    read = sum(w.prompt - w.held for w in every)
    done = [one.turn for one in turns if one.turn is not None]
    rest = [one.work for one in turns if one.turn is None]
    step, cycle = _step_ms(done), _cycle_ms(done)
    measured = sum(t.prefill_ms or 0.0 for t in done)
    prefill = (measured + sum(w.steps(chunk) for w in rest) * step) / 1e3
    yield Figure(section, "turns", len(every), "")
    yield Figure(section, "prompt tokens", sum(w.prompt for w in every), "")
    yield Figure(section, "prompt tokens read", read, "")
    yield Figure(section, "prefill steps", sum(w.steps(chunk) for w in every), "")
    yield Figure(section, "answer tokens", sum(w.answer for w in every), "")
    note = f"{len(done)} turns measured, {len(rest)} at {step:.1f} ms a step"
    yield Figure(section, "prefill", prefill, "s", note)
    yield Figure(section, "prefill step, mean", step, "ms")
    yield Figure(section, "cycle, mean", cycle, "ms")
    rows, ms = LONG_STEP
    steps = sum(-(-(w.prompt - 1) // rows) for w in every)
    note = f"{steps:,} steps of {rows} rows, {ms} ms each"
    yield Figure(section, "prefill without reuse, computed", steps * ms / 1e3, "s", note)
    for accept in ACCEPTS:
        cycles = sum(cycles_of(w.answer, accept) for w in every)
        decode = cycles * cycle
        if f"{accept:g}" == forced:
            more = sum(cycles_of(w.answer, accept) for w in rest) * cycle
            decode = sum(t.decode_ms or 0.0 for t in done) + more
        decode /= 1e3
        yield Figure(section, f"cycles at {accept:g}", cycles, "")
        yield Figure(section, f"decode at {accept:g}", decode, "s")
        yield Figure(section, f"prefill and decode at {accept:g}", prefill + decode, "s")


def thor(every: Sequence[Work], chunk: int) -> Iterator[Figure]:
    """A Thor's time for the bytes of the whole trace."""
    section = "predicted on a Jetson Thor"
    steps = sum(w.steps(chunk) * (PREFILL_BYTES + TOKEN_BYTES * w.prompt) for w in every)
    yield Figure(section, "MLPerf's reference (llama.cpp, Q4_K_M), measured by them",
                 REFERENCE_S / 60, "min")  # fmt: skip
    yield Figure(section, "a vendor's, implied", VENDOR_S / 60, "min")
    for label, share in ((f"at {SHARE:.1%} of the read rate", SHARE), ("at all of it", 1.0)):
        rate = THOR_READ * share * 60
        yield Figure(section, f"prefill {label}, at least", steps / rate, "min")
        for accept in ACCEPTS:
            cycles = sum(
                cycles_of(w.answer, accept) * (CYCLE_BYTES + TOKEN_BYTES * w.prompt) for w in every
            )
            yield Figure(section, f"decode at {accept:g} {label}", cycles / rate, "min")
            both = (steps + cycles) / rate
            yield Figure(section, f"both at {accept:g} {label}, at least", both, "min")


def beside(every: Sequence[Done], report: ReplayReport) -> Iterator[Figure]:
    """A conversation without reuse and, of the same turns, with it."""
    keys = {(turn.conversation, turn.turn) for turn in report.turns if not turn.error}
    with_reuse = [
        one.turn
        for one in every
        if one.turn is not None and (one.work.conversation, one.work.turn) in keys
    ]
    names = ", ".join(dict.fromkeys(name for name, _ in keys))
    for label, turns in (("without reuse", report.turns), ("with reuse", with_reuse)):
        section = f"{names}, {label}"
        read = sum((t.prompt_tokens or 0) - (t.cached_tokens or 0) for t in turns)
        yield Figure(section, "turns", len(turns), "")
        yield Figure(section, "prompt tokens read", read, "")
        yield Figure(section, "prefill", sum(t.prefill_ms or 0.0 for t in turns) / 1e3, "s")
        yield Figure(section, "decode", sum(t.decode_ms or 0.0 for t in turns) / 1e3, "s")


def by_turn(turns: Sequence[ReplayTurn]) -> Iterator[Figure]:
    """Medians over the conversations, by the number of the turn."""
    for first, last in ((1, 1), (2, 10), (11, 20), (21, 30), (31, 40), (41, 50), (51, 61)):
        some = [t for t in turns if first <= t.turn <= last and t.ttft_ms is not None]
        if not some:
            continue
        name = f"turn {first}" if first == last else f"turns {first} to {last}"
        prompt = median(t.prompt_tokens or 0 for t in some)
        note = f"prompts of {prompt:,.0f} tokens, median"
        yield Figure("first tokens", name, median(t.ttft_ms or 0.0 for t in some), "ms", note)


def _step_ms(turns: Sequence[ReplayTurn]) -> float:
    return sum(t.prefill_ms or 0.0 for t in turns) / sum(t.prefill_steps or 0 for t in turns)


def _cycle_ms(turns: Sequence[ReplayTurn]) -> float:
    return sum(t.decode_ms or 0.0 for t in turns) / sum(t.cycles or 0 for t in turns)


def main(arguments: list[str] | None = None) -> int:
    """Compute and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("trace", type=Path)
    parser.add_argument("reports", type=Path, nargs="+")
    parser.add_argument("--without", type=Path, nargs="*", default=[])
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    args = parser.parse_args(arguments)
    reports, without = (
        [strict_records.load(ReplayReport, path, RequestError) for path in paths]
        for paths in (args.reports, args.without)
    )
    kinds = {(r.subject.trace, r.subject.forced, r.subject.settings["chunk"]) for r in reports}
    trace = read_trace(args.trace)
    if len(kinds) > 1 or {r.subject.trace for r in (*reports, *without)} != {trace.sha256}:
        parser.error("the reports must be of this trace, with one acceptance and one chunk")
    [(_, forced, size)] = kinds
    chunk = int(size)
    every = joined(trace, TurnEncoder(Tokenizer.load(args.tokenizer)), chunk, reports)
    rows = [
        *check(every, chunk),
        *whole(every, forced, chunk),
        *by_turn([one.turn for one in every if one.turn is not None]),
        *(row for report in without for row in beside(every, report)),
        *thor([one.work for one in every], chunk),
    ]
    print(json.dumps([dataclasses.asdict(r) for r in rows], indent=1) if args.json else table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
