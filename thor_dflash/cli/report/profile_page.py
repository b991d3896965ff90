"""A profile as one HTML file with drawings, which needs no network and no script."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from thor_dflash.cli.report.drawing import (
    Drawing,
    axis_number,
    chart,
    column,
    label_below,
    render,
    rows,
    ticks,
    y_of,
)
from thor_dflash.cli.report.profile_text import TITLES, change, course, head, span_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from thor_dflash.runtime.measure.profile import CycleBreakdown, Profile, Spread, Stretch

COLUMNS, RUNS = 16, 10
"""Most labels of an axis."""


def page(found: Profile, base: Profile | None = None) -> str:
    """The whole page; with `base`, also the change of its medians."""
    subject, cycles = found.subject, max(1, found.spec.cycles)
    rates = [round(100 * count / cycles) for count in found.spec.accepted_per_position]
    runs = sorted({stretch.runs for stretch in found.soak})
    return render(
        "profile.html.jinja",
        found=found,
        head=head(found),
        tiles=_tiles(found),
        times=_times(found.times, base.times if base else {}),
        runs=_dots(found.times["e2e_ms"]),
        timeline=_timeline(found),
        phases=rows(
            (name, phase.ms, f"{phase.ms:.2f} ({phase.share:.1%})", bool(phase.cycle_ms), 0.0)
            for name, phase in found.phases.items()
        ),
        inside=_inside(found.inside) if found.inside else None,
        rails=[
            (rail.name, *(f"{x:.2f}" for x in (rail.idle_w, rail.mean_w, rail.joules)),
             f"{rail.joules / max(1, found.tokens):.3f}")
            for rail in found.power.rails
        ],
        soak=_soak(found.soak) if found.soak else {},
        soak_caption=f"{' or '.join(map(str, dict.fromkeys((*runs[:1], *runs[-1:]))))} runs a bar.",
        course=course(found.soak) if found.soak else (),
        committed=_columns(found.spec.accept_hist, "cycles", "tokens committed in a cycle"),
        right=_columns(rates, "%", "position in the block", 100.0),
        settings={"package": subject.package, "prompt": subject.prompt, **subject.machine,
                  **subject.settings},
    )  # fmt: skip


def _tiles(found: Profile) -> dict[str, str]:
    times = found.times
    return {
        "tokens/s, decoding": f"{times['tok_s'].median:.1f}",
        "ms to the first token": f"{times['ttft_ms'].median:.0f}",
        "ms a cycle": f"{times['cycle_ms'].median:.2f}",
        "tokens a cycle": f"{found.spec.accept_len:.2f}",
        **{f"J an answer, {rail.name}": f"{rail.joules:.1f}" for rail in found.power.rails},
    }


def _times(
    times: Mapping[str, Spread], before: Mapping[str, Spread]
) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    titles = ("", "median", "least", "90 %", "99 %", "most", *(["before"] if before else []))
    rows: list[tuple[str, ...]] = []
    for name, title in TITLES.items():
        s = times[name]
        numbers = (f"{x:.2f}" for x in (s.median, s.low, s.p90, s.p99, s.high))
        rows.append((title, *numbers, *([change(s, before[name])] if before else [])))
    return titles, rows


# ---- drawings ------------------------------------------------------------------------------------
def _dots(spread: Spread) -> Drawing:
    """Runs from left to right. The scale begins at zero, so that little variation looks little."""
    marks, n = ticks(spread.high or 1.0), len(spread.values)
    drawing = chart(marks, "ms", "run")
    y = y_of(spread.median, marks[-1])
    drawing.lines.append((0, y, 100, y, "mark"))
    for i, value in enumerate(spread.values):
        x = 100 * (i + 0.5) / n
        drawing.dots.append((x, y_of(value, marks[-1]), f"run {i + 1}: {value:.2f}"))
        if i % math.ceil(n / RUNS) == 0:
            label_below(drawing, x, str(i + 1))
    return drawing


def _spans(
    spans: Sequence[tuple[float, float, float, str, str]], unit: str, below: str, *, whole: bool
) -> Drawing:
    """Stretches of time (start, end, value, tooltip, kind) as bars on a time axis from 0."""
    end_of_all = spans[-1][1] or 1.0
    marks = ticks(max(value for _, _, value, _, _ in spans) or 1.0, whole=whole)
    drawing, scale = chart(marks, unit, below), 100 / end_of_all
    for start, end, value, title, kind in spans:
        width = max(0.05, (end - start) * scale)
        drawing.bars.append(column(start * scale, width, value, marks[-1], title, kind))
    for at in ticks(end_of_all):
        if at <= end_of_all:
            label_below(drawing, at * scale, axis_number(at))
    return drawing


def _timeline(found: Profile) -> Drawing:
    from thor_dflash.runtime.measure.profile import steps

    most = max((end.tokens for end in found.timeline), default=0) or 1
    spans: list[tuple[float, float, float, str, str]] = []
    for name, start, end in steps(found):
        kind, what = ("bar", f"{end.tokens} tokens") if end.tokens else ("other", name)
        title = f"{what}, {end.ms - start.ms:.2f} ms from {start.ms:.1f}"
        spans.append((start.ms, end.ms, end.tokens or most, title, kind))
    return _spans(spans, "tokens", "ms since the request", whole=True)


def _columns(counts: Sequence[int], unit: str, below: str, top: float = 0.0) -> Drawing | None:
    """A column for each count, labelled from 1 on. `top` of the y axis; 0: the largest count."""
    most = max(counts, default=0)
    if not most:
        return None
    marks, n = ticks(top or most, whole=True), len(counts)
    drawing, step = chart(marks, unit, below), 100 / n
    for i, count in enumerate(counts):
        title = f"{i + 1}: {count}"
        drawing.bars.append(column(i * step, 0.85 * step, count, marks[-1], title, "bar"))
        if i % math.ceil(n / COLUMNS) == 0:
            label_below(drawing, (i + 0.425) * step, str(i + 1))
    return drawing


def _inside(inside: CycleBreakdown) -> Drawing:
    rate = inside.read_rate
    return rows(
        (
            part.graph if not part.name else "\N{NO-BREAK SPACE}" * 3 + part.name,
            part.ms,
            f"{part.ms:.3f}",
            bool(part.name),
            1e3 * part.nbytes / rate if rate else 0.0,
        )
        for part in inside.parts
    )


def _soak(soak: Sequence[Stretch]) -> dict[str, Drawing]:
    values = {
        "a cycle, ms": [s.cycle_ms for s in soak],
        **{f"{rail}, W": [s.watts[rail] for s in soak] for rail in soak[0].watts},
    }
    if all(s.hottest_c is not None for s in soak):
        values["junction, °C"] = [s.hottest_c or 0.0 for s in soak]
    return {
        name: _spans(
            [
                (s.start_s, s.end_s, value, f"{value:.2f}, {span_of(s)}", "bar")
                for s, value in zip(soak, numbers, strict=True)
            ],
            name.rpartition(", ")[2],
            "s",
            whole=False,
        )
        for name, numbers in values.items()
    }
