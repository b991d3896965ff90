"""What a replay measured: one row per turn, totals, and how both are compared and printed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from thor_dflash.core.message_text import visible
from thor_dflash.core.progress import amount
from thor_dflash.core.text_table import columns


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayTurn:
    """One turn. None: not known."""

    conversation: str
    turn: int
    """Within its conversation, from 1."""
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    """Prompt tokens that were not read."""
    answer_tokens: int | None = None
    prefill_steps: int | None = None
    prefill_ms: float | None = None
    ttft_ms: float | None = None
    """To the first text, thinking or part of a call."""
    decode_ms: float | None = None
    """In process from the end of the prefill, over HTTP from the first to the last piece."""
    swap_ms: float | None = None
    """Enqueuing the copies of kept states, before the prefill."""
    cycles: int | None = None
    boundary: str = ""
    """What it continued from: prefix, system, user or prompt."""
    why: str = ""
    """Why nothing was reused."""
    finish: str = ""
    """`forced`: the ids of the recorded answer were committed; nothing here is the model's."""
    calls: int | None = None
    """Tool calls in the answer."""
    overlap: float | None = None
    """Programs in common with the recorded calls: see command_overlap."""
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaySubject:
    """What was replayed, and how."""

    version: str
    trace: str
    """sha256 of the file."""
    conversations: int
    turns: int
    target: str
    """Engine and device, or the address of a server."""
    forced: str = ""
    """Assumed tokens per cycle, or `drafter`; empty: answers are the model's."""
    thinking: bool = False
    settings: Mapping[str, str] = field(default_factory=dict[str, str])
    notes: tuple[str, ...] = ()
    """What a reader must know about the numbers."""

    def differs(self, later: ReplaySubject) -> list[str]:
        """What makes a later replay incomparable."""
        pairs: Mapping[str, tuple[object, object]] = {
            "trace": (self.trace[:12], later.trace[:12]),
            "conversations": (self.conversations, later.conversations),
            "turns": (self.turns, later.turns),
            "thinking": (self.thinking, later.thinking),
        }
        return [f"{name} {a}, now {b}" for name, (a, b) in pairs.items() if a != b]


@dataclass(frozen=True, slots=True)
class ReplaySpread:
    """Percentiles: the smallest value that at least that share of the values does not exceed."""

    p50: float
    p90: float
    p99: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayTotals:
    """Sums over the turns that were answered. None: not known of every turn."""

    wall_s: float
    answered: int
    missing: int
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    answer_tokens: int | None = None
    prefill_steps: int | None = None
    prefill_s: float | None = None
    decode_s: float | None = None
    cycles: int | None = None
    ttft_ms: ReplaySpread | None = None
    tokens_per_cycle: float | None = None
    overlap: float | None = None
    """Mean over the turns that have one."""

    @property
    def read_tokens(self) -> int | None:
        """Prompt tokens that were read."""
        if self.prompt_tokens is None or self.cached_tokens is None:
            return None
        return self.prompt_tokens - self.cached_tokens


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """A whole replay."""

    subject: ReplaySubject
    totals: ReplayTotals
    turns: tuple[ReplayTurn, ...]


def totals(turns: Sequence[ReplayTurn], expected: int, wall_s: float) -> ReplayTotals:
    """Sum the turns of a replay of `expected` turns."""
    good = [turn for turn in turns if not turn.error]
    cycles, tokens = _sum(good, "cycles"), _sum(good, "answer_tokens")
    prefill, decode = _sum(good, "prefill_ms"), _sum(good, "decode_ms")
    shares = [turn.overlap for turn in good if turn.overlap is not None]
    return ReplayTotals(
        wall_s=wall_s,
        answered=len(good),
        missing=expected - len(good),
        prompt_tokens=_int(_sum(good, "prompt_tokens")),
        cached_tokens=_int(_sum(good, "cached_tokens")),
        answer_tokens=_int(tokens),
        prefill_steps=_int(_sum(good, "prefill_steps")),
        prefill_s=None if prefill is None else 1e-3 * prefill,
        decode_s=None if decode is None else 1e-3 * decode,
        cycles=_int(cycles),
        ttft_ms=spread([turn.ttft_ms for turn in good if turn.ttft_ms is not None]),
        tokens_per_cycle=tokens / cycles if tokens is not None and cycles else None,
        overlap=sum(shares) / len(shares) if shares else None,
    )


FIELDS: Mapping[str, Callable[[ReplayTurn], float | None]] = {
    "prompt_tokens": lambda turn: turn.prompt_tokens,
    "cached_tokens": lambda turn: turn.cached_tokens,
    "answer_tokens": lambda turn: turn.answer_tokens,
    "prefill_steps": lambda turn: turn.prefill_steps,
    "prefill_ms": lambda turn: turn.prefill_ms,
    "decode_ms": lambda turn: turn.decode_ms,
    "cycles": lambda turn: turn.cycles,
}


