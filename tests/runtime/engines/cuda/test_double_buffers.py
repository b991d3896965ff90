"""Replayed calls read states where they are, although states alternate between two places."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from stand_ins.fake_driver import FakeCuda, fake

from thor_dflash.core.tensors import DType, TensorSpec
from thor_dflash.plugins.cuda.driver import Driver
from thor_dflash.runtime.engines.cuda import graph_replay
from thor_dflash.runtime.engines.cuda.binding import BoundCall, CudaTensor, cuda
from thor_dflash.runtime.engines.cuda.device_tensors import DeviceTensors
from thor_dflash.runtime.engines.cuda.graph_capture import CapturedGraph
from thor_dflash.runtime.engines.cuda.graph_replay import GraphReplay
from thor_dflash.runtime.engines.protocol import Call

LARGE = TensorSpec("gdn.0.record", DType.F32, (64, 256))


class Noted:
    """Replayed calls that only note where they lead, given the offsets on the device by then."""

    def __init__(
        self, device: FakeCuda, monkeypatch: pytest.MonkeyPatch, *, indirect: bool = True
    ) -> None:
        self.tensors = DeviceTensors(Driver(), indirect=indirect)
        self.replay = GraphReplay(self.tensors, self._resolve, graphs=True)
        self.ran: list[list[int]] = []
        """Of each replay: call by call, the addresses of inputs, then those of outputs."""
        self.captures = 0
        self.gpu = device
        monkeypatch.setattr(graph_replay, "capture", self._capture)

    def _resolve(self, bound: BoundCall, first: bool) -> Any:
        reads = [cuda(tensor) for tensor in bound.call.inputs.values()]
        at = [(t.now, 1, t.buffer.word if t.buffer else 0) for t in reads]
        for name, tensor in bound.call.outputs.items():
            buffer = cuda(tensor).buffer
            at.append((bound.where(name), -1, buffer.word if buffer else 0))
        return at

    def _capture(
        self, name: str, driver: Driver, calls: Sequence[Any], *_: Any, graph: bool
    ) -> CapturedGraph:
        self.captures += 1
        at = list(itertools.chain.from_iterable(calls))

        def start() -> None:
            self.ran.append([address + sign * self._offset_at(word) for address, sign, word in at])

        return CapturedGraph("noted", driver, start)

    def _offset_at(self, word: int) -> int:
        """The offset last sent to the device at address `word`; 0 without one."""
        found = 0
        for address, data in self.gpu.sent:
            if word and address <= word < address + len(data):
                found = int(np.frombuffer(data[word - address :][:8], np.int64)[0])
        return found

    def empty(self, spec: TensorSpec) -> CudaTensor:
        return self.tensors.empty(spec, {})

    def ready(self, *calls: Call, kept: Collection[str] = ()) -> None:
        bound = {call: BoundCall(call=call) for call in calls}
        self.replay.bound |= bound
        self.tensors.assign_buffers([(one, kept) for one in bound.values()])
        self.tensors.allocate(self.tensors.count())


def call(name: str, reads: dict[str, Any], writes: dict[str, Any]) -> Call:
    return Call(SimpleNamespace(name=name), reads, writes)  # type: ignore[arg-type]


both = pytest.mark.parametrize("indirect", [False, True], ids=["fixed", "indirect"])
"""Whether addresses are fixed in a capture, or kernels read the offset from the control page."""


@both
@pytest.mark.parametrize("order", ["aaaa", "abcb", "acac", "bcca", "caba", "ccab", "cbac"])
def test_every_call_reads_a_state_where_it_was_written_last(
    order: str, indirect: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Call a updates records and a tail, as a verify does; c only the tail, as a prefill does; b
    updates nothing.
    """
    engine = Noted(fake(monkeypatch), monkeypatch, indirect=indirect)
    small = TensorSpec("gdn.0.tail", DType.F32, (3, 5))
    records, tails = engine.empty(LARGE), engine.empty(small)
    reads = {"r": records, "t": tails}
    calls = {
        "a": call("a", reads, {"next.r": records, "next.t": tails}),
        "b": call("b", reads, {}),
        "c": call("c", reads, {"next.t": tails}),
    }
    engine.ready(*calls.values())
    now = {n: cuda(t).places[0] for n, t in reads.items()}
    for step in order:
        engine.replay.run([calls[step]])
        other = {n: sum(cuda(t).places) - now[n] for n, t in reads.items()}
        written = {"a": "rt", "b": "", "c": "t"}[step]
        assert engine.ran[-1] == [*now.values(), *(other[n] for n in written)]
        now |= {n: other[n] for n in written}
        assert {n: cuda(t).now for n, t in reads.items()} == now
    assert engine.captures == len(set(order)) or not indirect


@both
def test_a_run_may_update_a_state_twice(indirect: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Noted(fake(monkeypatch), monkeypatch, indirect=indirect)
    state = engine.empty(LARGE)
    renew = call("a", {"x": state}, {"next.x": state})
    look = call("b", {"x": state}, {})
    engine.ready(renew, look)
    first, second = cuda(state).places
    for _ in range(2):
        engine.replay.run([look, renew, renew, look, renew])
        engine.replay.run([renew, look])
        wanted = [first, first, second, second, first, first, first, second, second, first, first]
        assert list(itertools.chain(*engine.ran)) == wanted
        engine.ran.clear()


def test_a_capture_that_fails_leaves_states_in_their_places(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = Noted(fake(monkeypatch), monkeypatch)
    state = engine.empty(LARGE)
    renew, again = (call(n, {"x": state}, {"next.x": state}) for n in "ab")
    engine.ready(renew, again)
    engine.replay.run([renew])
    now = cuda(state).now
    with monkeypatch.context() as patch:
        patch.setattr(BoundCall, "swap", lambda call: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.replay.run([again])
    assert cuda(state).now == now


def test_a_state_is_cleared_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clearing copies no zeros to the device, and it applies to the state's current place."""
    device = fake(monkeypatch)
    cleared: list[tuple[int, int, int]] = []
    monkeypatch.setattr(
        device, "cuMemsetD8Async", lambda at, value, n, _: cleared.append((at, value, n)) or (0,)
    )
    engine = Noted(device, monkeypatch)
    state, small = engine.empty(LARGE), engine.empty(TensorSpec("a", DType.I32, (3,)))
    renew = call("a", {"x": state, "y": small}, {"next.x": state})
    engine.ready(renew)
    engine.replay.run([renew])
    engine.replay.write(small, np.array([1, 2, 3], np.int32))
    engine.replay.clear(state)
    engine.replay.clear(small)
    assert cleared == [(cuda(state).now, 0, LARGE.nbytes({}))]
    assert cuda(state).now == cuda(state).places[1]
    device.sent.clear()
    engine.replay.run([renew])
    assert all(len(data) < 64 for _, data in device.sent)
    at = cuda(small).places[0]
    [(start, data)] = [(to, d) for to, d in device.sent if to <= at < to + len(d)]
    assert data[at - start :][:12] == bytes(12)
