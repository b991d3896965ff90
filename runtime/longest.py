"""How much of a text one token can hold, by what a tokenizer says of itself."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

NFC = 4
"""Bytes outside ASCII that normalisation makes one, at most: 3.5, where U+1FBE U+0344 is U+0390."""


def least_bytes(text: str) -> int:
    """Bytes of UTF-8 that are left of `text` at least once it is in NFC."""
    plain = len(text.encode("ascii", "ignore"))
    return plain + (len(text.encode()) - plain) // NFC


def longest(table: dict[str, Any], alphabet: Set[str]) -> int | None:
    """Most bytes of normalised text in one token of a tokenizer.json; None where nothing it says
    bounds them. `alphabet` are the letters of byte-level BPE.
    """
    model, added = table["model"], table["added_tokens"]
    bounded = (
        table["normalizer"] in (None, {"type": "NFC"})
        and _keeps(table["pre_tokenizer"])
        and model["type"] == "BPE"
        and not (model["continuing_subword_prefix"] or model["end_of_word_suffix"])
        and alphabet <= model["vocab"].keys()  # else a letter is dropped, or many are one unknown
        and not any(token["lstrip"] or token["rstrip"] or token["normalized"] for token in added)
    )
    if not bounded:
        return None
    whole = max((len(token["content"].encode()) for token in added), default=0)
    return max(whole, max(map(len, model["vocab"])))


def _keeps(step: dict[str, Any] | None) -> bool:
    """Cuts a text into letters for bytes, and leaves none of it out."""
    steps = step["pretokenizers"] if step and step["type"] == "Sequence" else [step or {"type": ""}]
    return any(s["type"] == "ByteLevel" for s in steps) and all(
        s["type"] == "ByteLevel" or (s["type"] == "Split" and s["behavior"] != "Removed")
        for s in steps
    )
