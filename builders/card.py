"""The model card of a package: what the build was told, and the rest by rule."""

from __future__ import annotations

from itertools import accumulate

from thor_dflash.config import CardConfig
from thor_dflash.manifest import Card

MAX_TOKENS, COMPLEX, REPLY = 32768, 81920, 4096
"""Longest answers and reply of the Qwen3.5 and 3.6 family. Source: their model cards."""


def make_card(config: CardConfig, longest: int) -> Card:
    """Fill in a card for a model of `longest` positions. Tiers never fall from one to the next."""
    max_tokens = config.max_tokens or min(MAX_TOKENS, longest)
    hard = config.complex or min(COMPLEX, longest)
    reply = config.reply or min(REPLY, max_tokens // 8)
    think, most = max_tokens - reply, hard - reply
    by_rule = (round(think / 8), round(think / 2), think, (think + most) // 2, most)
    told = (config.low, config.medium, config.high, config.x_high, config.max)
    wanted = (given or rule for given, rule in zip(told, by_rule, strict=True))
    low, medium, high, x_high, top = accumulate((max(1, tier) for tier in wanted), max)
    return Card(
        max_tokens=max_tokens,
        complex=hard,
        reply=reply,
        low=low,
        medium=medium,
        high=high,
        x_high=x_high,
        max=top,
        close=config.close,
        source=config.source or "by rule from the family's longest answer",
    )
