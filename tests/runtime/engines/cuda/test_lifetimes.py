"""What CUDA made is freed when a capture fails and at the end; and a finaliser, which may run at
any moment, does not disturb the step in whose middle it runs.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from stand_ins.fake_driver import MS, OK, FakeCuda, fake
from support.planner_nano import package, request

from thor_dflash.config.engine import EngineConfig
from thor_dflash.core.errors import EngineError
from thor_dflash.core.progress import Silent
from thor_dflash.runtime.decoding.proposers import DflashDrafter
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


@pytest.mark.parametrize(
    ("name", "good"),
    [("cuGraphInstantiate", 0), ("cuGraphUpload", 0), ("cuGraphDestroy", 0), ("cuEventCreate", 0),
     ("cuEventCreate", 2), ("cuMemcpyDtoHAsync", 0), ("cuLaunchKernelEx", 3),
     ("cuStreamBeginCapture", 0)],
)  # fmt: skip
def test_a_capture_that_fails_leaves_nothing_behind(
    made: Path, device: FakeCuda, monkeypatch: pytest.MonkeyPatch, name: str, good: int
) -> None:
    no_space = type("Status", (int,), {"name": "CUDA_ERROR_OUT_OF_MEMORY"})(2)
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
            return (no_space, None)

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
