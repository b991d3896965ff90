"""Encoding a prompt turn by turn gives the ids of the whole, and finds its boundaries."""

from __future__ import annotations

from pathlib import Path

import pytest

from thor_dflash.runtime.text import prompt_segments
from thor_dflash.runtime.text.prompt_segments import PromptEncoder
from thor_dflash.runtime.text.tokenizer import Tokenizer

NANO = Path(__file__).parents[3] / "models/planner-nano/target"
SYSTEM, USER = "<|im_start|>system\nPlan.  <|im_end|>\n", "<|im_start|>user\nGo é.<|im_end|>\n"
CALL = "<|im_start|>assistant\n<tool_call>\n</tool_call><|im_end|>\n"
RESULT = "<|im_start|>user\n<tool_response>\nok\n</tool_response><|im_end|>\n"
OPEN = "<|im_start|>assistant\n<think>\n"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(NANO)


@pytest.mark.parametrize(
    ("turns", "boundaries"),
    [
        ((SYSTEM, USER, OPEN), {"system": 1, "user": 2, "prompt": 2}),
        ((USER, CALL, RESULT, OPEN), {"user": 1, "prompt": 3}),
        ((SYSTEM, USER, CALL, RESULT, CALL, USER, OPEN), {"system": 1, "user": 6, "prompt": 6}),
        (("no turns at all",), {"prompt": 1}),
        ((" <|im_start|>", USER, "<|im_start|>"), {"user": 2, "prompt": 2}),
    ],
)
def test_ids_and_boundaries(
    tokenizer: Tokenizer, turns: tuple[str, ...], boundaries: dict[str, int]
) -> None:
    encoder, text = PromptEncoder(tokenizer), "".join(turns)
    for _ in range(2):
        found = encoder.encode(text)
        assert list(found.ids) == tokenizer.encode(text)
        ends = {kind: len(tokenizer.encode("".join(turns[:n]))) for kind, n in boundaries.items()}
        assert {kind: at for at, kind in found.boundaries} == ends


def test_memory_is_bounded(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_segments, "KEPT", 1000)
    encoder = PromptEncoder(tokenizer)
    for i in range(50):
        encoder.encode(f"<|im_start|>{'x' * 90}{i}")
    assert sum(map(len, encoder._kept)) <= 1000  # pyright: ignore[reportPrivateUsage]
