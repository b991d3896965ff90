"""The common base of engines on NVIDIA devices: tensors, host writes and reads, replayed cycles."""

# cuda-python publishes no types.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from thor_dflash.core.tensors import Array, Dims, TensorSpec
from thor_dflash.plugins.cuda.driver import DeviceInfo, Driver
from thor_dflash.runtime.engines.cuda.arena import Arena, kind
from thor_dflash.runtime.engines.cuda.binding import CudaTensor, DoubleBuffer, cuda
from thor_dflash.runtime.engines.cuda.graph_capture import (
    CapturedGraph,
    CapturedReadback,
    HostCopy,
    Readback,
)
from thor_dflash.runtime.engines.cuda.host_writes import (
    RING,
    SLOT,
    SMALL,
    ControlPage,
    StagingRing,
    corners,
)
from thor_dflash.runtime.engines.cuda.run_timing import RunTimes
from thor_dflash.runtime.engines.protocol import Call, Tensor

WORD = 8
"""Bytes of a turn's word in the control page: an int64."""


@dataclass(frozen=True, slots=True)
class Part:
    """Calls that are captured and run as one."""

    calls: tuple[Call, ...]
    key: tuple[int, ...]
    """id of each call."""
    touched: tuple[DoubleBuffer, ...]
    """The turns of their tensors, without duplicates."""


