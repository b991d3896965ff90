"""A profile as one HTML file with drawings, which needs no network and no script."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from thor_dflash.cli.report.profile_text import TITLES, change, course, head, span_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from thor_dflash.runtime.measure.profile import (
        CycleBreakdown,
        Profile,
        ProfilePhase,
        Spread,
        Stretch,
    )

WIDTH, HEIGHT = 860, 150
"""Size of a drawing in SVG units; it is scaled to the page."""
LEFT, LOW = 50, 22
"""Margins for the labels left of and below it."""
ROW = 24
"""Height of a bar, including the gap to the next one."""
GAP = 1
"""Gap between neighbours in time."""
LABELS, NUMBERS = 300, 120
"""Widths of a bar's name and of its number."""
STYLE = """
:root { --page: #fff; --ink: #1c2128; --soft: #667080; --line: #d8dde4; --bar: #2f6fb4;
  --other: #b9c4d0; --mark: #c2571a; }
@media (prefers-color-scheme: dark) { :root { --page: #14181d; --ink: #e4e8ed; --soft: #98a3b0;
  --line: #333b45; --bar: #5b9be0; --other: #4a5664; --mark: #f0904f; } }
body { background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, sans-serif;
  max-width: 920px; margin: 2em auto; padding: 0 1em; }
h1 { font-size: 1.3em; } h2 { font-size: 1.05em; margin: 2em 0 .3em; }
p, figcaption { color: var(--soft); margin: .2em 0; } figure { margin: 0; }
.tiles { display: flex; flex-wrap: wrap; gap: .8em; margin: 1em 0; }
.tiles div { border: 1px solid var(--line); border-radius: 6px; padding: .5em 1em; }
.tiles b { display: block; font-size: 1.5em; }
.note { border-left: 3px solid var(--mark); padding-left: .8em; color: var(--ink); }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
td, th { padding: .1em .9em .1em 0; text-align: right; font-weight: normal; }
td:first-child, th:first-child { text-align: left; } th { color: var(--soft); }
svg { width: 100%; height: auto; display: block; }
svg text { font-size: 13px; fill: var(--soft); } svg .name { fill: var(--ink); }
.bar { fill: var(--bar); } .other { fill: var(--other); } .mark { stroke: var(--mark); }
.axis { stroke: var(--line); } .mark { stroke-width: 2; }
"""


def page(found: Profile, base: Profile | None = None) -> str:
    """The whole page; with `base`, also the change of its medians."""
    first, second = map(escape, head(found))
    spec = found.spec
    cycles = max(1, spec.cycles)
    rates = [count / cycles for count in spec.accepted_per_position]
    parts = [
        f"<h1>thor-dflash profile</h1><p>{first}</p><p>{second}</p>",
        _tiles(found),
        *(f'<p class="note">{escape(text)}</p>' for text in found.warnings),
        _times(found.times, base.times if base else {}),
        _figure("Every run", "Whole answer, ms; the line is the median.",
                _dots(found.times["e2e_ms"])),
        _figure("The last answer, by the clock", "Committed tokens of each cycle over ms since the "
                "request; grey: the prompt is read.", _timeline(found)),
        _figure("Where its time goes", "Median of the runs, ms, and the share of the time of all "
                "runs; grey: the prompt is read, or the host works.", _phases(found)),
        *_inside(found.inside),
        *_power(found),
        *_soak(found.soak),
        _figure("Committed tokens of a cycle", f"How many of {spec.cycles} cycles committed so "
                "many.", _columns(spec.accept_hist, 1)),
        _figure("Drafts that were right", "Share of cycles that committed the draft at each "
                "position of the block, %.", _columns([round(100 * r) for r in rates], 1)),
        _settings(found),
    ]  # fmt: skip
    body = "\n".join(part for part in parts if part)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>thor-dflash profile</title><style>{STYLE}</style></head>\n"
        f"<body>\n{body}\n</body></html>\n"
    )


def _tiles(found: Profile) -> str:
    times = found.times
    told = {
        "tokens/s, decoding": f"{times['tok_s'].median:.1f}",
        "ms to the first token": f"{times['ttft_ms'].median:.0f}",
        "ms a cycle": f"{times['cycle_ms'].median:.2f}",
        "tokens a cycle": f"{found.spec.accept_len:.2f}",
    }
    for rail in found.power.rails:
        told[f"J an answer, {rail.name}"] = f"{rail.joules:.1f}"
    boxes = "".join(f"<div><b>{value}</b>{escape(name)}</div>" for name, value in told.items())
    return f'<div class="tiles">{boxes}</div>'


