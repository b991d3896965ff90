"""Which prompts' tokens the rows of the live key/value caches were computed from.

Rows are known in chunks: `chunk` tokens at a multiple of `chunk`, read by one prefill step of that
size. A chunk is named by a digest of its tokens and of all tokens before it, so equal digests mean
equal bits. Rows that a verify or a shorter step wrote have other bits for the same tokens (other
kernels), so their chunks are unknown.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from thor_dflash.runtime.text.packed_ids import ID_BYTES, packed

Digest = bytes


@dataclass(frozen=True, slots=True)
class HashedPrompt:
    """A prompt as digests of its whole chunks, without its last token."""

    chunks: tuple[Digest, ...]
    ids: bytes
    """All its tokens, packed."""

    def common(self, other: bytes) -> int:
        """The first tokens that another prompt begins with, too."""
        least, most = 0, min(len(self.ids), len(other)) // ID_BYTES
        while least < most:
            middle = (least + most + 1) // 2
            part = slice(least * ID_BYTES, middle * ID_BYTES)
            if self.ids[part] == other[part]:
                least = middle
            else:
                most = middle - 1
        return least


NOTHING_HASHED = HashedPrompt((), b"")


def hashed(
    tokens: Sequence[int], chunk: int, scope: str, earlier: HashedPrompt = NOTHING_HASHED
) -> HashedPrompt:
    """Hash a prompt. Prompts of different scopes have no chunk in common. `earlier` is any other of
    the same chunk and scope, whose digests are taken over as far as both begin alike.

    256 bits of BLAKE2b: two prompts with the same digest cannot be made, not even on purpose.
    """
    ids = packed(tokens)
    whole, step = (len(tokens) - 1) // chunk, chunk * ID_BYTES
    same = min(whole, len(earlier.chunks), HashedPrompt((), ids).common(earlier.ids) // chunk)
    found = list(earlier.chunks[:same])
    last = found[-1] if found else blake2b(f"{chunk} {scope}".encode(), digest_size=32).digest()
    for start in range(same * step, whole * step, step):
        last = blake2b(last + ids[start : start + step], digest_size=32).digest()
        found.append(last)
    return HashedPrompt(tuple(found), ids)


class KVLog:
    """The chunks that the live caches hold. The session that prefills says what it is about to
    read (`expect`); without that, what a step writes is unknown."""

    def __init__(self) -> None:
        self.chunks: list[Digest | None] = []
        """By index of the chunk; None: unknown."""
        self._chunk = 0
        self._expected: tuple[Digest, ...] = ()

    def expect(self, digests: tuple[Digest, ...], chunk: int, held: int) -> None:
        """Note the prompt that is prefilled next, whose first `held` chunks the caches hold."""
        if chunk != self._chunk:
            self.chunks, self._chunk = [], chunk
        self._expected = digests
        self._grow(held)
        self.chunks[:held] = digests[:held]

    def forget(self) -> None:
        """Note that another sequence begins, of which nothing is known."""
        self._expected = ()

    def holds(self, index: int, digest: Digest) -> bool:
        """Whether the rows of a chunk are those of this digest."""
        return index < len(self.chunks) and self.chunks[index] == digest

    def writing(self, start: int, rows: int) -> None:
        """Note that a step is about to write rows: until it has ended, they are unknown."""
        if not self._chunk:
            return
        first, end = start // self._chunk, -(-(start + rows) // self._chunk)
        for index in range(first, min(end, len(self.chunks))):
            self.chunks[index] = None

    def prefilled(self, start: int, count: int) -> None:
        """Note that a prefill step read `count` prompt tokens from `start` on, drafter included."""
        if self._chunk and count == self._chunk and start % count == 0:
            index = start // count
            if index < len(self._expected):
                self._grow(index + 1)
                self.chunks[index] = self._expected[index]

    def _grow(self, length: int) -> None:
        self.chunks += [None] * (length - len(self.chunks))