class Board(ABC):
    """Tensors of one device and the calls captured on them.

    Memory is counted before it is allocated: tensors have no address until `prepare`, and none can
    be made after it.
    """

    def __init__(self, driver: Driver, slot: int = SLOT, *, told: bool = False) -> None:
        """`slot` is the alignment of a small tensor, bytes. `told`: kernels read from the control
        page which place holds the value of a tensor with two places, so calls are captured once;
        otherwise they are captured once per combination of places.
        """
        self._driver = driver
        self._slot = slot
        self._told = told
        self._tensors: list[CudaTensor] = []
        self._arena = Arena()
        self._turns: dict[int, list[DoubleBuffer]] = {}
        """id of a call -> the turns that change when it has run."""
        self._touched: dict[int, list[DoubleBuffer]] = {}
        """id of a call -> the turns of all its tensors, whether or not it changes them."""
        self._made: set[int] = set()
        """ids of tensors that calls write."""
        self._read: set[int] = set()
        """ids of tensors that calls read."""
        self._captured: dict[tuple[int, ...], CapturedGraph] = {}
        self._split: dict[tuple[int, ...], list[Part]] = {}
        self._page_at = 0
        self._for_host: dict[int, HostCopy] = {}
        """id of a small tensor that calls write and none reads -> its copy to the host."""
        self._runs = RunTimes()
        self._sent = 0
        """Number of host-to-device copies up to the last run."""

    @property
    def info(self) -> DeviceInfo:
        """The device."""
        return self._driver.info

    @property
    def device(self) -> str:
        """See Engine."""
        count = self.info.device.multiprocessors
        return f"{self.info.name}, {count} SMs, driver {self.info.driver}"

    @property
    def driver(self) -> Driver:
        """The driver, for measurements."""
        return self._driver

    @property
    def memory(self) -> Mapping[str, int]:
        """Device memory of the engine: kind -> bytes."""
        return dict(self._arena.sizes)

    def empty(self, spec: TensorSpec, dims: Dims) -> Tensor:
        """See Engine."""
        assert not self._arena.base, f"{spec} made after prepare"
        tensor = CudaTensor(TensorSpec(spec.name, spec.dtype, spec.at(dims)))
        self._tensors.append(tensor)
        return tensor

    # ---- memory --------------------------------------------------------------------------

    def _take_turns(self, prepared: Sequence[tuple[Call, Collection[str]]]) -> None:
        """Give a tensor a second place if a call reads and updates it but cannot do so in place.
        Tensors that are updated by the same calls share one turn.

        Args:
            prepared: Every call, with the names of the outputs that it updates in place.
        """
        by: dict[int, list[Call]] = {}
        tensors: dict[int, CudaTensor] = {}
        for call, kept in prepared:
            self._turns[id(call)] = []
            self._made |= {id(tensor) for tensor in call.outputs.values()}
            read = {id(tensor) for tensor in call.inputs.values()}
            self._read |= read
            outputs = [cuda(t) for name, t in call.outputs.items() if name not in kept]
            for tensor in (t for t in outputs if id(t) in read):
                by.setdefault(id(tensor), []).append(call)
                tensors[id(tensor)] = tensor
        turns: dict[tuple[int, ...], DoubleBuffer] = {}
        for key, calls in by.items():
            together = tuple(map(id, calls))
            if together not in turns:
                turns[together] = DoubleBuffer()
                for call in calls:
                    self._turns[id(call)].append(turns[together])
            tensors[key].turn = turns[together]
        for call, _ in prepared:
            found = [cuda(t).turn for t in (*call.inputs.values(), *call.outputs.values())]
            self._touched[id(call)] = list({id(t): t for t in found if t}.values())

    def _count_tensors(self) -> int:
        """Reserve space for the tensors; return the control page's offset in the arena."""
        turns: dict[DoubleBuffer, list[CudaTensor]] = {}
        small: list[CudaTensor] = []
        for tensor in self._tensors:
            size = tensor.spec.nbytes({})
            if tensor.turn:
                turns.setdefault(tensor.turn, []).append(tensor)
            elif size <= SMALL:
                small.append(tensor)
            else:
                tensor.places = [self._arena.take(kind(tensor.spec.name), size)]
        for turn, tensors in turns.items():
            # All first places, then all second ones, so that every distance is the same.
            for _ in range(2):
                for tensor in tensors:
                    size = tensor.spec.nbytes({})
                    tensor.places.append(self._arena.take(kind(tensor.spec.name), size))
            turn.distance = tensors[0].places[1] - tensors[0].places[0]
        return self._arena.take("rows", self._lay_out(small, list(turns) if self._told else []))

    def _lay_out(self, small: Sequence[CudaTensor], turns: Sequence[DoubleBuffer]) -> int:
        """Lay out the control page, with data that only the host writes first; return its size."""
        end = 0

        def take(size: int) -> int:
            nonlocal end
            start, end = end, end + -(-size // self._slot) * self._slot
            return start

        for turn in turns:
            turn.control = take(WORD)
        for tensor in small:
            if id(tensor) not in self._made:
                tensor.control = take(tensor.spec.nbytes({}))
        own = end
        for tensor in small:
            if id(tensor) in self._made:
                tensor.control = take(tensor.spec.nbytes({}))
        self._page = ControlPage(end, self._slot, own)
        return end

    def _allocate(self, page: int) -> int:
        """Allocate and zero the counted memory and place the tensors; return its address.

        Raises:
            OutOfMemory: it does not fit.
        """
        self._arena.check(self._driver.free_memory())
        base = self._arena.base = self._driver.allocate(self._arena.nbytes)
        self._driver("cuMemsetD8", base, 0, self._arena.nbytes)
        for tensor in self._tensors:
            if tensor.control >= 0:
                tensor.places = [base + page + tensor.control]
            else:
                tensor.places = [base + offset for offset in tensor.places]
        for turn in {turn for turns in self._touched.values() for turn in turns if self._told}:
            turn.word = base + page + turn.control
        self._page_at = base + page
        self._ring = StagingRing(self._driver, self._driver.pinned(RING))
        self._back = self._driver.pinned(RING)
        self._make_ways()
        return base

    def _make_ways(self) -> None:
        """Allocate page-locked memory for the tensors that are handed to the host."""
        found = [
            tensor
            for tensor in self._tensors
            if tensor.control >= 0 and id(tensor) in self._made - self._read
        ]
        self._hands = self._driver.pinned(max(1, len(found)) * SMALL)
        for i, tensor in enumerate(found):
            host, size = self._hands.address + i * SMALL, tensor.spec.nbytes({})
            self._for_host[id(tensor)] = HostCopy(tensor.now, host, size)

    # ---- run -----------------------------------------------------------------------------

    @abstractmethod
    def _capture(self, calls: Sequence[Call]) -> CapturedGraph:
        """Capture calls for replay, for the places that tensors have now. Also advances the turns,
        as running the calls does.
        """

    def run(self, calls: Sequence[Call]) -> None:
        """See Engine."""
        self._enter()
        key = tuple(map(id, calls))
        if key not in self._split:
            parts = self._parts(calls) if self._told else [calls]
            self._split[key] = [self._part(part) for part in parts]
        for part in self._split[key]:
            self._run(part)
        # Times of earlier runs: collected now, while the device is busy.
        self._runs.collect()

    def _run(self, part: Part) -> None:
        key = part.key if self._told else (*part.key, *(turn.current for turn in part.touched))
        self._tell(part)
        if key not in self._captured:
            with self._as_placed(part):
                self._captured[key] = self._capture(part.calls)
        else:
            for call in part.calls:
                self._turn(call)
        self._page.flush(self._page_at, self._ring)
        self._runs.run(self._captured[key])
        self._sent = self._ring.sent

    def _handover(self, calls: Sequence[Call]) -> Readback | None:
        """Copies of outputs only the host reads; None if none, or if the last call writes one."""
        after, copies = 0, dict[int, HostCopy]()
        for i, call in enumerate(calls):
            for tensor in call.outputs.values():
                if id(tensor) in self._for_host:
                    after, copies[id(tensor)] = i + 1, self._for_host[id(tensor)]
        if not copies or any(id(tensor) in copies for tensor in calls[-1].outputs.values()):
            return None
        return Readback(after, tuple(copies.values()))

    def _part(self, calls: Sequence[Call]) -> Part:
        touched = dict.fromkeys(turn for call in calls for turn in self._touched[id(call)])
        return Part(tuple(calls), tuple(map(id, calls)), tuple(touched))

    def _parts(self, calls: Sequence[Call]) -> Iterator[Sequence[Call]]:
        """Split calls into parts that need to be told only once where tensors are: no call touches
        a tensor whose turn an earlier call of the same part changed.
        """
        part: list[Call] = []
        renewed: set[DoubleBuffer] = set()
        for call in calls:
            if renewed & set(self._touched[id(call)]):
                yield part
                part, renewed = [], set()
            part.append(call)
            renewed |= set(self._turns[id(call)])
        yield part

    def _tell(self, part: Part) -> None:
        """Write where the tensors of a part are to the control page, for the next flush."""
        for turn in part.touched if self._told else ():
            self._page.write(turn.control, (turn.current * turn.distance).to_bytes(WORD, "little"))

    @contextmanager
    def _as_placed(self, part: Part) -> Generator[None]:
        """Capture with all values in their first places if kernels are told the distance from
        there. Restores the turns afterwards, advanced by what was captured.
        """
        before = {turn: turn.current for turn in part.touched if self._told}
        for turn in before:
            turn.current = 0
        try:
            yield
        except BaseException:
            for turn, front in before.items():
                turn.current = front
            raise
        for turn, front in before.items():
            turn.current ^= front

    def _turn(self, call: Call) -> None:
        for turn in self._turns[id(call)]:
            turn.current = 1 - turn.current

    def write(self, tensor: Tensor, values: Array) -> None:
        """See Engine."""
        t = cuda(tensor)
        self._changed(t)
        data = np.ascontiguousarray(values, t.spec.dtype.numpy)
        if t.control >= 0 and data.shape == t.spec.shape:
            self._page.write(t.control, data.tobytes())
            return
        for at, piece in corners(t.spec, data):
            if t.control >= 0:
                self._page.write(t.control + at, piece.tobytes())
            else:
                self._enter()
                self._ring.send(t.now + at, piece)

    def clear(self, tensor: Tensor) -> None:
        """See Engine."""
        t, size = cuda(tensor), tensor.spec.nbytes({})
        self._changed(t)
        if t.control >= 0:
            self._page.write(t.control, bytes(size))
            return
        self._enter()
        self._driver("cuMemsetD8Async", t.now, 0, size, self._driver.stream)

    def read(self, tensor: Tensor, shape: tuple[int, ...] | None = None) -> Array:
        """See Engine."""
        self._enter()
        t = cuda(tensor)
        handed = self._runs.latest.handed if self._runs.latest else None
        if handed and shape is None and t.now in handed.copies:
            return self._given(t, handed)
        self._page.flush(self._page_at, self._ring)
        out = np.empty(t.spec.at({}) if shape is None else shape, t.spec.dtype.numpy)
        for at, piece in corners(t.spec, out):
            for start in range(0, len(piece), RING):
                part = piece[start : start + RING]
                self._driver(
                    "cuMemcpyDtoHAsync",
                    self._back.address,
                    t.now + at + start,
                    len(part),
                    self._driver.stream,
                )
                self._driver.synchronize()
                part[:] = self._back.bytes[: len(part)]
        self._idle()
        return out

    def _given(self, tensor: CudaTensor, handed: CapturedReadback) -> Array:
        """Return a tensor that the last run hands over. The run itself may still be going on."""
        self._driver("cuEventSynchronize", handed.event)
        if self._ring.sent == self._sent:
            self._ring.idle()
        self._runs.idle_before()
        copy = handed.copies[tensor.now]
        start = copy.host - self._hands.address
        data = self._hands.bytes[start : start + copy.nbytes]
        return data.view(tensor.spec.dtype.numpy).reshape(tensor.spec.at({})).copy()

    def _changed(self, tensor: CudaTensor) -> None:
        """Note a host write: the value handed over by the last run is no longer current."""
        if id(tensor) in self._for_host:
            self._runs.latest = None

    def _idle(self) -> None:
        """Note that all work of the stream is done."""
        self._ring.idle()
        self._runs.idle()

    def busy(self) -> Mapping[str, float]:
        """See Engine. Graphs that run as one share a name: "propose+verify+accept+observe".

        A finaliser may call this at any moment, also in the middle of a step of this engine or of
        another: so the thread keeps its context, and times are collected later during a capture.
        """
        news = self._runs.left or self._runs.ended
        if news and not self._driver.capturing and not self._driver.ended:
            with self._driver.entered():
                if self._runs.left:
                    self._driver.synchronize()
                    self._idle()
                self._runs.collect()
        return self._runs.seconds

    def note(self) -> list[float]:
        """A list of the seconds of each run from now on, in order; `busy` brings it up to date."""
        self._runs.noted = []
        return self._runs.noted

    def _enter(self) -> None:
        """Make the context current: a session may move to another thread between requests, and
        another engine on this thread has its own context.
        """
        self._driver.enter()

    def close(self) -> None:
        """See Engine."""
        self._captured.clear()
        self._driver.close()
