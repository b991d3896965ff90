"""Parts of the CUDA engine that need no device: counting memory, sending host writes, splitting
partial writes of a tensor into contiguous runs, reporting errors.
"""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from thor_dflash.core.errors import EngineError, OutOfMemory
from thor_dflash.core.tensors import Array, DType, TensorSpec
from thor_dflash.plugins.cuda.driver import STICKY, Driver
from thor_dflash.runtime.engines.cuda.arena import RESERVE, Arena
from thor_dflash.runtime.engines.cuda.device_tensors import DeviceTensors
from thor_dflash.runtime.engines.cuda.host_writes import (
    RING,
    SLOT,
    SMALL,
    ControlPage,
    StagingRing,
    corners,
)
from thor_dflash.runtime.engines.protocol import TensorRows

GB = 1 << 30


def test_what_does_not_fit_is_refused_with_the_table() -> None:
    arena = Arena()
    arena.take("weights", 3 * GB)
    arena.take("cache", GB)
    arena.check(4 * GB + RESERVE)
    with pytest.raises(OutOfMemory) as e:
        arena.check(4 * GB + RESERVE - 7)
    for word in ("weights", "cache", "graphs and driver"):
        assert word in str(e.value)
    assert "together, 7 B too many)" in str(e.value)
    assert e.value.lacks == 7


class FakeDriver:
    """A driver whose device memory is an array. A copy is made as late as possible: when an event
    recorded after it, or the whole stream, is waited for.
    """

    def __init__(self) -> None:
        self.memory = np.zeros(RING * 3, np.uint8)
        self.pending: list[tuple[int, int, int]] = []
        self.made = 0
        """Number of copies made so far."""
        self.host = np.zeros(RING, np.uint8)
        self.stream = None
        self.cu = SimpleNamespace(
            CUevent_flags=SimpleNamespace(CU_EVENT_DISABLE_TIMING=SimpleNamespace(value=2))
        )

    def __call__(self, name: str, *args: Any) -> Any:
        if name == "cuMemcpyHtoDAsync":
            self.pending.append((args[0], args[1], args[2]))
        elif name == "cuEventRecord":
            args[0].after = self.made + len(self.pending)
        elif name == "cuEventSynchronize":
            self.finish(args[0].after - self.made)
        return SimpleNamespace()

    make = __call__

    def synchronize(self) -> None:
        self.finish()

    def finish(self, count: int | None = None) -> None:
        done = self.pending[:count]
        for to, start, size in done:
            self.memory[to : to + size] = self.host[start : start + size]
        self.made += len(done)
        del self.pending[: len(done)]


