"""Runs the calls of an engine as CUDA graphs: captured once, replayed afterwards, and timed."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

from thor_dflash.core.tensors import Array
from thor_dflash.runtime.engines.cuda.binding import BoundCall, CudaTensor, DoubleBuffer, cuda
from thor_dflash.runtime.engines.cuda.device_tensors import DeviceTensors
from thor_dflash.runtime.engines.cuda.graph_capture import (
    CapturedGraph,
    HostCopy,
    Readback,
    capture,
)
from thor_dflash.runtime.engines.cuda.run_timing import RunTimes
from thor_dflash.runtime.engines.protocol import Call, Tensor

B = TypeVar("B", bound=BoundCall)

Resolve = Callable[[B, bool], Callable[[], None]]
"""Resolves the addresses of a call for the current places; returns a function that enqueues its
work. The flag: whether the call is the first of its graph."""


@dataclass(frozen=True, slots=True, eq=False)
class Segment(Generic[B]):
    """Calls that are captured and run as one graph."""

    calls: tuple[B, ...]
    touched: tuple[DoubleBuffer, ...]
    """The double buffers of their tensors, without duplicates."""
    graphs: dict[tuple[int, ...], CapturedGraph]
    """By the places at which it was captured; with indirect tensors there is only one, ()."""


class GraphReplay(Generic[B]):
    """Captures calls on their first run and replays them afterwards.

    With indirect tensors, calls are captured once; otherwise once per combination of places.
    """

    def __init__(self, tensors: DeviceTensors, resolve: Resolve[B], *, graphs: bool) -> None:
        """`graphs`: False enqueues the calls anew for every run, without a readback."""
        self._tensors = tensors
        self._driver = tensors.driver
        self._resolve = resolve
        self._graphs = graphs
        self._segments: dict[tuple[Call, ...], list[Segment[B]]] = {}
        self.bound: dict[Call, B] = {}
        self.times = RunTimes()
        self._sent = 0
        """Number of host-to-device copies up to the last run."""

    def run(self, calls: Sequence[Call]) -> None:
        """See Engine."""
        self._driver.enter()
        key = tuple(calls)
        if key not in self._segments:
            bound = [self.bound[call] for call in calls]
            cut = _cut(bound) if self._tensors.indirect else [bound]
            self._segments[key] = [self.segment(each) for each in cut]
        for segment in self._segments[key]:
            self._run(segment)
        # Times of earlier runs: collected now, while the device is busy.
        self.times.collect()

    def segment(self, calls: Sequence[B]) -> Segment[B]:
        """Put calls together."""
        touched = dict.fromkeys(buffer for one in calls for buffer in one.touched)
        return Segment(tuple(calls), tuple(touched), {})

    def _run(self, segment: Segment[B]) -> None:
        if self._tensors.indirect:
            key: tuple[int, ...] = ()
            self._tensors.show_places(segment.touched)
        else:
            key = tuple(buffer.current for buffer in segment.touched)
        if key not in segment.graphs:
            with self.captured_places(segment):
                segment.graphs[key] = self._capture(segment.calls)
        else:
            for one in segment.calls:
                one.swap()
        self._tensors.flush()
        self.times.run(segment.graphs[key])
        self._sent = self._tensors.ring.sent

    def _capture(self, calls: Sequence[B]) -> CapturedGraph:
        """Capture calls for the current places, and swap their buffers as running them does."""
        enqueue: list[Callable[[], None]] = []
        for one in calls:
            enqueue.append(self._resolve(one, not enqueue))
            one.swap()
        name = "+".join(one.call.graph.name for one in calls)
        return capture(name, self._driver, enqueue, _readback(calls), graph=self._graphs)

    @contextmanager
    def captured_places(self, segment: Segment[B]) -> Generator[None]:
        """Capture indirect tensors in their first places, from where kernels add the distance.
        Restores the places afterwards, swapped by what was captured.
        """
        before = {b: b.current for b in segment.touched if self._tensors.indirect}
        for buffer in before:
            buffer.current = 0
        try:
            yield
        except BaseException:
            for buffer, current in before.items():
                buffer.current = current
            raise
        for buffer, current in before.items():
            buffer.current ^= current

    def write(self, tensor: Tensor, values: Array) -> None:
        """See Engine."""
        self._tensors.write(self._changed(tensor), values)

    def clear(self, tensor: Tensor) -> None:
        """See Engine."""
        self._tensors.clear(self._changed(tensor))

    def _changed(self, tensor: Tensor) -> CudaTensor:
        """Note a host write: the value in the last run's readback is no longer current."""
        t = cuda(tensor)
        if t.readback:
            self.times.latest = None
        return t

    def read(self, tensor: Tensor, shape: tuple[int, ...] | None = None) -> Array:
        """See Engine. What the last run reads back is there before the run has ended."""
        self._driver.enter()
        t = cuda(tensor)
        early = self.times.latest.readback if self.times.latest else None
        if early and shape is None and t.now in early.copies:
            out = self._tensors.read_early(t, early)
            if self._tensors.ring.sent == self._sent:
                self._tensors.ring.idle()
            self.times.idle_before()
            return out
        out = self._tensors.read(t, shape)
        self._idle()
        return out

    def _idle(self) -> None:
        """Note that all work of the stream is done."""
        self._tensors.ring.idle()
        self.times.idle()

    def busy(self) -> Mapping[str, float]:
        """See Engine. Graphs that run as one share a name: "propose+verify+accept+observe".

        A finaliser may call this at any moment, also in the middle of a step of this engine or of
        another: so the thread keeps its context, and times are collected later during a capture.
        """
        news = self.times.left or self.times.ended
        if news and not self._driver.capturing and not self._driver.ended:
            with self._driver.entered():
                if self.times.left:
                    self._driver.synchronize()
                    self._idle()
                self.times.collect()
        return self.times.seconds

    def close(self) -> None:
        """Drop the graphs and release the context."""
        self._segments.clear()
        self._driver.close()


def _cut(calls: Sequence[B]) -> Iterator[Sequence[B]]:
    """Cut calls so that the places of a segment's tensors are known at its start: no call touches a
    tensor that an earlier call of the segment swapped.
    """
    segment: list[B] = []
    swapped: set[DoubleBuffer] = set()
    for one in calls:
        if swapped & set(one.touched):
            yield segment
            segment, swapped = [], set()
        segment.append(one)
        swapped |= set(one.swapped)
    yield segment


def _readback(calls: Sequence[BoundCall]) -> Readback | None:
    """Copies of outputs only the host reads; None if none, or if the last call writes one."""
    after, copies = 0, dict[CudaTensor, HostCopy]()
    for i, one in enumerate(calls):
        for tensor in one.outputs:
            if tensor.readback:
                after, copies[tensor] = i + 1, tensor.readback
    if not copies or any(tensor in copies for tensor in calls[-1].outputs):
        return None
    return Readback(after, tuple(copies.values()))
