"""The configuration section of `thor-dflash quality`."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from thor_dflash.config.bounds import Count, Positive
from thor_dflash.core.errors import ConfigError

Gate = tuple[float, float]
"""Limit to pass, limit beyond which it fails; between them is a warning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GateConfig:
    """Limits of `thor-dflash quality`: [pass, fail], between them a warning. The defaults are for
    models of 4 billion weights and more ([quality](../guide/quality.md#gates)).
    """

    mean_kl: Gate = (0.04, 0.08)
    """Mean KL divergence from the reference, nats; at most."""
    p99_kl: Gate = (0.5, 1.5)
    """99th percentile of the KL divergence over tokens, nats; at most."""
    top1: Gate = (0.93, 0.90)
    """Share of tokens with the reference's best token; at least."""
    perplexity: Gate = (1.03, 1.08)
    """Perplexity of texts over the reference's; at most."""
    accept_length: Gate = (0.97, 0.93)
    """Committed tokens a cycle over the reference's; at least."""
    plans: Gate = (0.01, 0.03)
    """Drop of the share of valid plans; at most. A drop that chance explains (p > 0.05) passes."""
    cache_kl: Gate = (0.01, 0.03)
    """Mean KL divergence of the FP8 cache alone, nats; at most."""
    saturated: Gate = (0.0, 1e-5)
    """Share of the FP8 cache's values at its largest number; at most."""

    def __post_init__(self) -> None:
        for one in fields(self):
            limits: Gate = getattr(self, one.name)
            if not all(0 <= limit < float("inf") for limit in limits):
                raise ConfigError(
                    f"quality.gates.{one.name} must be two numbers >= 0 (got {list(limits)})"
                )
            falls = one.name in AT_LEAST
            if (limits[0] < limits[1]) if falls else (limits[0] > limits[1]):
                rule = "[pass, fail] with " + ("pass >= fail" if falls else "pass <= fail")
                raise ConfigError(f"quality.gates.{one.name} must be {rule} (got {list(limits)})")


AT_LEAST = frozenset(("top1", "accept_length"))
"""Gates whose value must be large."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QualityConfig:
    """What `thor-dflash quality` compares, and when it is content
    ([quality](../guide/quality.md)).
    """

    tasks: Count = 120
    """Planning tasks that both packages answer; 0: none. Half of them think. The reference's own
    answers are scored."""
    max_tokens: Positive = 2048
    """Longest answer to a task, tokens."""
    skip: Count = 32
    """First tokens of a text that are not scored, since too little precedes them."""
    window: Positive = 2048
    """A longer text is cut into parts of so many tokens, at most the context."""
    gates: GateConfig = field(default_factory=GateConfig)

    def __post_init__(self) -> None:
        if self.window <= self.skip:
            raise ConfigError(
                f"quality.window must be larger than quality.skip, {self.skip} (got {self.window})"
            )
