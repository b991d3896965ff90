"""The lower bound on the tokens of a text: it holds for every text, or there is none."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any
from unicodedata import decomposition, normalize

import pytest
from support.planner_nano import NANO
from tokenizers import pre_tokenizers

from thor_dflash.cli.requests import PromptOptions
from thor_dflash.config.decode import DecodeConfig
from thor_dflash.core.errors import RequestError
from thor_dflash.runtime.text.token_bounds import NFC, longest
from thor_dflash.runtime.text.tokenizer import Tokenizer

TOKENIZER = NANO / "target" / "tokenizer.json"
LONGEST = "<tts_text_bos_single>"
ALPHABET = set(pre_tokenizers.ByteLevel.alphabet())


@pytest.fixture(scope="module")
def text() -> Tokenizer:
    return Tokenizer.load(NANO / "target")


def weight(text: str) -> float:
    """What `least_bytes` counts for `text`, but not rounded down."""
    plain = len(text.encode("ascii", "ignore"))
    return plain + (len(text.encode()) - plain) / NFC


def test_no_char_is_made_fewer_bytes_than_is_promised() -> None:
    chars = [chr(i) for i in range(sys.maxunicode + 1) if not 0xD800 <= i < 0xE000]
    made = [c for c in chars if decomposition(c)[:1] not in ("", "<") or "가" <= c <= "힣"]
    # A char may have others that NFC replaces by it, as it replaces the Kelvin sign by K. For
    # each char that has any: the most that one of them counts, or it itself.
    heaviest: dict[str, float] = {}
    for c in made:
        if len(apart := normalize("NFD", c)) == 1:
            heaviest[apart] = max(weight(c), heaviest.get(apart, weight(apart)))

    def most(c: str) -> float:
        return sum(heaviest.get(part, weight(part)) for part in normalize("NFD", c))

    # No char counts for more than its parts can, and a char that NFC leaves as it is has at
    # least the bytes that its parts can count for. So NFC leaves no text fewer bytes than counted.
    assert [c for c in made if weight(c) > most(c)] == []
    left = [c for c in (*made, *heaviest) if normalize("NFC", c) == c]
    assert len(left) > 11_172  # the number of Hangul syllables
    assert [c for c in left if len(c.encode()) < most(c)] == []


def test_a_prompt_that_cannot_fit_is_refused_unread(
    text: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(self: Tokenizer, text: str) -> list[int]:
        raise AssertionError("a text of any length is encoded")

    monkeypatch.setattr(Tokenizer, "encode", never)
    package: Any = SimpleNamespace(tokenizer=text, limit=1000, capacity=1016)
    question = PromptOptions([{"role": "user", "content": "x" * 42_000}], None)
    rule = "^the prompt must be <= 1000 tokens, the context of 1016 .*got 200[0-9] or more"
    with pytest.raises(RequestError, match=rule):
        question.prompt(package, DecodeConfig())
    package.limit = 2010  # the bound is not above it, so only encoding can tell
    with pytest.raises(AssertionError):
        question.prompt(package, DecodeConfig())


@pytest.mark.parametrize(
    "other",
    [
        {"normalizer": {"type": "NFKC"}},
        {"normalizer": {"type": "Strip", "strip_left": True, "strip_right": True}},
        {"pre_tokenizer": None},
        {"pre_tokenizer": {"type": "Split", "behavior": "Isolated"}},
        {
            "pre_tokenizer": {
                "type": "Sequence",
                "pretokenizers": [
                    {"type": "Split", "behavior": "Removed"},
                    {"type": "ByteLevel"},
                ],
            }
        },
        {"model": {"type": "Unigram", "vocab": []}},
        {"model": {"end_of_word_suffix": "</w>"}},
        {"model": {"continuing_subword_prefix": "##"}},
        {"model": {"vocab": {"a": 0}}},
        *({"added_tokens": {name: True}} for name in ("lstrip", "rstrip", "normalized")),
    ],
)
def test_a_tokenizer_whose_tokens_have_no_bound_gives_none(other: dict[str, Any]) -> None:
    table = json.loads(TOKENIZER.read_text(encoding="utf-8"))
    assert longest(table, ALPHABET) == len(LONGEST)
    assert longest(table | {"pre_tokenizer": {"type": "ByteLevel"}}, ALPHABET) == len(LONGEST)
    for key, value in other.items():
        if key == "added_tokens":
            table[key][-1] |= value
        else:
            table[key] = table[key] | value if key == "model" else value
    assert longest(table, ALPHABET) is None
