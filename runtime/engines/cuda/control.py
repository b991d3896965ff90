"""Host writes: gathered in page-locked memory, and copied in front of the work that needs them.

Small tensors lie together in one control page, so that the dozen numbers a step is told travel as
one copy. Nothing waits: a piece of the ring is used again once its copies have been made.
"""

# cuda-python publishes no types.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from thor_dflash.plugins.cuda.driver import Driver, Pinned
from thor_dflash.tensors import Array, TensorSpec

SMALL = 16 << 10
"""Largest tensor that lies in the control page, bytes."""

RING = 8 << 20
"""Page-locked memory for copies under way, bytes."""

SLOT = 16
"""Alignment of a tensor in the control page, and of a piece of the ring, bytes."""


@dataclass(slots=True)
class Ring:
    """Page-locked memory that is used over and over."""

    driver: Driver
    memory: Pinned
    sent: int = 0
    """Copies so far."""
    _at: int = 0
    _busy: list[tuple[int, int, Any]] = field(default_factory=list[tuple[int, int, Any]])
    """Pieces whose copies may be under way, oldest first: start, end, event after the copy. None
    for a small one: something is read, and all waited for, long before the ring comes round.
    """
    _spare: list[Any] = field(default_factory=list[Any])

    def send(self, to: int, data: Array) -> None:
        """Copy bytes (uint8 [n]) to a device address, in order with the stream's work."""
        for start in range(0, len(data), RING // 2):
            self._send(to + start, data[start : start + RING // 2])

    def _send(self, to: int, data: Array) -> None:
        size = -(-len(data) // SLOT) * SLOT
        if self._at + size > len(self.memory.bytes):
            self._at = 0
        start, end = self._at, self._at + size
        # Not only the oldest: one left from the end of the round before may lie past this one.
        while any(first < end and start < last for first, last, _ in self._busy):
            self._retire()
        self.memory.bytes[start : start + len(data)] = data
        stream = self.driver.stream
        self.driver("cuMemcpyHtoDAsync", to, self.memory.address + start, len(data), stream)
        self._busy.append((start, end, self._recorded() if size > SMALL else None))
        self._at = end
        self.sent += 1

    def _recorded(self) -> Any:
        flags = self.driver.cu.CUevent_flags.CU_EVENT_DISABLE_TIMING.value
        event = self._spare.pop() if self._spare else self.driver("cuEventCreate", flags)
        self.driver("cuEventRecord", event, self.driver.stream)
        return event

    def _retire(self) -> None:
        _, _, event = self._busy.pop(0)
        if event is None:
            self.driver.synchronize()
            self.idle()
        else:
            self.driver("cuEventSynchronize", event)
            self._spare.append(event)

    def idle(self) -> None:
        """All work of the stream is done, so every piece is free."""
        self._spare += [event for _, _, event in self._busy if event is not None]
        self._busy.clear()


class Page:
    """The control page as the host last wrote it, and what of that the device has yet to see.

    Of its first `own` bytes, which no kernel writes, the device has what was sent: what the host
    writes there again is not sent again, and what lies between two pieces goes along with them.
    """

    def __init__(self, nbytes: int, slot: int = SLOT, own: int = 0) -> None:
        self._memory = bytearray(nbytes)
        self.bytes: Array = np.frombuffer(self._memory, np.uint8)
        self._slot = slot
        self._own = own
        self._dirty: dict[int, int] = {}
        """Start -> end."""

    def write(self, offset: int, data: bytes) -> None:
        """Remember bytes for the next flush."""
        end = offset + len(data)
        if end <= self._own and bytes(self._memory[offset:end]) == data:
            return
        self._memory[offset:end] = data
        self._dirty[offset] = max(end, self._dirty.get(offset, 0))

    def flush(self, base: int, ring: Ring) -> None:
        """Send what changed; neighbours travel together."""
        if not self._dirty:
            return
        spans = sorted(self._dirty.items())
        start, end = spans[0]
        for next_start, next_end in spans[1:]:
            if next_start >= self._own and next_start > -(-end // self._slot) * self._slot:
                ring.send(base + start, self.bytes[start:end])
                start = next_start
            end = max(end, next_end)
        ring.send(base + start, self.bytes[start:end])
        self._dirty.clear()  # not before: what could not be sent has yet to be seen


def corners(spec: TensorSpec, array: Array) -> Iterator[tuple[int, Array]]:
    """The contiguous runs of a tensor's leading corner: offset in bytes, and uint8 view of the
    array's part.
    """
    if array.shape == spec.shape:
        yield 0, array.reshape(-1).view(np.uint8)
        return
    whole, part = spec.at({}), array.shape
    assert all(p <= w for p, w in zip(part, whole, strict=True)), (spec, part)
    # Axes from `split` on are complete, so everything under one index before it is one run.
    split = len(part)
    while split > 0 and part[split - 1] == whole[split - 1]:
        split -= 1
    head = part[: max(split - 1, 0)]
    strides = np.cumprod([1, *whole[:0:-1]], dtype=np.int64)[::-1] * spec.dtype.bytes
    flat = array.reshape(*head, -1) if head else array.reshape(1, -1)
    for index in np.ndindex(*head) if head else [(0,)]:
        offset = int(sum(i * s for i, s in zip(index, strides, strict=False))) if head else 0
        yield offset, flat[index].view(np.uint8)