def ring() -> tuple[FakeDriver, StagingRing]:
    fake = FakeDriver()
    return fake, StagingRing(fake, SimpleNamespace(address=0, bytes=fake.host))  # type: ignore[arg-type]


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, RING // 2 + 99)), max_size=12))
@example([(i, RING // 8 * eighths) for i, eighths in enumerate([3, 3, 1, 3, 3, 3])])
@example([(0, SMALL), (1, RING // 2), (2, RING // 2), (3, 99), (4, RING // 2), (5, SMALL + 1)])
@pytest.mark.slow
def test_memory_of_a_copy_in_flight_is_not_overwritten(writes: list[tuple[int, int]]) -> None:
    fake, sender = ring()
    want = np.zeros_like(fake.memory)
    for i, (at, size) in enumerate(writes):
        data = np.full(size, i + 1, np.uint8)
        data[:: 1 + i] = 200 - i
        sender.send(at * 1000, data)
        want[at * 1000 : at * 1000 + size] = data
    fake.finish()
    assert np.array_equal(fake.memory, want)


@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, 9), st.integers(1, 40)), min_size=1, max_size=8),
        max_size=5,
    ),
    st.integers(0, 10),
)
def test_the_device_sees_what_the_host_wrote_and_nothing_else(
    flushes: list[list[tuple[int, int]]], own: int
) -> None:
    fake, sender = ring()
    page = ControlPage(10 * 48, own=48 * own)
    fake.memory[48 * own : 10 * 48] = 77  # what the device wrote itself
    want = fake.memory[: 10 * 48].copy()
    slots = {i: 48 * i for i in range(10)}
    for n, flush in enumerate(flushes):
        for slot, size in flush:
            data = np.full(size, n % 2 + 1, np.uint8)
            page.write(slots[slot], data.tobytes())
            want[slots[slot] : slots[slot] + size] = data
        page.flush(0, sender)
    fake.finish()
    assert np.array_equal(fake.memory[: 48 * own], want[: 48 * own])
    for start in slots.values():
        wrote = want[start : start + 48] != 77
        assert np.array_equal(
            fake.memory[start : start + 48][wrote], want[start : start + 48][wrote]
        )
    untouched = [s for i, s in slots.items() if all(i != slot for f in flushes for slot, _ in f)]
    assert all((fake.memory[s : s + 48] == 77).all() for s in untouched if s >= 48 * own)


def test_what_could_not_be_sent_is_sent_with_the_next_flush() -> None:
    fake, sender = ring()
    page = ControlPage(4 * SLOT, own=4 * SLOT)
    page.write(0, b"1234")
    with pytest.raises(EngineError):
        page.flush(0, SimpleNamespace(send=_refuse))  # type: ignore[arg-type]
    page.write(0, b"1234")
    page.flush(0, sender)
    assert [(to, count) for to, _, count in fake.pending] == [(0, 4)]


def _refuse(to: int, data: Array) -> None:
    raise EngineError("no")


@given(st.data())
def test_a_tensors_corner_is_split_into_contiguous_runs(data: st.DataObject) -> None:
    whole = tuple(data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    part = tuple(data.draw(st.integers(1, n)) for n in whole)
    memory = np.zeros(int(np.prod(whole)) * 4, np.uint8)
    values = np.arange(1, int(np.prod(part)) + 1, dtype=np.int32).reshape(part)
    pieces = list(corners(TensorSpec("x", DType.I32, whole), values))
    for at, piece in pieces:
        memory[at : at + len(piece)] = piece
    want = np.zeros(whole, np.int32)
    want[tuple(slice(n) for n in part)] = values
    assert np.array_equal(memory.view(np.int32).reshape(whole), want)
    for (at, piece), (after, _) in itertools.pairwise(pieces):
        assert at + len(piece) < after, "one run is one copy"


def failing(status: str) -> Driver:
    """A driver whose next call returns this status."""
    driver = object.__new__(Driver)
    code = type("Code", (int,), {"name": status})(700)
    driver.cu = SimpleNamespace(
        cuStreamSynchronize=lambda *_: (code,),
        cuGetErrorString=lambda _: (0, b"the driver's words"),
    )
    driver._broken = ""
    return driver


@pytest.mark.parametrize("code", sorted(STICKY)[:2])
def test_a_broken_driver_is_not_asked_again_and_says_that_the_process_must_go(code: str) -> None:
    driver = failing(code)
    with pytest.raises(EngineError, match=rf"got {code}: .*; .*in this process: start it again"):
        driver("cuStreamSynchronize", 0)
    driver.cu.cuStreamSynchronize = None
    again = (
        rf"on a usable CUDA driver \(got: cuStreamSynchronize reported {code}: .*start it again\)"
    )
    with pytest.raises(EngineError, match=again):
        driver("cuStreamSynchronize", 0)
    assert code in driver.ended


class CopyingDriver:
    """A driver whose copies within the device are made at once, and counted."""

    def __init__(self, nbytes: int) -> None:
        self.memory = np.random.default_rng(3).integers(0, 256, nbytes, np.uint8)
        self.copies = 0

    def enter(self) -> None:
        pass

    def copy_rows(
        self, source: tuple[int, int], target: tuple[int, int], nbytes: int, count: int
    ) -> None:
        self.copies += 1
        for i in range(count):
            one, other = source[0] + i * source[1], target[0] + i * target[1]
            self.memory[other : other + nbytes] = self.memory[one : one + nbytes]


SHAPES = (2, 48, 3), (3, 48, 5)


@pytest.mark.parametrize(("count", "copies"), [(1, 2), (2, 4), (9, 5)])
def test_rows_are_swapped_in_as_few_copies_as_possible(count: int, copies: int) -> None:
    """Pages in the order of their chunks; the copies do not depend on the number of chunks."""
    rows, begin, reserved, page = 4, 8, 4096, 200
    driver: Any = CopyingDriver(8192)
    tensors = DeviceTensors(driver)
    tensors.flush = lambda: None  # type: ignore[method-assign]
    tensors._reserved, tensors._reserved_at = 4096, reserved  # pyright: ignore
    at, parts, ends = 0, list[TensorRows](), list[int]()
    for shape in SHAPES:
        tensor = tensors.empty(TensorSpec("x", DType.FP8, shape), {})
        tensor.places = [at]
        at += tensor.spec.nbytes({})
        ends.append(at)
        parts.append(TensorRows(tensor, begin, begin + rows))
    live = driver.memory[:at].copy()
    tensors.swap_out(page, parts, count, page)
    assert driver.copies == copies
    for step in range(count):
        place, start = reserved + page * (step + 1), 0
        for shape, end in zip(SHAPES, ends, strict=True):
            first = begin + step * rows
            own = live[start:end].reshape(shape)[:, first : first + rows].ravel()
            assert (driver.memory[place : place + own.size] == own).all()
            place, start = place + own.size, end
    stored = driver.memory.copy()
    driver.memory[:at] = 0
    tensors.swap_in(page, parts, count, page)
    first, last, start = begin, begin + count * rows, 0
    for shape, end in zip(SHAPES, ends, strict=True):
        got, own = (m[start:end].reshape(shape) for m in (driver.memory, live))
        assert (got[:, first:last] == own[:, first:last]).all()
        assert not got[:, :first].any()
        assert not got[:, last:].any(), "nothing else is written"
        start = end
    assert (driver.memory[reserved:] == stored[reserved:]).all()
