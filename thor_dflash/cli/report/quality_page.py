"""A comparison of two packages as one HTML file with drawings: no network, no script."""

from __future__ import annotations

from typing import TYPE_CHECKING

from thor_dflash.calib.quality.quality_report import HISTOGRAM
from thor_dflash.calib.quality.quality_text import class_rows, gate_rows, plan_rows
from thor_dflash.cli.report.drawing import (
    Drawing,
    chart,
    column,
    label_below,
    render,
    rows,
    ticks,
)
from thor_dflash.core.progress import amount

if TYPE_CHECKING:
    from thor_dflash.calib.quality.quality_report import QualityPackage, QualityReport

LINEARS = 10
"""Linears that are drawn."""
COLUMNS = 12
"""Most labels of an axis."""


def page(found: QualityReport) -> str:
    """The whole page."""
    return render(
        "quality.html.jinja",
        found=found,
        tiles=_tiles(found),
        gates=gate_rows(found),
        notes=[
            *(f"{gate.title}: {gate.note}." for gate in found.gates if gate.note),
            *(f"{note}." for note in found.notes),
        ],
        classes=class_rows(found),
        plans=plan_rows(found),
        histogram=_histogram(found),
        positions=_positions(found),
        linears=_linears(found),
        layers=_layers(found),
        cache=_cache(found),
        weights=_weights(found),
        texts=[
            (one.name, one.label, f"{one.tokens:,}", f"{one.kl:.4g}", f"{one.top1:.1%}")
            for one in sorted(found.texts, key=lambda one: -one.kl)
        ],
        subject=_subject(found),
    )


def _tiles(found: QualityReport) -> dict[str, str]:
    tiles = {
        "nats, mean KL": f"{found.whole.kl.value:.4f}",
        "same best token": f"{found.whole.top1.value:.1%}",
    }
    if found.plans:
        tiles[f"of {found.plans.tasks} plans valid, reference {found.plans.valid_reference}"] = str(
            found.plans.valid
        )
        if found.plans.accept_ratio:
            ratio = f"{found.plans.accept_ratio.value:.3f}"
            tiles["of the reference's accept length"] = ratio
    return tiles


def _histogram(found: QualityReport) -> Drawing:
    counts = found.histogram
    marks = ticks(max(counts) or 1, whole=True)
    drawing, step = chart(marks, "tokens", "KL divergence, nats (log)"), 100 / len(counts)
    edges = [f"to {edge:.2g}" for edge in HISTOGRAM] + [f"above {HISTOGRAM[-1]:.2g}"]
    for i, (count, edge) in enumerate(zip(counts, edges, strict=True)):
        title = f"{edge} nats: {amount(count, 'tokens')}"
        drawing.bars.append(column(i * step, 0.9 * step, count, marks[-1], title, "bar"))
    for i, edge in enumerate(HISTOGRAM):
        if i % 4 == 2:
            label_below(drawing, (i + 1) * step, f"{edge:g}")
    return drawing


def _positions(found: QualityReport) -> Drawing:
    marks = ticks(max(mean for _, _, mean in found.by_position) or 1e-9)
    drawing = chart(marks, "nats", "position in the text")
    step = 100 / len(found.by_position)
    for i, (first, tokens, mean) in enumerate(found.by_position):
        title = f"from token {first}: {mean:.4g} nats, {amount(tokens, 'tokens')}"
        drawing.bars.append(column(i * step, 0.85 * step, mean, marks[-1], title, "bar"))
        if i % -(-len(found.by_position) // COLUMNS) == 0:
            label_below(drawing, (i + 0.425) * step, str(first))
    return drawing


def _linears(found: QualityReport) -> Drawing | None:
    worst = found.linears[:LINEARS]
    return (
        rows(
            (f"{one.name}, {one.format}", one.error, f"{one.error:.4f}", True, 0.0) for one in worst
        )
        if worst
        else None
    )


def _layers(found: QualityReport) -> Drawing | None:
    each = found.layers
    return (
        rows((f"after layer {o.layer}", o.error, f"{o.error:.4f}", True, 0.0) for o in each)
        if each
        else None
    )


def _cache(found: QualityReport) -> list[tuple[str, ...]]:
    return [(str(one.layer), f"{one.values:,}", f"{one.k:,}", f"{one.v:,}") for one in found.cache]


def _weights(found: QualityReport) -> list[tuple[str, ...]]:
    a, b = found.reference.weights, found.candidate.weights
    listed = [(name, a.get(name, 0), b.get(name, 0)) for name in sorted({*a, *b})]
    listed.append(("together", sum(a.values()), sum(b.values())))
    return [
        (name, *(amount(size, "bytes") if size else "" for size in sizes))
        for name, *sizes in listed
    ]


def _subject(found: QualityReport) -> dict[str, str]:
    return {
        **_package("reference", found.reference),
        **_package("package", found.candidate),
        "reference's logits": "stored, float16" if found.stored else "computed",
        "texts": found.texts_sha256[:12],
        "version": found.tool,
        **found.settings,
    }


def _package(label: str, one: QualityPackage) -> dict[str, str]:
    return {
        label: f"{one.name}, {one.sha256[:12]}",
        f"{label}: engine": f"{one.engine} on {one.device}",
        f"{label}: cache, activations": f"{one.kv}, {one.activations}",
    }
