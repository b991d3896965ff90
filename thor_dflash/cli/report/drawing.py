"""Charts as shapes, which parts.html.jinja writes as SVG."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, FileSystemLoader

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

TEMPLATES = Path(__file__).parent
HEIGHT, TOP, LOW = 176, 24, 42
"""Height of a chart, and what its unit above and its labels below take of it, px. Only heights are
fixed: every x is a percentage of the page, so a phone shows the same text and thinner bars."""
ROW = 36
"""Height of a horizontal bar with its name and number above it, px."""


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
"""x, y, text, CSS class: `start`, `middle` or `end` of the text is at x; `left`: it is left of the
chart; `name` of a bar."""


@dataclass(slots=True)
class Drawing:
    """The shapes of an SVG. x and widths: % of its width; y and heights: px."""

    height: float = HEIGHT
    kind: str = "chart"
    lines: list[Line] = field(default_factory=list[Line])
    bars: list[SvgBar] = field(default_factory=list[SvgBar])
    dots: list[Dot] = field(default_factory=list[Dot])
    labels: list[Label] = field(default_factory=list[Label])


def render(template: str, **values: Any) -> str:
    """A page of this folder's templates."""
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template(template).render(**values)


def ticks(top: float, *, whole: bool = False) -> list[float]:
    """Round values from 0 to `top` or the next one above it, about four apart."""
    step = 10.0 ** math.floor(math.log10(top / 4))
    step = next(step * factor for factor in (1, 2, 5, 10) if step * factor >= top / 4)
    if whole:
        step = max(1.0, step)
    return [i * step for i in range(math.ceil(top / step * (1 - 1e-9)) + 1)]


def axis_number(value: float) -> str:
    """At most six characters (below a million), which fit the margin."""
    return f"{value:.0f}" if value >= 1000 else f"{value:.4g}"


def chart(marks: Sequence[float], unit: str, below: str) -> Drawing:
    """A chart with a line and its value at each mark of the y axis, and what its axes show."""
    drawing = Drawing()
    for value in marks:
        y = y_of(value, marks[-1])
        drawing.lines.append((0, y, 100, y, "axis"))
        drawing.labels.append((0, y + 4, axis_number(value), "left"))
    drawing.labels.append((0, TOP - 12, unit, "start"))
    drawing.labels.append((100, HEIGHT - 4, below, "end"))
    return drawing


def y_of(value: float, top: float) -> float:
    """Where a value is in a chart whose y axis ends at `top`, px."""
    return (HEIGHT - LOW) - (HEIGHT - LOW - TOP) * value / top


def label_below(drawing: Drawing, x: float, text: str) -> None:
    """Label the x axis."""
    drawing.labels.append((x, HEIGHT - LOW + 16, text, "middle"))


def column(x: float, width: float, value: float, top: float, title: str, kind: str) -> SvgBar:
    """A bar from the x axis up to a value."""
    y = y_of(max(0.0, value), top)
    return SvgBar(x, y, width, HEIGHT - LOW - y, title, kind)


def rows(listed: Iterable[tuple[str, float, str, bool, float]]) -> Drawing:
    """Horizontal bars: name, length, number, whether coloured, position of a mark (0: none)."""
    bars = list(listed)
    top = max((max(length, mark) for _, length, _, _, mark in bars), default=0.0) or 1.0
    drawing, scale = Drawing(len(bars) * ROW, "rows"), 100 / top
    for i, (name, length, number, coloured, mark) in enumerate(bars):
        y = i * ROW
        kind = "bar" if coloured else "other"
        width = max(0.05, length * scale)
        drawing.bars.append(SvgBar(0, y + 20, width, 10, f"{name}: {number}", kind))
        drawing.labels.append((0, y + 15, name, "name"))
        drawing.labels.append((100, y + 15, number, "end"))
        if mark:
            drawing.lines.append((mark * scale, y + 17, mark * scale, y + 33, "mark"))
    return drawing
