"""Rows of a quality report as text, for the terminal and for the page."""

from __future__ import annotations

from thor_dflash.calib.quality.intervals import Interval
from thor_dflash.calib.quality.quality_report import ClassDivergence, GateResult, QualityReport

PERCENT = ("top1", "plans", "saturated")
"""Gates whose values are shares."""


def gate_rows(report: QualityReport) -> list[tuple[str, ...]]:
    """A header, and a row for each gate."""
    head = ("gate", "verdict", "measured", "95 % interval", "passes", "fails")
    return [head, *(_gate(gate) for gate in report.gates)]


def _gate(gate: GateResult) -> tuple[str, ...]:
    signs = ("≥", "<") if gate.at_least else ("≤", ">")
    value = "" if gate.value is None else _number(gate.name, gate.value)
    interval = ""
    if gate.low is not None and gate.high is not None:
        interval = f"{_number(gate.name, gate.low)} to {_number(gate.name, gate.high)}"
    limits = (_number(gate.name, gate.passes), _number(gate.name, gate.fails))
    passes, fails = (f"{sign} {limit}" for sign, limit in zip(signs, limits, strict=True))
    return gate.title, gate.verdict, value, interval, passes, fails


def _number(gate: str, value: float) -> str:
    return f"{value:.4g}" if gate not in PERCENT else f"{100 * value:.3g} %"


def class_rows(report: QualityReport) -> list[tuple[str, ...]]:
    """A header, and a row for each class of tokens and for all."""
    head = (
        "tokens", "texts", "number", "mean KL", "95 % interval", "median", "99 %",
        "same best", "if sure", "perplexity", "ratio",
    )  # fmt: skip
    return [head, *(_class(one) for one in (report.whole, *report.classes))]


def _class(one: ClassDivergence) -> tuple[str, ...]:
    return (
        one.label,
        str(one.texts),
        f"{one.tokens:,}",
        f"{one.kl.value:.4g}",
        span(one.kl),
        f"{one.median:.2g}",
        f"{one.p99:.3g}",
        f"{one.top1.value:.2%}",
        "" if one.top1_sure is None else f"{one.top1_sure:.2%}",
        f"{one.perplexity_reference:.3g} → {one.perplexity:.3g}",
        f"{one.perplexity_ratio.value:.4f}",
    )


def span(interval: Interval) -> str:
    """An interval's ends."""
    return f"{interval.low:.3g} to {interval.high:.3g}"


def plan_rows(report: QualityReport) -> list[tuple[str, ...]]:
    """Both packages' own answers; empty without tasks."""
    found = report.plans
    if found is None:
        return []
    rows: list[tuple[str, ...]] = [
        ("", "reference", "package"),
        ("valid plans", f"{found.valid_reference} of {found.tasks}", f"{found.valid}"),
        ("valid only here", f"{found.only_reference}", f"{found.only_candidate}"),
    ]
    if found.accept_length_reference is not None and found.accept_length is not None:
        lengths = (found.accept_length_reference, found.accept_length)
        rows.append(("tokens a cycle", *(f"{x:.2f}" for x in lengths)))
    if found.length_ratio:
        ratio = found.length_ratio
        rows.append(("length of answers", "1", f"{ratio.value:.3f} ({span(ratio)})"))
    return rows
