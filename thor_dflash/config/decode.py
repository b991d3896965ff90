"""The configuration section of one answer."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

from msgspec import Meta

from thor_dflash.config.bounds import LARGEST, Count, Fraction, Positive
from thor_dflash.core.errors import ConfigError

Effort = Literal["", "none", "minimal", "low", "medium", "high", "x-high", "max"]
Drafter = Literal["auto", "dflash", "mtp", "lookup", "none"]
TEMPLATE_EFFORTS: Mapping[str, str] = {
    "minimal": "low",
    "low": "low",
    "medium": "medium",
    "high": "xhigh",
    "x-high": "xhigh",
    "xhigh": "xhigh",
    "max": "xhigh",
}
"""Effort, as here or in OpenAI's API -> `reasoning_effort` of a chat template that reads it, as
Qwen3.8's does. The model then limits itself, without a budget."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetConfig:
    """How long an answer may think."""

    tokens: Annotated[int, Meta(ge=-1, le=LARGEST)] = -1
    """Thinking tokens before thinking is closed; -1: no budget, unless `effort` names one."""
    effort: Effort = ""
    """Thinking by name; `none` means none. If the chat template reads `reasoning_effort`, as
    Qwen3.8's does, the name is for the template (minimal and low: low, medium, above: xhigh); else
    it is a budget from the package's model card, over which `tokens` takes precedence."""
    close: Literal["hard", "soft"] = "hard"
    """How thinking is closed; hard: at the budget and not before, soft: also in the last part of
    the budget, at a row where the target nearly chooses to close it."""
    reply: Count = 0
    """Tokens reserved for closing message and reply; 0: the card's, or what the context leaves if
    that is less."""
    message: str = ""
    """Message that closes the thinking at the budget; "": the card's. Must hold `</think>` once,
    followed by at most a blank line if there is a grammar."""
    ratio: Fraction = 0.5
    """Soft close: smallest ratio of p(`</think>`) to the largest p at which `</think>` is chosen.
    Half: only at near ties, where rounding decides and not the model."""
    soften: Fraction = 0.5
    """Soft close: fraction of the budget before which no row is soft."""


NO_BUDGET = BudgetConfig()
RELAXED = {"margin": (3, 1.0), "delta": (10, 0.6)}
"""k and margin of each rule. Source: FlashRT; TensorRT-LLM's example for DeepSeek-R1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RelaxedConfig:
    """Which drafts relaxed acceptance accepts inside the thinking block."""

    rule: Literal["margin", "delta"] = "margin"
    """Rule; margin: FlashRT's, by log-probability, delta: TensorRT-LLM's, by probability."""
    k: Count = 0
    """Largest rank of a draft among the target's choices, 1 being the best; 0: 3 for margin, 10 for
    delta."""
    margin: float = -1.0
    """Largest distance from the target's best, in nats or probability; -1: 1.0 for margin, 0.6 for
    delta."""

    def __post_init__(self) -> None:
        if not (self.margin == -1 or 0 <= self.margin <= LARGEST):
            raise ConfigError(
                f"decode.relaxed.margin must be -1, or 0 to {LARGEST} (got {self.margin})"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftConfig:
    """How much of the context the drafter sees, tokens. 0: all that it was made for."""

    window: Count = 0
    """Window of its sliding layers; each row of a block has its own window."""
    full: Count = 0
    """Window of its full layers."""
    context: Count = 0
    """Positions before the block visible to any layer, the same for all rows; FlashRT uses 128."""
    seed: Count = 0
    """Positions at the end of the prompt that the drafter is shown."""


NO_DRAFT_LIMITS = DraftConfig()


SEEDS_DRAWN = 2**53
"""Seeds that are drawn lie below it: JSON's readers keep such a number exactly."""
COLDEST, HOTTEST = 0.01, 100.0
"""Bounds of a temperature that is not 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingConfig:
    """How tokens are drawn. The answer depends on the seed, the prompt and the package, not on
    drafts, earlier requests or a stored prefix."""

    temperature: float = 0.0
    """Divides the logits, 0.01 to 100; 0: greedy, always the best token."""
    top_p: float = 1.0
    """Draw from the smallest set of best tokens with this share of the probability; 1: off."""
    top_k: Count = 0
    """Draw from this many best tokens; 0: off."""
    min_p: float = 0.0
    """Draw from tokens with at least this share of the best one's probability; 0: off."""
    seed: int = -1
    """Seed of the noise, below 2^63; -1: drawn, and reported with the answer."""
    acceptance: Literal["coupled", "rejection"] = "coupled"
    """How drafts are accepted; coupled: if the target's own draw equals them, rejection: by
    the ratio of both laws, on average at least as often. The law of the answer is the same, but
    with rejection it depends on the drafts, and a seed does not repeat it."""

    def __post_init__(self) -> None:
        for name, value, fine, rule in (
            ("temperature", self.temperature,
             self.temperature == 0 or COLDEST <= self.temperature <= HOTTEST,
             f"0, or {COLDEST} to {HOTTEST:g}"),
            ("top_p", self.top_p, 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("top_k", self.top_k, 0 <= self.top_k <= LARGEST, f"0 to {LARGEST}"),
            ("min_p", self.min_p, 0 <= self.min_p <= 1, "0 to 1"),
            ("seed", self.seed, -1 <= self.seed < 2**63, "-1, or 0 to 2^63 - 1"),
        ):  # fmt: skip
            if not fine:
                raise ConfigError(f"decode.sampling.{name} must be {rule} (got {value})")

    def seeded(self) -> SamplingConfig:
        """This, with a seed that is drawn now if it has a temperature and no seed."""
        if self.temperature == 0 or self.seed >= 0:
            return self
        return replace(self, seed=secrets.randbelow(SEEDS_DRAWN))


GREEDY = SamplingConfig()


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeConfig:
    """How one answer of `generate` or `profile` is decoded ([policies](../guide/policies.md))."""

    drafter: Drafter = "auto"
    """Proposer of drafts; dflash or mtp: the package's drafter, lookup: texts that the answer
    repeats, auto: both, none: decode plainly. The tokens are the same with all of them."""
    max_tokens: Positive = 1024
    """Longest answer, thinking not counted, tokens."""
    thinking: Literal["on", "off"] = "on"
    """Whether the model thinks before it answers."""
    preserve_thinking: Literal["auto", "on", "off"] = "auto"
    """Whether the thinking of past turns stays in the prompt, if the chat template reads
    `preserve_thinking`; auto: as the template has it, Qwen3.8's keeps it and 3.6's does not."""
    ignore_eos: bool = False
    """Go on past the stop tokens, up to `max_tokens`, for measurements."""
    accept: Literal["strict", "relaxed"] = "strict"
    """Acceptance of drafts; relaxed: accept near misses of the drafter inside the thinking block,
    which changes it."""
    gate: Literal["on", "off"] = "off"
    """Skip the drafter while it does not pay off. Off by default: then it does not depend on the
    clock which steps are drafted, and a drafter trained for its target pays off."""
    budget: BudgetConfig = field(default_factory=BudgetConfig)
    relaxed: RelaxedConfig = field(default_factory=RelaxedConfig)
    draft: DraftConfig = field(default_factory=DraftConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
