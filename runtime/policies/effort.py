"""Token limits for thinking and for the whole answer, from options and the model card."""

from __future__ import annotations

from dataclasses import dataclass

from thor_dflash.config.decode import BudgetConfig
from thor_dflash.core.errors import RequestError
from thor_dflash.package.manifest import ModelCard


@dataclass(frozen=True, slots=True)
class TokenLimits:
    """Lengths of one request, tokens."""

    think: int
    """Thinking is closed after this many."""
    total: int
    """The answer ends after this many; total - think are reserved for closing message and reply."""


def resolve_limits(
    config: BudgetConfig, card: ModelCard, close: int, max_tokens: int
) -> TokenLimits:
    """Resolve a budget. `close`: length of the closing message, tokens.

    Raises:
        RequestError: the numbers are too few for the message and one token after it.
    """
    budget = config.tokens if config.tokens >= 0 else effort_tokens(config.effort, card)
    reply = config.reply or _reply(config, card, budget, max_tokens)
    if reply <= close:
        raise RequestError(
            f"the reply must be >= {close + 1} tokens: the message that closes the thinking "
            f"({close}) and 1 of answer (got {reply} by decode.budget.reply, the model card or "
            "what the thinking budget leaves of max_tokens)"
        )
    if reply > max_tokens:
        what = "decode.budget.reply" if config.reply else "the reply of the package's model card"
        raise RequestError(f"max_tokens must be >= {reply}, {what} (got {max_tokens})")
    total = min(budget + reply, max_tokens)
    return TokenLimits(total - reply, total)


def _reply(config: BudgetConfig, card: ModelCard, budget: int, max_tokens: int) -> int:
    """The card's reply length. A budget given in tokens is not cut, so the reply may get less."""
    if not card.reply:
        raise RequestError(
            "decode.budget.reply must be given, as the package has no model card (got 0)"
        )
    return card.reply if config.tokens < 0 else min(card.reply, max_tokens - budget)


def effort_tokens(name: str, card: ModelCard) -> int:
    """The budget that an effort stands for, tokens.

    Raises:
        RequestError: the package has no model card.
    """
    tiers = {
        "minimal": card.low,
        "low": card.low,
        "medium": card.medium,
        "high": card.high,
        "x-high": card.x_high,
        "max": card.max,
    }
    if not tiers[name]:
        raise RequestError(
            'decode.budget.effort must be "", as the package has no model card with the tokens of '
            f'an effort (got "{name}")'
        )
    return tiers[name]
