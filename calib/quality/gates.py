"""The gates: a verdict on each figure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from thor_dflash.calib.quality.intervals import Interval
from thor_dflash.calib.quality.quality_report import (
    CacheLayer,
    ClassDivergence,
    GateResult,
    PlanComparison,
    Verdict,
)
from thor_dflash.config.quality import AT_LEAST, Gate, GateConfig

TITLES = {
    "mean_kl": "mean KL divergence, nats",
    "p99_kl": "KL divergence, 99 % of tokens, nats",
    "top1": "tokens with the same best choice",
    "perplexity": "perplexity of texts, ratio",
    "accept_length": "accept length, ratio",
    "plans": "drop of valid plans",
    "cache_kl": "FP8 cache alone: mean KL, nats",
    "saturated": "FP8 cache: values at the limit",
}
CHANCE = 0.05
"""p of a drop beyond which chance explains it."""


def verdict(name: str, value: float, limits: Gate) -> Verdict:
    """How a value stands to [pass, fail]."""
    sign = -1.0 if name in AT_LEAST else 1.0
    passes, fails = (sign * limit for limit in limits)
    if sign * value <= passes:
        return "pass"
    return "fail" if sign * value > fails else "warn"


def overall(gates: Sequence[GateResult]) -> Verdict:
    """The worst verdict of the gates that were measured."""
    found = {gate.verdict for gate in gates}
    for one in ("fail", "warn", "pass"):
        if one in found:
            return one
    return "not measured"


def gates(
    config: GateConfig,
    whole: ClassDivergence,
    texts: ClassDivergence | None,
    plans: PlanComparison | None,
    cache: Sequence[CacheLayer],
    *,
    only_cache: bool,
) -> Iterator[GateResult]:
    """Yield every gate. `texts`: of what the reference did not write itself. `only_cache`: whether
    the packages differ in the cache alone.
    """
    yield _gate(config, "mean_kl", whole.kl)
    yield _gate(config, "p99_kl", whole.p99)
    yield _gate(config, "top1", whole.top1)
    ratio = texts.perplexity_ratio if texts else None
    yield _gate(config, "perplexity", ratio, "needs texts: --data")
    ratio = plans.accept_ratio if plans else None
    yield _gate(config, "accept_length", ratio, "needs packages with a drafter, and tasks")
    yield _plans(config, plans)
    kl = whole.kl if only_cache else None
    yield _gate(
        config, "cache_kl", kl, "needs a reference of the same weights with another build.kv"
    )
    values = 2 * sum(layer.values for layer in cache)
    share = sum(layer.k + layer.v for layer in cache) / values if values else None
    yield _gate(config, "saturated", share, "the package's cache is not FP8")


def _gate(
    config: GateConfig, name: str, found: Interval | float | None, missing: str = ""
) -> GateResult:
    limits: Gate = getattr(config, name)
    value = found.value if isinstance(found, Interval) else found
    return GateResult(
        name=name,
        title=TITLES[name],
        value=value,
        low=found.low if isinstance(found, Interval) else None,
        high=found.high if isinstance(found, Interval) else None,
        passes=limits[0],
        fails=limits[1],
        at_least=name in AT_LEAST,
        verdict="not measured" if value is None else verdict(name, value, limits),
        note=missing if value is None else "",
    )


def _plans(config: GateConfig, plans: PlanComparison | None) -> GateResult:
    if plans is None:
        return _gate(config, "plans", None, "needs tasks, and packages with a chat template")
    drop = (plans.valid_reference - plans.valid) / plans.tasks
    made = _gate(config, "plans", drop)
    note = (
        f"{plans.valid_reference} and {plans.valid} of {plans.tasks}; only the reference "
        f"{plans.only_reference}, only the package {plans.only_candidate}; p = {plans.p:.2g}"
    )
    by_chance: Verdict = "pass" if plans.p > CHANCE else made.verdict
    return GateResult(
        name=made.name, title=made.title, value=made.value, passes=made.passes, fails=made.fails,
        at_least=made.at_least, verdict=by_chance, note=note,
    )  # fmt: skip
