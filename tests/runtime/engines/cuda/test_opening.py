"""An engine that cannot be opened reports why, and releases its context."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from stand_ins.fake_driver import OK, FakeCuda, fake
from support.planner_nano import package

from thor_dflash.config.engine import EngineConfig
from thor_dflash.core.errors import EngineError, EngineLost
from thor_dflash.core.progress import Silent
from thor_dflash.plugins.cuda.driver import Driver
from thor_dflash.runtime.session import open_session

CODES = {"CUDA_ERROR_OUT_OF_MEMORY": EngineError, "CUDA_ERROR_ILLEGAL_ADDRESS": EngineLost}


def code(name: str) -> Any:
    return type("Status", (int,), {"name": name})(2)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    made = fake(monkeypatch)
    made.cuGetErrorString = lambda _: (OK, b"the driver's words")  # type: ignore[attr-defined]
    return made


def counted(patch: pytest.MonkeyPatch, device: FakeCuda, name: str) -> list[str]:
    """A list that grows with each call of a driver function from now on."""
    calls: list[str] = []
    inner: Callable[..., Any] = getattr(device, name)

    def call(*arguments: Any) -> Any:
        calls.append(name)
        return inner(*arguments)

    patch.setattr(device, name, call)
    return calls


@pytest.mark.parametrize(
    ("name", "good", "status", "shared"),
    [
        ("cuCtxSetCurrent", 0, "CUDA_ERROR_OUT_OF_MEMORY", True),
        ("cuStreamCreate", 0, "CUDA_ERROR_ILLEGAL_ADDRESS", False),
        ("cuStreamCreate", 1, "CUDA_ERROR_OUT_OF_MEMORY", False),
        ("cuStreamCreate", 1, "CUDA_ERROR_ILLEGAL_ADDRESS", True),
    ],
)
def test_a_driver_that_cannot_start_releases_its_context(
    device: FakeCuda,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    good: int,
    status: str,
    shared: bool,
) -> None:
    given = counted(monkeypatch, device, "cuDevicePrimaryCtxRelease" if shared else "cuCtxDestroy")
    answers = itertools.chain([(OK, 1)] * good, itertools.repeat((code(status),)))

    def answer(*_: object) -> Any:
        return next(answers)

    monkeypatch.setattr(device, name, answer)
    device.cuStreamDestroy = lambda _: (OK,)  # type: ignore[attr-defined]
    streams = counted(monkeypatch, device, "cuStreamDestroy")
    with pytest.raises(CODES[status], match=f"{name} must succeed"):
        Driver(shared=shared)
    assert len(given) == 1
    assert len(streams) == (good if shared else 0)


@pytest.mark.parametrize("status", CODES)
@pytest.mark.slow
def test_an_error_in_a_thread_that_reads_weights_is_reported(
    device: FakeCuda, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, status: str
) -> None:
    built = package(tmp_path / "nano", engine="cuda")
    enter = device.cuCtxSetCurrent
    destroyed = counted(monkeypatch, device, "cuCtxDestroy")
    main = threading.current_thread()

    def refuse(context: int) -> Any:
        return enter(context) if threading.current_thread() is main else (code(status),)

    device.cuCtxSetCurrent = refuse  # type: ignore[method-assign]
    with pytest.raises(CODES[status]):
        open_session(built, EngineConfig(), Silent())
    assert len(destroyed) == device.contexts
