"""What CUDA made is freed when a capture fails and at the end; and a finaliser, which may run at
any moment, does not disturb the step in whose middle it runs.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from stand_ins.fake_driver import MS, OK, FakeCuda, fake
from support.planner_nano import package, request

from thor_dflash.config.engine import EngineConfig
from thor_dflash.core.errors import EngineError
from thor_dflash.core.progress import Silent
from thor_dflash.plugins.cuda.driver import FREES, Driver
from thor_dflash.runtime.decoding.proposers import DflashDrafter
from thor_dflash.runtime.engines.cuda.host_writes import SMALL, StagingRing
from thor_dflash.runtime.session import Session, open_session

CYCLE = ("propose", "verify", "accept", "observe")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return package(tmp_path_factory.mktemp("lifetimes") / "nano", engine="cuda")


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return fake(monkeypatch)


def during(
    monkeypatch: pytest.MonkeyPatch, device: FakeCuda, name: str, do: Callable[[], object]
) -> Callable[[], bool]:
    """Do something once, before the next call of a driver function; returns whether it was done."""
    original, done = getattr(device, name), list[bool]()

    def call(*arguments: Any) -> Any:
        if not done:
            done.append(True)
            do()
        return original(*arguments)

    monkeypatch.setattr(device, name, call)
    return lambda: bool(done)


def abandoned(s: Session) -> Any:
    """A request that was left after its first cycle, whose step may still be going on."""
    chunks = s.run(request(s, 0, 9), DflashDrafter())
    next(chunk for chunk in chunks if chunk.tokens)
    return chunks


@pytest.mark.parametrize("name", ["cuGraphLaunch", "cuEventRecord", "cuMemcpyHtoDAsync"])
def test_a_finaliser_leaves_the_context_of_another_engines_step(
    made: Path, device: FakeCuda, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    with (
        closing(open_session(made, EngineConfig(), Silent())) as one,
        closing(open_session(made, EngineConfig(), Silent())) as two,
    ):
        left = abandoned(one)
        # The fake refuses work on a stream of a context that is not current.
        done = during(monkeypatch, device, name, left.close)
        assert (
            sum(bool(chunk.tokens) for chunk in two.run(request(two, 0, 9), DflashDrafter())) == 9
        )
        assert done()
        report = one.report()
        assert report.finish == "cancelled"
        assert report.phases_ms["+".join(CYCLE)] == pytest.approx(MS)


def test_a_finaliser_does_not_wait_during_a_capture(
    made: Path, device: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(open_session(made, EngineConfig(), Silent())) as s:
        left, engine = abandoned(s), s.model.engine
        captured = len(device.graphs)
        done = during(monkeypatch, device, "cuLaunchKernelEx", left.close)
        # Any calls that have not been run together yet.
        engine.run([s.model.call("verify")])
        assert done()
        assert len(device.graphs) == captured + 1
        assert "+".join(CYCLE) not in s.report().phases_ms
        assert engine.busy()["+".join(CYCLE)] == pytest.approx(MS * 1e-3)


def test_a_finaliser_may_wait_during_the_capture_of_another_engine(
    made: Path, device: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        closing(open_session(made, EngineConfig(), Silent())) as one,
        closing(open_session(made, EngineConfig(), Silent())) as two,
    ):
        left = abandoned(one)
        done = during(monkeypatch, device, "cuLaunchKernelEx", left.close)
        assert (
            sum(bool(chunk.tokens) for chunk in two.run(request(two, 0, 9), DflashDrafter())) == 9
        )
        assert done()
        assert one.report().phases_ms["+".join(CYCLE)] == pytest.approx(MS)
        assert device.cuThreadExchangeStreamCaptureMode(0)[1] == 0


@pytest.mark.parametrize(
    ("name", "good"),
    [("cuGraphInstantiate", 0), ("cuGraphUpload", 0), ("cuGraphDestroy", 0), ("cuEventCreate", 0),
     ("cuEventCreate", 2), ("cuMemcpyDtoHAsync", 0), ("cuLaunchKernelEx", 3),
     ("cuStreamBeginCapture", 0)],
)  # fmt: skip
def test_a_capture_that_fails_leaves_nothing_behind(
    made: Path, device: FakeCuda, monkeypatch: pytest.MonkeyPatch, name: str, good: int
) -> None:
    no_room = type("Status", (int,), {"name": "CUDA_ERROR_OUT_OF_MEMORY"})(2)
    monkeypatch.setattr(device, "cuGetErrorString", lambda _: (OK, b"memory"), raising=False)
    with closing(open_session(made, EngineConfig(), Silent())) as s:
        calls = [s.model.call(step) for step in CYCLE]
        original, left = getattr(device, name), [good]

        def refuse(*arguments: Any) -> Any:
            left[0] -= 1
            if left[0] != -1:
                return original(*arguments)
            if name == "cuGraphDestroy":
                original(*arguments)
            return (no_room, None)

        before = dict(device.alive)
        monkeypatch.setattr(device, name, refuse)
        with pytest.raises(EngineError, match=f"{name} must succeed"):
            s.model.engine.run(calls)
        assert device.alive == before
        s.model.engine.run(calls)
        assert s.model.read("record").tolist() == [1] * 37
        assert sorted(set(device.alive.values())) == sorted(
            {"cuMemFreeHost", "cuModuleUnload", "cuEventDestroy", "cuGraphExecDestroy"}
        )


@pytest.mark.parametrize("broken", [False, True])
def test_a_shared_context_keeps_nothing_of_a_driver_that_was_closed(
    device: FakeCuda, monkeypatch: pytest.MonkeyPatch, broken: bool
) -> None:
    """Other libraries keep the primary context, so releasing it frees nothing."""
    driver = Driver(shared=True)
    memory = driver.allocate(1000)
    ring = StagingRing(driver, driver.pinned(8 * SMALL))
    ring.send(memory, np.zeros(2 * SMALL, np.uint8))
    kept = [driver.make("cuModuleLoadData", b""), driver.make("cuEventCreate", 0)]
    driver.free(driver.make("cuEventCreate", 0))
    released: list[int] = []
    monkeypatch.setattr(
        device, "cuDevicePrimaryCtxRelease", lambda _: released.append(len(device.alive)) or (OK,)
    )
    assert set(kept) < set(device.alive)
    assert device.taken == 1000
    if broken:
        driver._broken = "something ended it"
    device.current = 0
    driver.close()
    driver.close()
    assert (device.alive, device.taken, released) == ({}, 0, [0])
    assert device.calls.count("cuStreamDestroy") == 2


def test_what_is_freed_after_the_end_of_a_driver_is_left_to_it(device: FakeCuda) -> None:
    driver = Driver()
    memory = driver.allocate(1000)
    driver.close()
    driver.free(memory)
    assert driver.ended == "it was closed"


def test_everything_that_is_made_can_be_freed() -> None:
    """The names are those of the driver's functions."""
    driver = pytest.importorskip("cuda.bindings.driver")
    assert {*FREES, *FREES.values()} <= {*dir(driver)}
