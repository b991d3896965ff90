"""The most text that one token can hold, derived from a tokenizer.json."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

NFC = 4
"""Bound on how much NFC shrinks non-ASCII UTF-8. The most is 3.5: U+1FBE U+0308 U+0301 becomes
U+0390."""


def least_bytes(text: str) -> int:
    """Lower bound on the UTF-8 bytes of `text` after NFC normalisation."""
    plain = len(text.encode("ascii", "ignore"))
    return plain + (len(text.encode()) - plain) // NFC


def longest(table: dict[str, Any], alphabet: Set[str]) -> int | None:
    """Most bytes of normalised text in one token of a tokenizer.json; None if its contents give no
    bound. `alphabet`: the characters of byte-level BPE.
    """
    model, added = table["model"], table["added_tokens"]
    bounded = (
        table["normalizer"] in (None, {"type": "NFC"})
        and _keeps(table["pre_tokenizer"])
        and model["type"] == "BPE"
        and not (model["continuing_subword_prefix"] or model["end_of_word_suffix"])
        and alphabet <= model["vocab"].keys()  # else characters are dropped or merged into unknown
        and not any(token["lstrip"] or token["rstrip"] or token["normalized"] for token in added)
    )
    if not bounded:
        return None
    whole = max((len(token["content"].encode()) for token in added), default=0)
    return max(whole, max(map(len, model["vocab"])))


def _keeps(step: dict[str, Any] | None) -> bool:
    """Whether a pre-tokenizer maps every byte of a text to a character and drops none."""
    steps = step["pretokenizers"] if step and step["type"] == "Sequence" else [step or {"type": ""}]
    return any(s["type"] == "ByteLevel" for s in steps) and all(
        s["type"] == "ByteLevel" or (s["type"] == "Split" and s["behavior"] != "Removed")
        for s in steps
    )
