"""Replayed calls read states where they are, although states alternate between two places."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from stand_ins.fake_driver import MS, Fake, fake

from thor_dflash.core.tensors import DType, TensorSpec
from thor_dflash.plugins.cuda.driver import Driver
from thor_dflash.runtime.engines.cuda import base as board_module
from thor_dflash.runtime.engines.cuda.base import Board
from thor_dflash.runtime.engines.cuda.binding import cuda, where
from thor_dflash.runtime.engines.cuda.graph_capture import CapturedGraph
from thor_dflash.runtime.engines.protocol import Call

LARGE = TensorSpec("gdn.0.record", DType.F32, (64, 256))


class Noted(Board):
    """A board whose captures hold only the addresses that calls would use. A replay notes where
    they lead, given the shifts that have been sent to the device by then.
    """

    def __init__(self, device: Fake, *, told: bool) -> None:
        super().__init__(Driver(), told=told)
        self.ran: list[list[int]] = []
        """Of each replay: call by call, the addresses of inputs, then those of outputs."""
        self.gpu = device

    def _capture(self, calls: Sequence[Call]) -> CapturedGraph:
        at: list[tuple[int, int, int]] = []
        for call in calls:
            turns = self._turns[id(call)]
            reads = [cuda(tensor) for tensor in call.inputs.values()]
            at += [(t.now, 1, t.turn.word if t.turn else 0) for t in reads]
            for name, tensor in call.outputs.items():
                turn = cuda(tensor).turn
                at.append((where(call, name, turns), -1, turn.word if turn else 0))
            self._turn(call)

        def start() -> None:
            self.ran.append([address + sign * self._told_at(word) for address, sign, word in at])

        return CapturedGraph("noted", self._driver, start)

    def _told_at(self, word: int) -> int:
        """The shift last sent to the device at address `word`; 0 without one."""
        found = 0
        for address, data in self.gpu.sent:
            if word and address <= word < address + len(data):
                found = int(np.frombuffer(data[word - address :][:8], np.int64)[0])
        return found

    def ready(self, *calls: Call, kept: Collection[str] = ()) -> None:
        self._take_turns([(call, kept) for call in calls])
        self._allocate(self._count_tensors())


def call(name: str, reads: dict[str, Any], writes: dict[str, Any]) -> Call:
    return Call(SimpleNamespace(name=name), reads, writes)  # type: ignore[arg-type]


both = pytest.mark.parametrize("told", [False, True], ids=["baked", "told"])
"""Whether addresses are fixed in a capture, or kernels are told the shift (Board's `told`)."""


@both
@pytest.mark.parametrize("order", list(itertools.product("abc", repeat=4)), ids="".join)
def test_every_call_reads_a_state_where_it_was_written_last(
    order: tuple[str, ...], told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Call a updates records and a tail, as a verify does; c only the tail, as a prefill does; b
    updates nothing.
    """
    board = Noted(fake(monkeypatch), told=told)
    small = TensorSpec("gdn.0.tail", DType.F32, (3, 5))
    records, tails = board.empty(LARGE, {}), board.empty(small, {})
    reads = {"r": records, "t": tails}
    calls = {
        "a": call("a", reads, {"next.r": records, "next.t": tails}),
        "b": call("b", reads, {}),
        "c": call("c", reads, {"next.t": tails}),
    }
    board.ready(*calls.values())
    now = {n: cuda(t).places[0] for n, t in reads.items()}
    for step in order:
        board.run([calls[step]])
        other = {n: sum(cuda(t).places) - now[n] for n, t in reads.items()}
        written = {"a": "rt", "b": "", "c": "t"}[step]
        assert board.ran[-1] == [*now.values(), *(other[n] for n in written)]
        now |= {n: other[n] for n in written}
        assert {n: cuda(t).now for n, t in reads.items()} == now
    assert len(board._captured) == len(set(order)) or not told


@both
def test_a_run_may_update_a_state_twice(told: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    board = Noted(fake(monkeypatch), told=told)
    state = board.empty(LARGE, {})
    renew = call("a", {"x": state}, {"next.x": state})
    look = call("b", {"x": state}, {})
    board.ready(renew, look)
    first, second = cuda(state).places
    for _ in range(2):
        board.run([look, renew, renew, look, renew])
        board.run([renew, look])
        wanted = [first, first, second, second, first, first, first, second, second, first, first]
        assert list(itertools.chain(*board.ran)) == wanted
        board.ran.clear()


def test_a_capture_that_fails_leaves_states_in_their_places(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    board = Noted(fake(monkeypatch), told=True)
    state = board.empty(LARGE, {})
    renew, again = (call(n, {"x": state}, {"next.x": state}) for n in "ab")
    board.ready(renew, again)
    board.run([renew])
    now = cuda(state).now
    with monkeypatch.context() as patch:
        patch.setattr(board, "_turn", lambda call: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            board.run([again])
    assert cuda(state).now == now


@both
def test_a_state_that_is_updated_in_place_has_one_place(
    told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    board = Noted(fake(monkeypatch), told=told)
    state = board.empty(LARGE, {})
    renew = call("a", {"x": state}, {"next.x": state})
    board.ready(renew, kept={"next.x"})
    [place] = cuda(state).places
    board.run([renew])
    assert board.ran == [[place, place]]


def test_times_of_runs_are_collected_while_the_next_one_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Between two runs the device is idle, so nothing is done then that can wait."""
    device = fake(monkeypatch)
    board = Noted(device, told=True)
    small = board.empty(TensorSpec("length", DType.I32, (1,)), {})
    step = call("a", {"x": small}, {})
    board.ready(step)
    for _ in range(3):
        board.run([step])
        ran = len(board.ran)
        board.read(small)
        assert "cuEventElapsedTime" not in device.calls
        board.run([step])
        assert device.calls.count("cuEventElapsedTime") == ran
        board.read(small)
        assert board.busy() == {"noted": MS * 1e-3 * len(board.ran)}
        device.calls.clear()
        board.ran.clear()
        board._runs._seconds.clear()


def test_the_time_of_a_run_counts_once_it_was_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    board = Noted(fake(monkeypatch), told=True)
    small = board.empty(TensorSpec("length", DType.I32, (1,)), {})
    step = call("a", {"x": small}, {})
    board.ready(step)
    board.run([step, step])
    board.run([step])
    assert board.busy() == {}
    board.read(small)
    board.run([step])
    assert board.busy() == board.busy() == {"noted": 2 * MS * 1e-3}
    board.read(small)
    assert board.busy() == {"noted": 3 * MS * 1e-3}


def test_a_closed_board_still_reports_the_times_it_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A report is made even if the device has been lost."""
    board = Noted(fake(monkeypatch), told=True)
    small = board.empty(TensorSpec("length", DType.I32, (1,)), {})
    step = call("a", {"x": small}, {})
    board.ready(step)
    for _ in range(2):
        board.run([step])
        board.read(small)
    board.close()
    assert board.busy() == {"noted": MS * 1e-3}


def test_a_state_is_cleared_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clearing copies no zeros to the device, and it applies to the state's current place."""
    device = fake(monkeypatch)
    cleared: list[tuple[int, int, int]] = []
    monkeypatch.setattr(
        device, "cuMemsetD8Async", lambda at, value, n, _: cleared.append((at, value, n)) or (0,)
    )
    board = Noted(device, told=True)
    state, small = board.empty(LARGE, {}), board.empty(TensorSpec("a", DType.I32, (3,)), {})
    renew = call("a", {"x": state, "y": small}, {"next.x": state})
    board.ready(renew)
    board.run([renew])
    board.write(small, np.array([1, 2, 3], np.int32))
    board.clear(state)
    board.clear(small)
    assert cleared == [(cuda(state).now, 0, LARGE.nbytes({}))]
    assert cuda(state).now == cuda(state).places[1]
    device.sent.clear()
    board.run([renew])
    assert all(len(data) < 64 for _, data in device.sent)
    at = cuda(small).places[0]
    [(start, data)] = [(to, d) for to, d in device.sent if to <= at < to + len(d)]
    assert data[at - start :][:12] == bytes(12)


def test_what_is_larger_than_the_hosts_memory_for_it_is_read_piece_by_piece(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device, read = fake(monkeypatch), list[tuple[int, int]]()
    copy = device.cuMemcpyDtoHAsync

    def copied(to: int, at: int, nbytes: int, stream: int) -> Any:
        read.append((at, nbytes))
        return copy(to, at, nbytes, stream)

    monkeypatch.setattr(device, "cuMemcpyDtoHAsync", copied)
    board = Noted(device, told=True)
    state = board.empty(LARGE, {})
    board.ready(call("a", {"x": state}, {}))
    monkeypatch.setattr(board_module, "RING", 40_000)
    board.read(state)
    at = cuda(state).now
    assert read == [(at, 40_000), (at + 40_000, LARGE.nbytes({}) - 40_000)]


def test_runs_and_large_writes_use_their_events_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server makes a million runs; each event takes memory of the driver."""
    device = fake(monkeypatch)
    monkeypatch.setattr(board_module, "RING", 2 * LARGE.nbytes({}))
    board = Noted(device, told=True)
    state, small = board.empty(LARGE, {}), board.empty(TensorSpec("a", DType.I32, (1,)), {})
    step = call("a", {"x": state, "y": small}, {})
    board.ready(step)
    made: list[int] = []
    for _ in range(6):
        for _ in range(3):
            board.write(state, np.zeros(LARGE.at({}), np.float32))
        board.run([step])
        board.read(small)
        board.busy()
        made.append(device.calls.count("cuEventCreate"))
    assert made[1] == made[-1]


def test_a_device_is_told_with_its_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Profiles of two drivers are not compared."""
    assert Noted(fake(monkeypatch), told=True).device == "Fake H100, 132 SMs, driver 13000"
