"""The model card's token limits: given or by rule; a limit that no answer can have is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.checkpoints import GEOMETRIES, write_target

from thor_dflash.builders import build as builder
from thor_dflash.builders.model_card import TIERS, make_card
from thor_dflash.config.build import BuildConfig, CardConfig
from thor_dflash.core.errors import ConfigError
from thor_dflash.core.progress import Silent


@pytest.mark.parametrize(
    ("given", "longest", "message"),
    [
        *(({tier: 1793}, 2048, f"{tier} must be <= 1792") for tier in TIERS),
        ({"low": 2000, "reply": 49}, 2048, "low must be <= 1999"),
        ({"max_tokens": 2049}, 2048, "max_tokens must be <= 2048"),
        ({"complex": 2049}, 2048, "complex must be <= 2048"),
        ({"complex": 256}, 2048, "complex must be > 256"),
        ({"reply": 400, "max_tokens": 400}, 2048, "reply must be <= 399"),
    ],
)
def test_a_number_that_no_answer_can_have_is_refused(
    given: dict[str, int], longest: int, message: str
) -> None:
    with pytest.raises(
        ConfigError, match=rf"build\.card\.{message}.* \(got {next(iter(given.values()))}"
    ):
        make_card(CardConfig(**given), longest)  # type: ignore[arg-type]


@pytest.mark.parametrize("longest", [1, 7, 8, 9, 2048, 262144])
def test_the_rule_and_the_largest_numbers_are_taken(longest: int) -> None:
    by_rule = make_card(CardConfig(), longest)
    assert max(by_rule.max_tokens, by_rule.complex) <= longest
    given = CardConfig(max_tokens=longest, complex=longest)
    assert make_card(given, longest).max == max(1, longest - make_card(given, longest).reply)


def tiers(given: CardConfig, longest: int) -> tuple[int, ...]:
    card = make_card(given, longest)
    return tuple(getattr(card, name) for name in TIERS)


def test_tiers_by_rule_are_shares_of_the_longest_answers_and_none_is_below_the_one_before() -> None:
    """An answer has 32768 tokens, 81920 if it is hard; 4096 of them are kept for the reply."""
    think, most = 32768 - 4096, 81920 - 4096
    by_rule = (think // 8, think // 2, think, (think + most) // 2, most)
    assert tiers(CardConfig(), 262144) == by_rule
    assert tiers(CardConfig(medium=100), 262144) == (by_rule[0], by_rule[0], *by_rule[2:])
    assert tiers(CardConfig(), 1) == (1,) * 5


def test_a_card_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(builder, "AtomicPackage", lambda *a: pytest.fail("begun"))
    write_target(tmp_path / "target", GEOMETRIES["27b"], 3, "bf16")
    config = BuildConfig(chunk=32, capacity=512, card=CardConfig(low=10**22))
    with pytest.raises(ConfigError, match="build.card.low must be"):
        builder.build(tmp_path / "target", None, tmp_path / "new" / "package", config, Silent())
