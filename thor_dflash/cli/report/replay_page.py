"""A replay as one HTML file with drawings, which needs no network and no script."""

from __future__ import annotations

import math
from collections import defaultdict
from statistics import median
from typing import TYPE_CHECKING

from thor_dflash.calib.replay.replay_report import (
    TURN_TITLES,
    failed,
    slowest,
    summary,
    turn_row,
)
from thor_dflash.cli.report.drawing import (
    Drawing,
    chart,
    column,
    label_below,
    render,
    ticks,
    y_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from thor_dflash.calib.replay.replay_report import ReplayReport, ReplayTurn

LABELS = 12
"""Most labels of an x axis."""


def page(found: ReplayReport, base: ReplayReport | None = None) -> str:
    """The whole page; with `base`, also its totals and its times to the first token."""
    subject, turns = found.subject, found.turns
    return render(
        "replay.html.jinja",
        subject=subject,
        before=base.subject.target if base else "",
        tiles=_tiles(found),
        totals=(("", "now", "before") if base else ("", ""), summary(found, base)),
        first=_turns(turns, "ms", lambda turn: turn.ttft_ms),
        tokens=_tokens(turns),
        by_turn=_by_turn(turns, base.turns if base else ()),
        lengths=_by_number(turns, "tokens", lambda turn: turn.prompt_tokens),
        accepted=_turns(turns, "tokens", _per_cycle),
        decode=_turns(turns, "ms", lambda turn: turn.decode_ms),
        slowest=(TURN_TITLES, slowest(found)),
        every=(TURN_TITLES, [turn_row(turn) for turn in turns]),
        failed=failed(found),
        missing=found.totals.missing,
        settings={"trace": subject.trace, "version": subject.version, **subject.settings},
    )


def _per_cycle(turn: ReplayTurn) -> float | None:
    return turn.answer_tokens / turn.cycles if turn.answer_tokens and turn.cycles else None


def _tiles(found: ReplayReport) -> dict[str, str]:
    t = found.totals
    tiles = {"s in all": f"{t.wall_s:.0f}"}
    if t.prefill_s is not None:
        tiles["s reading prompts"] = f"{t.prefill_s:.0f}"
    if t.decode_s is not None:
        tiles["s decoding"] = f"{t.decode_s:.0f}"
    if t.ttft_ms is not None:
        tiles["ms to a first token, median"] = f"{t.ttft_ms.p50:.0f}"
        tiles["ms, 99 %"] = f"{t.ttft_ms.p99:.0f}"
    if t.cached_tokens is not None and t.prompt_tokens:
        tiles["of prompt tokens not read"] = f"{t.cached_tokens / t.prompt_tokens:.1%}"
    if t.tokens_per_cycle is not None:
        tiles["tokens a cycle"] = f"{t.tokens_per_cycle:.2f}"
    if t.overlap is not None:
        tiles["overlap of commands"] = f"{t.overlap:.3f}"
    return tiles


def _name(turn: ReplayTurn) -> str:
    return f"{turn.conversation}, turn {turn.turn}"


def _axis(drawing: Drawing, turns: Sequence[ReplayTurn]) -> None:
    """A line and a number where a conversation begins."""
    starts = [i for i, turn in enumerate(turns) if turn.turn == 1]
    for number, i in enumerate(starts):
        x = 100 * i / len(turns)
        drawing.lines.append((x, y_of(1, 1), x, y_of(0, 1), "axis"))
        if number % math.ceil(len(starts) / LABELS) == 0:
            end = starts[number + 1] if number + 1 < len(starts) else len(turns)
            label_below(drawing, 50 * (i + end) / len(turns), str(number + 1))


def _turns(
    turns: Sequence[ReplayTurn], unit: str, value: Callable[[ReplayTurn], float | None]
) -> Drawing | None:
    """A dot for every turn, in the order of the trace."""
    known = [(i, turn, v) for i, turn in enumerate(turns) if (v := value(turn)) is not None]
    if not known:
        return None
    marks = ticks(max(v for _, _, v in known) or 1.0)
    drawing = chart(marks, unit, "conversation")
    _axis(drawing, turns)
    for i, turn, v in known:
        x = 100 * (i + 0.5) / len(turns)
        drawing.dots.append((x, y_of(v, marks[-1]), f"{_name(turn)}: {v:.4g} {unit}"))
    return drawing


def _tokens(turns: Sequence[ReplayTurn]) -> Drawing | None:
    """The prompt of every turn, and of it what was read."""
    most = max((turn.prompt_tokens or 0 for turn in turns), default=0)
    if not most:
        return None
    marks, width = ticks(most, whole=True), 100 / len(turns)
    drawing = chart(marks, "tokens", "conversation")
    _axis(drawing, turns)
    for i, turn in enumerate(turns):
        prompt, cached = turn.prompt_tokens or 0, turn.cached_tokens or 0
        title = f"{_name(turn)}: {prompt - cached} of {prompt} read"
        top = marks[-1]
        drawing.bars.append(column(i * width, width, prompt, top, title, "other"))
        drawing.bars.append(column(i * width, width, prompt - cached, top, title, "bar"))
    return drawing


def _medians(
    turns: Sequence[ReplayTurn], value: Callable[[ReplayTurn], float | None]
) -> Mapping[int, float]:
    by: dict[int, list[float]] = defaultdict(list)
    for turn in turns:
        if (found := value(turn)) is not None:
            by[turn.turn].append(found)
    return {number: median(values) for number, values in sorted(by.items())}


def _by_number(
    turns: Sequence[ReplayTurn],
    unit: str,
    value: Callable[[ReplayTurn], float | None],
    before: Mapping[int, float] | None = None,
) -> Drawing | None:
    """A column for the first turns of all conversations, one for the second, and so on."""
    now = _medians(turns, value)
    if not now:
        return None
    before = before or {}
    marks, count = ticks(max(*now.values(), *before.values(), 1.0)), max(now)
    drawing, step = chart(marks, unit, "turn of a conversation"), 100 / count
    for number, v in now.items():
        x = (number - 1) * step
        title = f"turn {number}: {v:.4g} {unit}"
        drawing.bars.append(column(x, 0.85 * step, v, marks[-1], title, "bar"))
        if (old := before.get(number)) is not None:
            y = y_of(old, marks[-1])
            drawing.lines.append((x, y, x + 0.85 * step, y, "mark"))
        if (number - 1) % math.ceil(count / LABELS) == 0:
            label_below(drawing, x + 0.425 * step, str(number))
    return drawing


def _by_turn(turns: Sequence[ReplayTurn], before: Sequence[ReplayTurn]) -> Drawing | None:
    def value(turn: ReplayTurn) -> float | None:
        return turn.ttft_ms

    return _by_number(turns, "ms", value, _medians(before, value))
