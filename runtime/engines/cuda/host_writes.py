"""Host writes: gathered in page-locked memory and copied before the work that needs them.

Small tensors are contiguous in one control page, so that the dozen numbers a step needs are sent as
one copy. Normally nothing waits: a piece of the ring is reused once its copies have been made.
"""

# cuda-python publishes no types.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from thor_dflash.core.tensors import Array, TensorSpec
from thor_dflash.plugins.cuda.driver import Driver, PinnedMemory

SMALL = 16 << 10
"""Largest tensor that is put in the control page, bytes."""

RING = 8 << 20
"""Page-locked memory for copies in flight, bytes."""

SLOT = 16
"""Alignment of a tensor in the control page, and of a piece of the ring, bytes."""


@dataclass(slots=True)
class StagingRing:
    """A ring buffer of page-locked memory for copies to the device."""

    driver: Driver
    memory: PinnedMemory
    sent: int = 0
    """Number of copies so far."""
    _at: int = 0
    _busy: list[tuple[int, int, Any]] = field(default_factory=list[tuple[int, int, Any]])
    """Pieces whose copies may be in flight, oldest first: start, end, event after the copy. A small
    one has None for the event: normally a read waits for all work long before the ring wraps.
    """
    _spare: list[Any] = field(default_factory=list[Any])

    def send(self, to: int, data: Array) -> None:
        """Copy bytes (uint8 [n]) to a device address, in stream order."""
        for start in range(0, len(data), RING // 2):
            self._send(to + start, data[start : start + RING // 2])

    def _send(self, to: int, data: Array) -> None:
        size = -(-len(data) // SLOT) * SLOT
        if self._at + size > len(self.memory.bytes):
            self._at = 0
        start, end = self._at, self._at + size
        # Search all, not just the oldest: it may be left over at the end of the ring, beyond `end`.
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
        event = self._spare.pop() if self._spare else self.driver.make("cuEventCreate", flags)
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
        """Note that all work of the stream is done, so every piece is free."""
        self._spare += [event for _, _, event in self._busy if event is not None]
        self._busy.clear()


class ControlPage:
    """The control page as the host last wrote it, and which parts have yet to be sent.

    No kernel writes the first `own` bytes, so the device's copy of them is known: an unchanged
    value is not sent again, and bytes between two changed pieces may be sent along with them.
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
        # In this order: an interrupt in between must not hide that the device has another value.
        self._dirty[offset] = max(end, self._dirty.get(offset, 0))
        self._memory[offset:end] = data

    def flush(self, base: int, ring: StagingRing) -> None:
        """Send what changed; adjacent pieces are sent in one copy."""
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
        self._dirty.clear()  # only now: if a send fails, its data is still unsent


def corners(spec: TensorSpec, array: Array) -> Iterator[tuple[int, Array]]:
    """Yield the contiguous runs of a tensor's leading corner: offset in bytes, and a uint8 view of
    that part of the array.
    """
    if array.shape == spec.shape:
        yield 0, array.reshape(-1).view(np.uint8)
        return
    whole, part = spec.at({}), array.shape
    assert all(p <= w for p, w in zip(part, whole, strict=True)), (spec, part)
    # Axes from `split` on are complete, so each index into the axes before `split - 1` is one run.
    split = len(part)
    while part[split - 1] == whole[split - 1]:
        split -= 1
    head = part[: split - 1]
    strides = np.cumprod([1, *whole[:0:-1]], dtype=np.int64)[::-1] * spec.dtype.bytes
    flat = array.reshape(*head, -1)
    for index in np.ndindex(*head):
        offset = int(sum(i * s for i, s in zip(index, strides, strict=False)))
        yield offset, flat[index].view(np.uint8)
