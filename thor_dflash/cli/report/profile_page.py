"""A profile as one HTML file with drawings, which needs no network and no script."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from thor_dflash.cli.report.profile_text import TITLES, change, course, head, span_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from thor_dflash.runtime.measure.profile import CycleBreakdown, Profile, Spread, Stretch

TEMPLATE = Path(__file__).with_name("profile.html.jinja")
WIDTH, HEIGHT = 860, 150
"""Size of a drawing in SVG units; it is scaled to the page."""
LEFT, LOW = 50, 22
"""Margins for the labels left of and below it."""
ROW = 24
"""Height of a horizontal bar, including the gap to the next one."""
GAP = 1
"""Gap between neighbours in time."""
LABELS, NUMBERS = 300, 120
"""Widths of a horizontal bar's name and of its number."""


@dataclass(frozen=True, slots=True)
class SvgBar:
    """A bar of a drawing. `kind` is its CSS class, `title` its tooltip."""

    x: float
    y: float
    width: float
    height: float
    title: str
    kind: str = "bar"


Line = tuple[float, float, float, float, str]
"""x1, y1, x2, y2, CSS class."""
Dot = tuple[float, float, str]
"""x, y, tooltip."""
Label = tuple[float, float, str, str]
"""x, y, text, anchor; "name" for the name of a bar."""


@dataclass(slots=True)
class Drawing:
    """The shapes of an SVG, in its units."""

    height: float = HEIGHT
    lines: list[Line] = field(default_factory=list[Line])
    bars: list[SvgBar] = field(default_factory=list[SvgBar])
    dots: list[Dot] = field(default_factory=list[Dot])
    labels: list[Label] = field(default_factory=list[Label])


def page(found: Profile, base: Profile | None = None) -> str:
    """The whole page; with `base`, also the change of its medians."""
    from jinja2 import Environment

    environment = Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    subject, cycles = found.subject, max(1, found.spec.cycles)
    rates = [round(100 * count / cycles) for count in found.spec.accepted_per_position]
    runs = sorted({stretch.runs for stretch in found.soak})
    return template.render(
        found=found,
        width=WIDTH,
        head=head(found),
        tiles=_tiles(found),
        times=_times(found.times, base.times if base else {}),
        runs=_dots(found.times["e2e_ms"]),
        timeline=_timeline(found),
        phases=_rows(
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
        committed=_columns(found.spec.accept_hist),
        right=_columns(rates),
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
def _chart(top: float) -> Drawing:
    """A drawing with lines and labels at zero and at the top value."""
    drawing = Drawing()
    for value in (0.0, top):
        y = _y(value, top)
        drawing.lines.append((LEFT, y, WIDTH, y, "axis"))
        # At most six characters (below a million), which fit the margin.
        text = f"{value:.0f}" if value >= 1000 else f"{value:.4g}"
        drawing.labels.append((LEFT - 6, y + 4, text, "end"))
    return drawing


def _y(value: float, top: float) -> float:
    return (HEIGHT - LOW) - (HEIGHT - LOW - 12) * value / top


def _column(x: float, width: float, value: float, top: float, title: str, kind: str) -> SvgBar:
    y = _y(max(0.0, value), top)
    return SvgBar(x, y, width, HEIGHT - LOW - y, title, kind)


def _dots(spread: Spread) -> Drawing:
    """Runs from left to right. The scale begins at zero, so that little variation looks little."""
    top = spread.high or 1.0
    drawing, step = _chart(top), (WIDTH - LEFT) / len(spread.values)
    y = _y(spread.median, top)
    drawing.lines.append((LEFT, y, WIDTH, y, "mark"))
    for i, value in enumerate(spread.values):
        drawing.dots.append((LEFT + (i + 0.5) * step, _y(value, top), f"run {i + 1}: {value:.2f}"))
    return drawing


def _spans(spans: Sequence[tuple[float, float, float, str, str]], unit: str) -> Drawing:
    """Stretches of time (start, end, value, tooltip, kind) as bars on a time axis from 0."""
    whole = spans[-1][1] or 1.0
    top = max(value for _, _, value, _, _ in spans) or 1.0
    drawing, scale = _chart(top), (WIDTH - LEFT) / whole
    for start, end, value, title, kind in spans:
        width = max(0.3, (end - start) * scale - GAP)
        drawing.bars.append(_column(LEFT + start * scale, width, value, top, title, kind))
    drawing.labels.append((LEFT, HEIGHT - 6, "0", "start"))
    drawing.labels.append((WIDTH, HEIGHT - 6, f"{whole:.0f} {unit}", "end"))
    return drawing


def _timeline(found: Profile) -> Drawing:
    from thor_dflash.runtime.measure.profile import steps

    most = max((end.tokens for end in found.timeline), default=0) or 1
    spans: list[tuple[float, float, float, str, str]] = []
    for name, start, end in steps(found):
        kind, what = ("bar", f"{end.tokens} tokens") if end.tokens else ("other", name)
        title = f"{what}, {end.ms - start.ms:.2f} ms from {start.ms:.1f}"
        spans.append((start.ms, end.ms, end.tokens or most, title, kind))
    return _spans(spans, "ms")


def _columns(counts: Sequence[int]) -> Drawing | None:
    """A column for each count, labelled from 1 on."""
    top = max(counts, default=0)
    if not top:
        return None
    drawing, step = _chart(top), (WIDTH - LEFT) / len(counts)
    for i, count in enumerate(counts):
        x = LEFT + i * step
        drawing.bars.append(_column(x, 0.85 * step, count, top, f"{i + 1}: {count}", "bar"))
        drawing.labels.append((x + 0.42 * step, HEIGHT - 6, str(i + 1), "middle"))
    return drawing


def _rows(rows: Iterable[tuple[str, float, str, bool, float]]) -> Drawing:
    """Horizontal bars: name, length, number, whether coloured, position of a mark (0: none)."""
    bars = list(rows)
    top = max((length for _, length, *_ in bars), default=0.0) or 1.0
    drawing, scale = Drawing(len(bars) * ROW), (WIDTH - LABELS - NUMBERS) / top
    for i, (name, length, number, coloured, mark) in enumerate(bars):
        y, long = i * ROW, max(0.5, length * scale)
        kind = "bar" if coloured else "other"
        drawing.bars.append(SvgBar(LABELS, y + 4, long, ROW - 8, f"{name}: {number}", kind))
        drawing.labels.append((0, y + 16, name, "name"))
        drawing.labels.append((LABELS + long + 6, y + 16, number, "start"))
        if mark:
            x = LABELS + mark * scale
            drawing.lines.append((x, y + 1, x, y + ROW - 1, "mark"))
    return drawing


def _inside(inside: CycleBreakdown) -> Drawing:
    rate = inside.read_rate
    return _rows(
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
            "s",
        )
        for name, numbers in values.items()
    }
