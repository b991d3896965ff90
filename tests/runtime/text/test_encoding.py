"""Encoding releases the interpreter's lock, and gives the ids that a text has alone."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

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
    said = "".join(parts)
    assert text.encode(said) == text._tokenizer.encode(said, add_special_tokens=False).ids


def test_other_threads_run_while_a_long_text_is_encoded(text: Tokenizer) -> None:
    shares: list[float] = []
    for _ in range(5):
        with ticking() as ticks:
            begin = time.perf_counter()
            text.encode("the robot picks the red cup " * 20_000)
            took = time.perf_counter() - begin
        shares.append(max(b - a for a, b in pairwise(ticks)) / took)
    # The best of several, because another process may take the processor from the thread.
    assert min(shares) < 0.5, "the longest stop of another thread, of the time to encode"


@contextmanager
def ticking() -> Iterator[list[float]]:
    """The times at which another thread ran, from the beginning to the end."""
    ticks, over = [time.perf_counter()], threading.Event()

    def tick() -> None:
        while not over.wait(0.001):
            ticks.append(time.perf_counter())

    thread = threading.Thread(target=tick)
    thread.start()
    try:
        yield ticks
    finally:
        ticks.append(time.perf_counter())
        over.set()
        thread.join()
