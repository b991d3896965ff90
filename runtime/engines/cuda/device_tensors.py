"""The tensors of an engine on an NVIDIA device: their memory, host writes and reads.

Memory is counted before it is allocated: tensors have no address until `allocate`, and none can be
made after it.
"""

# cuda-python publishes no types.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import numpy as np

from thor_dflash.core.tensors import Array, Dims, TensorSpec
from thor_dflash.plugins.cuda.driver import Driver
from thor_dflash.runtime.engines.cuda.arena import Arena, kind
from thor_dflash.runtime.engines.cuda.binding import BoundCall, CudaTensor, DoubleBuffer, cuda
from thor_dflash.runtime.engines.cuda.graph_capture import CapturedReadback, HostCopy
from thor_dflash.runtime.engines.cuda.host_writes import (
    RING,
    SLOT,
    SMALL,
    ControlPage,
    StagingRing,
    corners,
)
from thor_dflash.runtime.engines.protocol import TensorRows

WORD = 8
"""Bytes of a double buffer's word in the control page: an int64."""


class DeviceTensors:
    """Tensors in one arena, the small ones in its control page."""

    def __init__(self, driver: Driver, slot: int = SLOT, *, indirect: bool = False) -> None:
        """`slot` is the alignment of a small tensor, bytes. `indirect`: kernels read from the
        control page which place holds the value of a tensor with two places.
        """
        self.driver = driver
        self.indirect = indirect
        self.arena = Arena()
        self.all: list[CudaTensor] = []
        self._slot = slot
        self._reserved = 0
        self._reserved_at = 0
        self._buffers: dict[DoubleBuffer, None] = {}

    def empty(self, spec: TensorSpec, dims: Dims) -> CudaTensor:
        """See Engine."""
        assert not self.arena.base, f"{spec} made after prepare"
        tensor = CudaTensor(TensorSpec(spec.name, spec.dtype, spec.at(dims)))
        self.all.append(tensor)
        return tensor

    # ---- memory --------------------------------------------------------------------------

    def reserve(self, nbytes: int) -> None:
        """See Engine."""
        self._reserved = nbytes

    def assign_buffers(self, bound: Sequence[tuple[BoundCall, Collection[str]]]) -> None:
        """Give a tensor a second place if a call reads and updates it but cannot do so in place.
        Tensors that are updated by the same calls share one double buffer.

        Args:
            bound: Every call, with the names of the outputs that it updates in place.
        """
        updates: dict[CudaTensor, list[BoundCall]] = {}
        for one, in_place in bound:
            for tensor in one.updated(in_place):
                updates.setdefault(tensor, []).append(one)
        shared: dict[tuple[BoundCall, ...], DoubleBuffer] = {}
        for tensor, calls in updates.items():
            together = tuple(calls)
            if together not in shared:
                shared[together] = DoubleBuffer()
                for one in calls:
                    one.swapped.append(shared[together])
            tensor.buffer = shared[together]
        for one, _ in bound:
            one.touched = list(dict.fromkeys(t.buffer for t in one.tensors if t.buffer))
            self._buffers |= dict.fromkeys(one.touched)

    def count(self) -> int:
        """Reserve space for the tensors; return the control page's offset in the arena."""
        double: dict[DoubleBuffer, list[CudaTensor]] = {}
        small: list[CudaTensor] = []
        for tensor in self.all:
            size = tensor.spec.nbytes({})
            if tensor.buffer:
                double.setdefault(tensor.buffer, []).append(tensor)
            elif size <= SMALL:
                small.append(tensor)
            else:
                tensor.places = [self.arena.take(kind(tensor.spec.name), size)]
        for buffer, tensors in double.items():
            # All first places, then all second ones, so that every distance is the same.
            for _ in range(2):
                for tensor in tensors:
                    size = tensor.spec.nbytes({})
                    tensor.places.append(self.arena.take(kind(tensor.spec.name), size))
            buffer.distance = tensors[0].places[1] - tensors[0].places[0]
        if self._reserved:
            self._reserved_at = self.arena.take("reuse", self._reserved)
        return self.arena.take("rows", self._lay_out(small, list(double) if self.indirect else []))

    def _lay_out(self, small: Sequence[CudaTensor], buffers: Sequence[DoubleBuffer]) -> int:
        """Lay out the control page, with data that only the host writes first; return its size."""
        end = 0

        def take(size: int) -> int:
            nonlocal end
            start, end = end, end + -(-size // self._slot) * self._slot
            return start

        for buffer in buffers:
            buffer.control = take(WORD)
        for tensor in (t for t in small if not t.written):
            tensor.control = take(tensor.spec.nbytes({}))
        own = end
        for tensor in (t for t in small if t.written):
            tensor.control = take(tensor.spec.nbytes({}))
        self.page = ControlPage(end, self._slot, own)
        return end

    def allocate(self, page: int) -> int:
        """Allocate and zero the counted memory and place the tensors; return its address.

        Raises:
            OutOfMemory: it does not fit.
        """
        self.arena.check(self.driver.free_memory())
        base = self.arena.base = self.driver.allocate(self.arena.nbytes)
        self.driver("cuMemsetD8", base, 0, self.arena.nbytes)
        self._page_at = base + page
        self._reserved_at += base
        for tensor in self.all:
            if tensor.control >= 0:
                tensor.places = [self._page_at + tensor.control]
            else:
                tensor.places = [base + offset for offset in tensor.places]
        for buffer in self._buffers if self.indirect else ():
            buffer.word = self._page_at + buffer.control
        self.ring = StagingRing(self.driver, self.driver.pinned(RING))
        self._back = self.driver.pinned(RING)
        self._place_readbacks()
        return base

    def _place_readbacks(self) -> None:
        """Allocate page-locked memory for the small tensors that calls make for the host alone."""
        found = [t for t in self.all if t.control >= 0 and t.written and not t.read]
        self._early = self.driver.pinned(max(1, len(found)) * SMALL)
        for i, tensor in enumerate(found):
            host, size = self._early.address + i * SMALL, tensor.spec.nbytes({})
            tensor.readback = HostCopy(tensor.now, host, size)

    # ---- host writes and reads -----------------------------------------------------------

    def show_places(self, buffers: Iterable[DoubleBuffer]) -> None:
        """Write to the control page which places are current, for the next flush."""
        for buffer in buffers:
            place = buffer.current * buffer.distance
            self.page.write(buffer.control, place.to_bytes(WORD, "little"))

    def flush(self) -> None:
        """Send what changed in the control page."""
        self.page.flush(self._page_at, self.ring)

    def write(self, tensor: CudaTensor, values: Array) -> None:
        """Copy into the leading corner of a tensor."""
        spec = tensor.spec
        data = np.ascontiguousarray(values, spec.dtype.numpy)
        if tensor.control >= 0 and data.shape == spec.shape:
            self.page.write(tensor.control, data.tobytes())
            return
        for at, piece in corners(spec, data):
            if tensor.control >= 0:
                self.page.write(tensor.control + at, piece.tobytes())
            else:
                self.driver.enter()
                self.ring.send(tensor.now + at, piece)

    def clear(self, tensor: CudaTensor) -> None:
        """Zero a tensor."""
        size = tensor.spec.nbytes({})
        if tensor.control >= 0:
            self.page.write(tensor.control, bytes(size))
            return
        self.driver.enter()
        self.driver("cuMemsetD8Async", tensor.now, 0, size, self.driver.stream)

    def read(self, tensor: CudaTensor, shape: tuple[int, ...] | None) -> Array:
        """Wait for all work, then copy the leading corner of a tensor to the host."""
        self.flush()
        driver, spec = self.driver, tensor.spec
        out = np.empty(spec.at({}) if shape is None else shape, spec.dtype.numpy)
        for at, piece in corners(spec, out):
            for start in range(0, len(piece), RING):
                part = piece[start : start + RING]
                source, to = tensor.now + at + start, self._back.address
                driver("cuMemcpyDtoHAsync", to, source, len(part), driver.stream)
                driver.synchronize()
                part[:] = self._back.bytes[: len(part)]
        return out

    def swap_out(
        self, at: int, parts: Sequence[TensorRows], count: int = 1, stride: int = 0
    ) -> None:
        """See Engine."""
        self._swap(at, parts, count, stride, back=False)

    def swap_in(
        self, at: int, parts: Sequence[TensorRows], count: int = 1, stride: int = 0
    ) -> None:
        """See Engine."""
        self._swap(at, parts, count, stride, back=True)

    def _swap(
        self, at: int, parts: Sequence[TensorRows], count: int, stride: int, *, back: bool
    ) -> None:
        self.driver.enter()
        self.flush()
        place, end = self._reserved_at + at, self._reserved_at + self._reserved
        for part in parts:
            tensor, size = cuda(part.tensor), part.nbytes
            assert place + (count - 1) * stride + size <= end, (part, at)
            heads, rows = (tensor.spec.at({})[0], part.stop - part.start) if part.stop else (1, 1)
            pitch, piece = tensor.spec.nbytes({}) // heads, size // heads
            live = tensor.now + piece // rows * part.start
            # A copy takes all steps of one head, or all heads of one step: the host's time for each
            # is longer than the device's.
            if count > heads:
                pairs = [
                    ((live + head * pitch, piece), (place + head * piece, stride))
                    for head in range(heads)
                ]
            else:
                pairs = [
                    ((live + step * piece, pitch), (place + step * stride, piece))
                    for step in range(count)
                ]
            for one, other in pairs:
                source, target = (other, one) if back else (one, other)
                self.driver.copy_rows(source, target, piece, max(count, heads))
            place += size

    def read_early(self, tensor: CudaTensor, readback: CapturedReadback) -> Array:
        """Wait for a readback, then return a tensor from it."""
        self.driver("cuEventSynchronize", readback.event)
        copy = readback.copies[tensor.now]
        start = copy.host - self._early.address
        data = self._early.bytes[start : start + copy.nbytes]
        return data.view(tensor.spec.dtype.numpy).reshape(tensor.spec.at({})).copy()