def _times(times: Mapping[str, Spread], before: Mapping[str, Spread]) -> str:
    names = ("", "median", "least", "90 %", "99 %", "most", *(["before"] if before else []))
    rows: list[tuple[str, ...]] = []
    for name, title in TITLES.items():
        s = times[name]
        numbers = (f"{x:.2f}" for x in (s.median, s.low, s.p90, s.p99, s.high))
        rows.append((title, *numbers, *([change(s, before[name])] if before else [])))
    return f"<h2>An answer</h2>{_table(names, rows)}"


def _table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    heads = "".join(f"<th>{escape(name)}</th>" for name in names)
    lines = ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows]
    return f"<table><tr>{heads}</tr>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def _figure(title: str, caption: str, drawing: str) -> str:
    if not drawing:
        return ""
    return (
        f"<h2>{escape(title)}</h2><figure><figcaption>{escape(caption)}</figcaption>"
        f"{drawing}</figure>"
    )


def _svg(height: float, shapes: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img">{"".join(shapes)}</svg>'


# ---- drawings ------------------------------------------------------------------------------------
def _dots(spread: Spread) -> str:
    """Runs from left to right. The scale begins at zero, so that little variation looks little."""
    top = spread.high or 1.0
    step = (WIDTH - LEFT) / len(spread.values)
    shapes = list(_scale(top))
    y = _height(spread.median, top)
    shapes.append(f'<line class="mark" x1="{LEFT}" x2="{WIDTH}" y1="{y:.1f}" y2="{y:.1f}"/>')
    for i, value in enumerate(spread.values):
        x, y = LEFT + (i + 0.5) * step, _height(value, top)
        shapes.append(
            f'<circle class="bar" cx="{x:.1f}" cy="{y:.1f}" r="4"><title>run {i + 1}: '
            f"{value:.2f}</title></circle>"
        )
    return _svg(HEIGHT, shapes)


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of time, drawn as a bar whose height is `value`."""

    start: float
    end: float
    value: float
    told: str
    """Tooltip."""
    kind: str = "bar"


def _spans(spans: Sequence[Span], unit: str) -> str:
    """Spans side by side on a time axis that begins at 0."""
    whole = spans[-1].end or 1.0
    top = max(span.value for span in spans) or 1.0
    scale = (WIDTH - LEFT) / whole
    shapes = list(_scale(top))
    for span in spans:
        y = _height(max(0.0, span.value), top)
        shapes.append(
            f'<rect class="{span.kind}" x="{LEFT + span.start * scale:.2f}" y="{y:.1f}" '
            f'width="{max(0.3, (span.end - span.start) * scale - GAP):.2f}" '
            f'height="{HEIGHT - LOW - y:.1f}"><title>{escape(span.told)}</title></rect>'
        )
    end = _text(WIDTH, HEIGHT - 6, f"{whole:.0f} {unit}", "end")
    return _svg(HEIGHT, [*shapes, _text(LEFT, HEIGHT - 6, "0"), end])


def _timeline(found: Profile) -> str:
    from thor_dflash.runtime.measure.profile import steps

    most = max((beat.tokens for beat in found.timeline), default=0) or 1
    spans: list[Span] = []
    for name, start, end in steps(found):
        kind, what = ("bar", f"{end.tokens} tokens") if end.tokens else ("other", name)
        told = f"{what}, {end.ms - start.ms:.2f} ms from {start.ms:.1f}"
        spans.append(Span(start.ms, end.ms, end.tokens or most, told, kind))
    return _spans(spans, "ms")


def _columns(counts: Sequence[int], first: int) -> str:
    """A column for each count, labelled `first`, `first` + 1, ..."""
    top = max(counts, default=0)
    if not top:
        return ""
    step = (WIDTH - LEFT) / len(counts)
    shapes = list(_scale(top))
    for i, count in enumerate(counts):
        x, y = LEFT + i * step, _height(count, top)
        shapes.append(
            f'<rect class="bar" x="{x:.1f}" y="{y:.1f}" width="{0.85 * step:.1f}" '
            f'height="{HEIGHT - LOW - y:.1f}"><title>{first + i}: {count}</title></rect>'
        )
        shapes.append(_text(x + 0.42 * step, HEIGHT - 6, str(first + i), "middle"))
    return _svg(HEIGHT, shapes)


def _scale(top: float) -> Iterator[str]:
    """Lines and labels at zero and at the top value."""
    for value in (0.0, top):
        y = _height(value, top)
        yield f'<line class="axis" x1="{LEFT}" x2="{WIDTH}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield _text(LEFT - 6, y + 4, _short(value), "end")


def _short(value: float) -> str:
    """A number in at most six characters (below a million), which fit the margin."""
    return f"{value:.0f}" if value >= 1000 else f"{value:.4g}"


def _height(value: float, top: float) -> float:
    return (HEIGHT - LOW) - (HEIGHT - LOW - 12) * value / top


def _text(x: float, y: float, text: str, anchor: str = "start", kind: str = "") -> str:
    return (
        f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
    )


def _rows(bars: Sequence[tuple[str, float, str, str, float]]) -> str:
    """Horizontal bars: name, length, number, CSS class, and position of a mark (0: none)."""
    top = max((length for _, length, *_ in bars), default=0.0) or 1.0
    scale = (WIDTH - LABELS - NUMBERS) / top
    shapes: list[str] = []
    for i, (name, length, number, kind, mark) in enumerate(bars):
        y = i * ROW
        long = max(0.5, length * scale)
        shapes += [
            _text(0, y + 16, name, kind="name"),
            f'<rect class="{kind}" x="{LABELS}" y="{y + 4}" width="{long:.1f}" height="{ROW - 8}">'
            f"<title>{escape(name)}: {escape(number)}</title></rect>",
            _text(LABELS + long + 6, y + 16, number),
        ]
        if mark:
            x = LABELS + mark * scale
            shapes.append(
                f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="{y + 1}" y2="{y + ROW - 1}"/>'
            )
    return _svg(len(bars) * ROW, shapes)


def _phases(found: Profile) -> str:
    def row(name: str, phase: ProfilePhase) -> tuple[str, float, str, str, float]:
        number = f"{phase.ms:.2f} ({phase.share:.1%})"
        return name, phase.ms, number, "bar" if phase.cycle_ms else "other", 0.0

    return _rows([row(name, phase) for name, phase in found.phases.items()])


def _inside(inside: CycleBreakdown | None) -> Iterator[str]:
    if inside is None:
        return
    rate = inside.read_rate
    caption = f"Each part by itself at {inside.context} tokens, ms; grey: a whole graph."
    if rate:
        caption += f" The mark is what its bytes take at the {rate / 1e9:.0f} GB/s read here."
    bars = [
        (
            part.graph if not part.name else "\N{NO-BREAK SPACE}" * 3 + part.name,
            part.ms,
            f"{part.ms:.3f}",
            "bar" if part.name else "other",
            1e3 * part.nbytes / rate if rate else 0.0,
        )
        for part in inside.parts
    ]
    yield _figure(f"A cycle of {inside.cycle_ms:.3f} ms, taken apart", caption, _rows(bars))


def _power(found: Profile) -> Iterator[str]:
    if found.power.rails:
        rows = [
            (r.name, f"{r.idle_w:.2f}", f"{r.mean_w:.2f}", f"{r.joules:.2f}",
             f"{r.joules / max(1, found.tokens):.3f}")
            for r in found.power.rails
        ]  # fmt: skip
        names = ("rail", "idle, W", "mean, W", "J an answer", "J a token")
        yield f"<h2>Power</h2>{_table(names, rows)}"
    if found.power.hottest_c is not None:
        yield f"<p>Junction at most {found.power.hottest_c:.1f} °C.</p>"


def _soak(soak: Sequence[Stretch]) -> Iterator[str]:
    if not soak:
        return
    titles, rows = course(soak)
    fewest, most = min(s.runs for s in soak), max(s.runs for s in soak)
    caption = f"{fewest} runs a bar." if fewest == most else f"{fewest} or {most} runs a bar."
    lines = {
        "a cycle, ms": [s.cycle_ms for s in soak],
        **{f"{rail}, W": [s.watts[rail] for s in soak] for rail in soak[0].watts},
    }
    if all(s.hottest_c is not None for s in soak):
        lines["junction, °C"] = [s.hottest_c or 0.0 for s in soak]
    for name, values in lines.items():
        spans = [
            Span(s.start_s, s.end_s, value, f"{value:.2f}, {span_of(s)}")
            for s, value in zip(soak, values, strict=True)
        ]
        yield _figure(f"Over time: {name}", caption, _spans(spans, "s"))
    yield f"<details><summary>Numbers over time</summary>{_table(titles, rows)}</details>"


def _settings(found: Profile) -> str:
    subject = found.subject
    about = {
        "package": subject.package,
        "prompt": subject.prompt,
        **subject.machine,
        **subject.settings,
    }
    rows = _table(("setting", "value"), list(about.items()))
    return f"<details><summary>What was asked</summary>{rows}</details>"
