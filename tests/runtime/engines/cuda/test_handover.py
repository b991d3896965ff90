"""Outputs that only the host reads are copied to it while the rest of a step still runs."""

from __future__ import annotations

import ctypes
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from stand_ins.fake_driver import MS, FakeCuda, fake
from support.planner_nano import package, request

from thor_dflash.config.engine import EngineConfig
from thor_dflash.core.progress import Silent
from thor_dflash.core.tensors import DType, TensorSpec
from thor_dflash.plugins.cuda.driver import Driver
from thor_dflash.runtime.decoding.proposers import DflashDrafter
from thor_dflash.runtime.engines.cuda import graph_replay
from thor_dflash.runtime.engines.cuda.binding import BoundCall, CudaTensor
from thor_dflash.runtime.engines.cuda.device_tensors import DeviceTensors
from thor_dflash.runtime.engines.cuda.graph_capture import (
    CapturedGraph,
    CapturedReadback,
    Readback,
)
from thor_dflash.runtime.engines.cuda.graph_replay import GraphReplay
from thor_dflash.runtime.engines.protocol import Call
from thor_dflash.runtime.session import open_session

READ = [1, 1]
"""What a read after waiting for the whole step finds: the fake's memory holds ones."""


class EarlyReads:
    """Runs that copy 100 + their number to the host, while the fake device holds ones."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        driver = Driver()
        self.tensors = DeviceTensors(driver, indirect=True)
        self.replay = GraphReplay(self.tensors, lambda bound, first: lambda: None, graphs=True)
        self.runs = 0
        self.waits = 0
        """How often all work was waited for."""
        synchronize = driver.synchronize

        def counted() -> None:
            self.waits += 1
            synchronize()

        monkeypatch.setattr(driver, "synchronize", counted)
        monkeypatch.setattr(graph_replay, "capture", self._capture)

    def _capture(
        self, name: str, driver: Driver, calls: object, readback: Readback | None, *, graph: bool
    ) -> CapturedGraph:
        copies = {copy.device: copy for copy in readback.copies} if readback else {}

        def start() -> None:
            self.runs += 1
            for copy in copies.values():
                numbers = np.full(copy.nbytes // 4, 100 + self.runs, np.int32)
                ctypes.memmove(copy.host, numbers.ctypes.data, copy.nbytes)

        return CapturedGraph(
            "it", driver, start, CapturedReadback("event", copies) if copies else None
        )

    def ready(self, *calls: Call) -> None:
        bound = {call: BoundCall(call=call) for call in calls}
        self.replay.bound |= bound
        self.tensors.assign_buffers([(one, ()) for one in bound.values()])
        self.tensors.allocate(self.tensors.count())


def call(name: str, reads: dict[str, Any], writes: dict[str, Any]) -> Call:
    return Call(SimpleNamespace(name=name), reads, writes)  # type: ignore[arg-type]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return fake(monkeypatch)


class Cycle:
    """Two calls: accept makes a record and rows from a number that the host writes, observe reads
    the rows. `by`: observe also reads the record ("read") or makes it ("made").
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, by: str = "") -> None:
        fake(monkeypatch)
        self.engine = engine = EarlyReads(monkeypatch)
        self.length, self.record, self.rows = (
            engine.tensors.empty(TensorSpec(name, DType.I32, (2,)), {})
            for name in ("n", "record", "rows")
        )
        reads = {"rows": self.rows} | ({"record": self.record} if by == "read" else {})
        writes = {"record": self.record} if by == "made" else {}
        self.accept = call("accept", {"n": self.length}, {"record": self.record, "r": self.rows})
        self.observe = call("observe", reads, writes)
        engine.ready(self.accept, self.observe)

    def run(self) -> None:
        self.engine.replay.run([self.accept, self.observe])

    def read(self, tensor: CudaTensor | None = None) -> list[int]:
        return self.engine.replay.read(tensor or self.record).tolist()


