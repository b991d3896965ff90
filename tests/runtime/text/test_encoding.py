"""Encoding releases the interpreter's lock, and gives the ids that a text has alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.constrained_model import TOKENIZER

from thor_dflash.runtime.text.tokenizer import Tokenizer

MARKS = ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<think>", "</think>", "<|im_", "\r\n ")
ODD = ("e\u0301", "\u0f71\u0f72", "日本", "👩\u200d👩", "\x00", "\ufffd", "\U0010ffff")


@pytest.fixture(scope="module")
def text() -> Tokenizer:
    return Tokenizer.load(TOKENIZER)


@given(st.lists(st.sampled_from(MARKS + ODD) | st.text(max_size=9), max_size=9))
def test_the_ids_are_those_of_the_text_alone(text: Tokenizer, parts: list[str]) -> None:
    written = "".join(parts)
    assert text.encode(written) == text._tokenizer.encode(written, add_special_tokens=False).ids
