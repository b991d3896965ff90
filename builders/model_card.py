"""The model card of a package: values from the build's configuration, the rest by rule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

from thor_dflash.config.build import CardConfig
from thor_dflash.core.errors import ConfigError
from thor_dflash.package.manifest import ModelCard

MAX_TOKENS, COMPLEX, REPLY = 32768, 81920, 4096
"""Longest answer, longest answer to complex problems, and reply of the Qwen3.5 and 3.6 family,
tokens. Source: their model cards."""
RULE = "by rule from the family's longest answer"
LENGTHS, TIERS = ("max_tokens", "complex", "reply"), ("low", "medium", "high", "x_high", "max")


def make_card(config: CardConfig, longest: int) -> ModelCard:
    """Fill in the card of a model with `longest` positions. No tier is below the previous one.

    Raises:
        ConfigError: a configured number exceeds what an answer of the model can have.
    """
    max_tokens = config.max_tokens or min(MAX_TOKENS, longest)
    hard = config.complex or min(COMPLEX, longest)
    reply = config.reply or min(REPLY, max_tokens // 8)
    given = {name: getattr(config, name) for name in (*LENGTHS, *TIERS)}
    model = f"the model's {longest} positions"
    _at_most(given, ("max_tokens", "complex"), longest, model)
    shorter = min(max_tokens, hard)
    if not config.reply and reply >= hard:  # only a configured `complex` can cause this
        raise ConfigError(
            f"build.card.complex must be > {reply}, the tokens kept for the reply "
            f"unless build.card.reply is given (got {hard})"
        )
    _at_most({"reply": reply}, ("reply",), shorter - 1, f"the longest answer of {shorter} less one")
    _at_most(given, TIERS, longest - reply, f"{model} less the reply of {reply}")
    think, most = max_tokens - reply, hard - reply
    by_rule = (round(think / 8), round(think / 2), think, (think + most) // 2, most)
    wanted = (given[name] or rule for name, rule in zip(TIERS, by_rule, strict=True))
    low, medium, high, x_high, top = accumulate((max(1, tier) for tier in wanted), max)
    return ModelCard(
        max_tokens=max_tokens,
        complex=hard,
        reply=reply,
        low=low,
        medium=medium,
        high=high,
        x_high=x_high,
        max=top,
        close=config.close,
        source=config.source or _source(given),
    )


def _at_most(given: Mapping[str, int], names: Sequence[str], most: int, what: str) -> None:
    for name in names:
        if given[name] > most:
            raise ConfigError(f"build.card.{name} must be <= {most}, {what} (got {given[name]})")


def _source(given: Mapping[str, int]) -> str:
    configured = [name for name, value in given.items() if value]
    if not configured:
        return RULE
    rest = "" if len(configured) == len(given) else f"; the rest {RULE}"
    return f"set at build: {', '.join(configured)}{rest}"