def test_a_record_is_there_before_the_step_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    it = Cycle(monkeypatch)
    for run in range(1, 4):
        it.run()
        assert it.read() == it.read() == [100 + run] * 2
    assert it.engine.waits == 0


def test_what_was_read_stays_while_the_next_step_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    it = Cycle(monkeypatch)
    it.run()
    first = it.engine.replay.read(it.record)
    it.run()
    assert (first.tolist(), it.read()) == ([101] * 2, [102] * 2)


def test_reading_anything_else_waits_for_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    it = Cycle(monkeypatch)
    it.run()
    assert it.read(it.rows) == READ
    assert it.engine.waits == 1
    assert it.engine.replay.read(it.record, (1,)).tolist() == [1]
    assert it.engine.waits == 2


def test_what_was_read_back_early_does_not_outlive_its_run(monkeypatch: pytest.MonkeyPatch) -> None:
    it = Cycle(monkeypatch)
    for change in (
        lambda: it.engine.replay.run([it.accept]),
        lambda: it.engine.replay.write(it.record, np.array([5, 6])),
        lambda: it.engine.replay.write(it.record, np.array([5])),
        lambda: it.engine.replay.clear(it.record),
    ):
        it.run()
        change()
        waits = it.engine.waits
        assert it.read() == READ
        assert it.engine.waits == waits + 1
    it.run()
    it.engine.replay.write(it.length, np.array([5, 6]))
    assert it.read() == [100 + it.engine.runs] * 2


# ---- the engine ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return package(tmp_path_factory.mktemp("handover") / "nano", engine="cuda")


def noted(device: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A list of the driver calls below that are made from now on, in order."""
    seen: list[str] = []

    def note(name: str) -> None:
        original = getattr(device, name)

        def noting(*arguments: Any) -> Any:
            seen.append(name)
            return original(*arguments)

        monkeypatch.setattr(device, name, noting)

    for name in ("cuLaunchKernelEx", "cuMemcpyDtoHAsync", "cuStreamWaitEvent", "cuGraphLaunch",
                 "cuEventRecordWithFlags", "cuEventSynchronize", "cuStreamSynchronize",
                 "cuStreamEndCapture"):  # fmt: skip
        note(name)
    return seen


def test_a_record_is_copied_while_the_rows_are_observed(
    made: Path, device: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(open_session(made, EngineConfig(), Silent())) as s:
        engine, steps = s.model.engine, ("propose", "verify", "accept", "observe")
        calls = [s.model.call(name) for name in steps]
        seen = noted(device, monkeypatch)
        engine.run(calls)
        launch = "cuLaunchKernelEx"
        until = sum(engine.launches([one]) for one in calls[:3])  # type: ignore[attr-defined]
        after = engine.launches(calls[3:])  # type: ignore[attr-defined]
        assert seen == [
            *[launch] * until,
            "cuStreamWaitEvent", "cuMemcpyDtoHAsync", "cuEventRecordWithFlags",
            *[launch] * after,
            "cuStreamWaitEvent", "cuStreamEndCapture", "cuGraphLaunch",
        ]  # fmt: skip
        seen.clear()
        for _ in range(3):
            engine.run(calls)
            assert s.model.read("record").tolist() == [1] * 37
        assert seen == ["cuGraphLaunch", "cuEventSynchronize"] * 3


def test_no_cycle_is_waited_for_to_its_end(
    made: Path, device: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(open_session(made, EngineConfig(), Silent())) as s:
        chunks = (chunk for chunk in s.run(request(s, 0, 9), DflashDrafter()) if chunk.tokens)
        next(chunks)
        seen = noted(device, monkeypatch)
        for _ in range(8):
            next(chunks)
        assert seen == ["cuGraphLaunch", "cuEventSynchronize"] * 8
        assert next(chunks, None) is None
        assert seen[16:] == ["cuStreamSynchronize"]
        assert s.report().phases_ms["propose+verify+accept+observe"] == pytest.approx(9 * MS)