def _sum(turns: Iterable[ReplayTurn], name: str) -> float | None:
    values = [FIELDS[name](turn) for turn in turns]
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


def _int(value: float | None) -> int | None:
    return None if value is None else int(value)


def spread(values: Sequence[float]) -> ReplaySpread | None:
    """The percentiles; None of nothing."""
    if not values:
        return None
    ordered = sorted(values)

    def at(share: float) -> float:
        return ordered[max(0, math.ceil(share * len(ordered)) - 1)]

    return ReplaySpread(at(0.5), at(0.9), at(0.99), ordered[-1])


# ---- text ----------------------------------------------------------------------------------------
SLOWEST = 10
"""Turns that are listed."""


def summary(report: ReplayReport, base: ReplayReport | None = None) -> list[tuple[str, ...]]:
    """Rows of name and value; with `base`, also its value."""
    rows = _rows(report.totals)
    if base is None:
        return [(name, value) for name, value in rows.items()]
    before = _rows(base.totals)
    return [(name, value, before.get(name, "")) for name, value in rows.items()]


def _rows(t: ReplayTotals) -> dict[str, str]:
    hits = t.cached_tokens / t.prompt_tokens if t.cached_tokens and t.prompt_tokens else None
    ttft = t.ttft_ms
    rows: dict[str, str | None] = {
        "wall time, s": f"{t.wall_s:.1f}",
        "prefill, s": _text(t.prefill_s, ".1f"),
        "decode, s": _text(t.decode_s, ".1f"),
        "turns answered": f"{t.answered}" + (f", {t.missing} missing" if t.missing else ""),
        "prompt tokens": _text(t.prompt_tokens, ","),
        "of them read": _text(t.read_tokens, ","),
        "not read, share": _text(hits, ".1%"),
        "prefill steps": _text(t.prefill_steps, ","),
        "answer tokens": _text(t.answer_tokens, ","),
        "cycles": _text(t.cycles, ","),
        "tokens per cycle": _text(t.tokens_per_cycle, ".2f"),
        "time to first token, ms: p50": _text(ttft.p50 if ttft else None, ".0f"),
        "p90": _text(ttft.p90 if ttft else None, ".0f"),
        "p99": _text(ttft.p99 if ttft else None, ".0f"),
        "most": _text(ttft.high if ttft else None, ".0f"),
        "overlap of commands": _text(t.overlap, ".4f"),
    }
    return {name: value for name, value in rows.items() if value is not None}


def _text(value: float | None, form: str) -> str | None:
    return None if value is None else format(value, form)


TURN_TITLES = (
    "conversation", "turn", "prompt", "read", "answer", "first token, ms", "decode, ms", "from",
    "end",
)  # fmt: skip


def slowest(report: ReplayReport) -> list[tuple[str, ...]]:
    """The turns with the longest time to the first token, as TURN_TITLES has the columns."""
    known = [turn for turn in report.turns if turn.ttft_ms is not None]
    known.sort(key=lambda turn: -(turn.ttft_ms or 0.0))
    return [turn_row(turn) for turn in known[:SLOWEST]]


def failed(report: ReplayReport) -> list[tuple[str, str, str]]:
    """Conversation, turn and error of the turns that failed."""
    return [(t.conversation, str(t.turn), t.error) for t in report.turns if t.error]


def turn_row(turn: ReplayTurn) -> tuple[str, ...]:
    """One turn in columns."""
    read = None
    if turn.prompt_tokens is not None and turn.cached_tokens is not None:
        read = turn.prompt_tokens - turn.cached_tokens
    cells: list[Any] = [turn.prompt_tokens, read, turn.answer_tokens]
    times = [_text(turn.ttft_ms, ".0f"), _text(turn.decode_ms, ".0f")]
    source = turn.boundary or turn.why
    every = [turn.conversation, turn.turn, *cells, *times, source, turn.finish]
    return tuple("" if cell is None else str(cell) for cell in every)


def text(report: ReplayReport, base: ReplayReport | None = None) -> str:
    """The report as plain text."""
    s = report.subject
    counts = f"{amount(s.conversations, 'conversations')}, {amount(s.turns, 'turns')}"
    lines = [f"{s.target}: {counts}"]
    if s.forced:
        lines.append(f"answers forced from the trace, assumed tokens per cycle: {s.forced}")
    lines += [f"note: {note}" for note in s.notes]
    if base and base.subject.target != s.target:
        lines.append(f"before: {visible(base.subject.target)}")
    lines += ["", *columns([*([("", "now", "before")] if base else []), *summary(report, base)])]
    if rows := slowest(report):
        lines += ["", "slowest first tokens", *columns([TURN_TITLES, *rows])]
    if errors := failed(report):
        lines += ["", "errors", *(f"{name} {turn}: {error}" for name, turn, error in errors[:10])]
    return "\n".join(lines)
