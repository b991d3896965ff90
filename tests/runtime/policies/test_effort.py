"""How many tokens a request and its thinking may take, from its options and the model card."""

from __future__ import annotations

import pytest

from thor_dflash.builders.model_card import make_card
from thor_dflash.config.build import CardConfig
from thor_dflash.config.decode import BudgetConfig
from thor_dflash.core.errors import RequestError
from thor_dflash.package.manifest import ModelCard
from thor_dflash.runtime.policies.effort import TokenLimits, effort_tokens, resolve_limits

CARD = make_card(CardConfig(), 262144)


def test_the_card_of_a_small_model_and_one_with_given_tiers() -> None:
    small = make_card(CardConfig(), 2048)
    assert (small.max_tokens, small.reply, small.high, small.max) == (2048, 256, 1792, 1792)
    reported = make_card(CardConfig(high=10, low=20, source="s"), 2048)
    tiers = (reported.low, reported.medium, reported.high, reported.x_high, reported.max)
    assert tiers == (20, 896, 896, 1792, 1792), "tiers never fall"
    assert reported.source == "s"


@pytest.mark.parametrize(
    ("config", "max_tokens", "want"),
    [
        (BudgetConfig(tokens=100), 32768, TokenLimits(100, 4196)),
        (BudgetConfig(tokens=100, reply=500), 550, TokenLimits(50, 550)),  # here thinking is cut
        (BudgetConfig(tokens=100, reply=500), 32768, TokenLimits(100, 600)),
        (BudgetConfig(effort="low"), 32768, TokenLimits(3584, 7680)),
        (BudgetConfig(effort="high"), 32768, TokenLimits(28672, 32768)),
        (BudgetConfig(effort="medium"), 8192, TokenLimits(4096, 8192)),
        (BudgetConfig(effort="max", tokens=7), 32768, TokenLimits(7, 4103)),
    ],
)
def test_lengths(config: BudgetConfig, max_tokens: int, want: TokenLimits) -> None:
    assert resolve_limits(config, CARD, 20, max_tokens) == want


@pytest.mark.parametrize(
    ("config", "max_tokens", "card", "message"),
    [
        (
            BudgetConfig(tokens=5, reply=20),
            99,
            CARD,
            r"^the reply must be >= 21 .*\(got 20 by",
        ),
        (BudgetConfig(tokens=90), 99, CARD, r"^the reply must be >= 21 .*\(got 9 by"),
        (
            BudgetConfig(effort="low"),
            99,
            ModelCard(),
            r'^decode.budget.effort must be "", .*no model card',
        ),
    ],
)
def test_lengths_that_leave_no_space(
    config: BudgetConfig, max_tokens: int, card: ModelCard, message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        resolve_limits(config, card, 20, max_tokens)


def test_every_effort_but_none_is_a_tier() -> None:
    found = [effort_tokens(n, CARD) for n in ("minimal", "low", "medium", "high", "x-high", "max")]
    assert found == sorted(found)
