"""What `thor-dflash quality` has measured, as it is written to JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from thor_dflash.calib.quality.intervals import Interval

Verdict = Literal["pass", "warn", "fail", "not measured"]
VERSION = 1
"""Of the JSON's form."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QualityPackage:
    """A package that takes part."""

    name: str
    sha256: str
    """Of what it was built from and its packed weights: see manifest.identity."""
    model_sha256: str
    """The same without the cache: equal if two packages differ in the cache alone."""
    engine: str
    device: str
    kv: str
    activations: str
    weights: Mapping[str, int]
    """Class and precision of tensors -> bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GateResult:
    """One gate."""

    name: str
    """Key of the configuration, below quality.gates."""
    title: str
    value: float | None = None
    low: float | None = None
    high: float | None = None
    """95 % interval over documents."""
    passes: float
    fails: float
    at_least: bool
    """Whether large values pass."""
    verdict: Verdict
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassDivergence:
    """The divergence over the scored tokens of one class of text; nats."""

    label: str
    texts: int
    tokens: int
    kl: Interval
    median: float
    p99: float
    most: float
    top1: Interval
    """Share of tokens with the same best id."""
    top1_sure: float | None = None
    """The same where the reference's margin exceeds one nat; None without such a token."""
    perplexity_reference: float
    perplexity: float
    perplexity_ratio: Interval


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanComparison:
    """Both packages' own answers to the same planning tasks."""

    tasks: int
    valid_reference: int
    valid: int
    only_reference: int
    """Tasks that only the reference planned well."""
    only_candidate: int
    p: float
    """Of the exact McNemar test."""
    accept_length_reference: float | None = None
    """Committed tokens a cycle; None without a drafter."""
    accept_length: float | None = None
    accept_ratio: Interval | None = None
    length_ratio: Interval | None = None
    """Tokens of the answers over the reference's: quantised models may think longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheLayer:
    """Saturation of one layer's FP8 cache."""

    layer: int
    values: int
    """Numbers written to K; as many to V."""
    k: int
    """Of K, how many are at the largest number."""
    v: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerDrift:
    """How far the residual stream after a layer is from the reference's."""

    layer: int
    error: float
    """Norm of the difference over the norm, of all scored rows together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearDrift:
    """How far a stored linear is from the reference's."""

    name: str
    format: str
    error: float
    """Norm of the difference over the norm."""


Choice = tuple[str, float]
"""Text of a token, its probability."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorstToken:
    """A place where both differ most."""

    text: str
    """Name of the text."""
    position: int
    kl: float
    before: str
    """The end of what comes before."""
    token: str
    """What follows in the text."""
    reference: tuple[Choice, ...]
    """Its most probable tokens."""
    candidate: tuple[Choice, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TextResult:
    """One scored text."""

    name: str
    label: str
    tokens: int
    kl: float
    top1: float


@dataclass(frozen=True, slots=True, kw_only=True)
class QualityReport:
    """A whole comparison."""

    version: int = VERSION
    tool: str
    """Version of thor-dflash."""
    verdict: Verdict
    reference: QualityPackage
    candidate: QualityPackage
    stored: bool
    """Whether the reference's logits came from a file, where they are float16."""
    texts_sha256: str
    """Of all scored token ids."""
    gates: tuple[GateResult, ...]
    whole: ClassDivergence
    classes: tuple[ClassDivergence, ...]
    plans: PlanComparison | None = None
    cache: tuple[CacheLayer, ...]
    layers: tuple[LayerDrift, ...]
    linears: tuple[LinearDrift, ...]
    """The worst first; empty without the checkpoints."""
    worst: tuple[WorstToken, ...]
    histogram: tuple[int, ...]
    """Scored tokens by KL: see HISTOGRAM."""
    by_position: tuple[tuple[int, int, float], ...]
    """First position of a range, tokens, mean KL."""
    texts: tuple[TextResult, ...]
    settings: Mapping[str, str] = field(default_factory=dict[str, str])
    notes: tuple[str, ...] = ()


HISTOGRAM = tuple(10.0 ** (i / 2) for i in range(-14, 4))
"""Upper edges of the histogram's bins, nats; a last bin has the rest."""
