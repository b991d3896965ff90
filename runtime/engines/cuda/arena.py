"""The device memory of an engine: counted first, refused if it does not fit, then allocated once.
Addresses never change after that.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from thor_dflash.core.errors import OutOfMemory
from thor_dflash.core.progress import amount

ALIGNMENT = 256
"""Alignment of every region, bytes."""

RESERVE = 256 << 20
"""Left free for the driver (modules, graphs) and for other programs, bytes."""

KINDS = {"attention": "cache", "drafter": "ring", "gdn": "state"}
"""First word of a state's name -> its kind."""


def kind(name: str) -> str:
    """The kind of a tensor in the memory table."""
    return KINDS.get(name.split(".")[0], "rows")


@dataclass(slots=True)
class Arena:
    """One allocation, accounted by kind. All sizes are known before it is made."""

    sizes: dict[str, int] = field(default_factory=dict[str, int])
    """Kind -> bytes, in the order of first use."""
    _end: int = 0
    base: int = 0
    """Device address; 0 until it is allocated."""

    def take(self, kind: str, nbytes: int) -> int:
        """Reserve space for a kind; return its offset."""
        assert not self.base, "taken after the allocation"
        padded = -(-max(nbytes, 1) // ALIGNMENT) * ALIGNMENT
        offset, self._end = self._end, self._end + padded
        self.sizes[kind] = self.sizes.get(kind, 0) + padded
        return offset

    @property
    def nbytes(self) -> int:
        """Total size."""
        return self._end

    def check(self, free: int) -> None:
        """Check that the arena fits in `free` bytes.

        Raises:
            OutOfMemory: it does not; the message has the memory table.
        """
        if (lacks := self.nbytes + RESERVE - free) > 0:
            raise OutOfMemory(
                f"the package must fit in {amount(free, 'bytes')} of free device memory "
                f"(got {self.describe()}, graphs and driver {amount(RESERVE, 'bytes')}: "
                f"{amount(self.nbytes + RESERVE, 'bytes')} together, {amount(lacks, 'bytes')} too "
                "many)",
                lacks,
            )

    def describe(self) -> str:
        """The memory table in one line."""
        return ", ".join(f"{kind} {amount(size, 'bytes')}" for kind, size in self.sizes.items())
