"""Token ids as bytes, which compare, hash and search a hundred times as fast as Python's integers.

The last prompt is remembered: a request needs it several times, and packing 28,000 ids takes half a
millisecond.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

ID_BYTES = array("q").itemsize
_last: list[tuple[tuple[int, ...], bytes]] = [((), b"")]
"""One entry, replaced as a whole, so that threads need no lock."""


def packed(tokens: Sequence[int]) -> bytes:
    """Tokens, 64 bits each: the ids of tokens of images need more than 32.

    Raises:
        OverflowError: one has more bits.
    """
    last, found = _last[0]
    if last is tokens:
        return found
    found = array("q", tokens).tobytes()
    if isinstance(tokens, tuple):  # a list may have changed although it is the same
        remember(tokens, found)
    return found


def remember(tokens: tuple[int, ...], ids: bytes) -> None:
    """Remember a prompt that was packed piece by piece."""
    _last[0] = tokens, ids
