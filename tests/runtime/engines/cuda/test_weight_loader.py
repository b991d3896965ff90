"""Weights on their way from files to a device, which here is a dictionary."""

from __future__ import annotations

import ctypes
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from thor_dflash.core.errors import PackageError
from thor_dflash.core.progress import Silent
from thor_dflash.core.tensors import DType
from thor_dflash.package.launch_program import Weight
from thor_dflash.plugins.cuda.driver import PinnedMemory
from thor_dflash.runtime.engines.cuda import weight_loader
from thor_dflash.runtime.engines.cuda.weight_loader import READERS, FileWeights

PIECE = 16


class DeviceMemory:
    """Keeps what is copied to it: address -> bytes."""

    def __init__(self) -> None:
        self.memory: dict[int, bytes] = {}
        self.held: dict[int, Any] = {}

    def enter(self) -> None:
        pass

    def pinned(self, nbytes: int) -> PinnedMemory:
        view = np.zeros(nbytes, np.uint8)
        self.held[view.ctypes.data] = view
        return PinnedMemory(view.ctypes.data, view)

    def free(self, address: int) -> None:
        self.held.pop(address)

    def __call__(self, name: str, *arguments: int) -> None:
        assert name == "cuMemcpyHtoD"
        to, at, nbytes = arguments
        self.memory[to] = ctypes.string_at(at, nbytes)


class Counted(Silent):
    """Adds up what is reported."""

    def __init__(self) -> None:
        self.total, self.done = 0, 0

    def task(self, label: str, total: int | None = None, unit: str = "") -> Any:
        self.total += total or 0
        task = super().task(label, total, unit)
        task.advance = self._advance  # type: ignore[method-assign]
        return task

    def _advance(self, n: int) -> None:
        self.done += n


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_loader, "PIECE", PIECE)


def weight(file: str, offset: int, nbytes: int) -> Weight:
    return Weight(dtype=DType.U8.value, shape=(nbytes,), file=file, offset=offset)


def test_every_byte_goes_to_its_address_and_is_reported(tmp_path: Path) -> None:
    data = np.random.default_rng(1).bytes(1000)
    (tmp_path / "a").write_bytes(data)
    (tmp_path / "b").write_bytes(data[::-1])
    weights = {
        "x": weight("b", 3, 7 * PIECE + 5),
        "y": weight("a", 500, PIECE),
        "z": weight("a", 0, 1),
    }
    at = {"x": 1 << 20, "y": 2 << 20, "z": 3 << 20}
    device, progress = DeviceMemory(), Counted()
    FileWeights(tmp_path, progress)(device, weights, at, {})  # type: ignore[arg-type]
    for name, want in (("x", data[::-1][3:][: 7 * PIECE + 5]), ("y", data[500:][:PIECE]),
                       ("z", data[:1])):  # fmt: skip
        there = sorted(a for a in device.memory if a >> 20 == at[name] >> 20)
        assert there[0] == at[name]
        assert b"".join(device.memory[a] for a in there) == want
    assert progress.done == progress.total == 8 * PIECE + 6
    assert device.held == {}, "page-locked memory is scarce"


@pytest.mark.parametrize(
    ("size", "message"), [(None, "a must be readable"), (50, r"a must hold \d+ bytes \(got \d+\)")]
)
def test_a_file_that_is_gone_or_short_is_reported_and_no_reader_waits_for_another(
    tmp_path: Path, size: int | None, message: str
) -> None:
    if size is not None:
        (tmp_path / "a").write_bytes(bytes(size))
    failed: list[str] = []

    def load() -> None:
        with pytest.raises(PackageError, match=message) as error:
            weights = {"x": weight("a", 0, 20 * READERS * PIECE)}
            FileWeights(tmp_path, Silent())(DeviceMemory(), weights, {"x": 0}, {})  # type: ignore[arg-type]
        failed.append(str(error.value))

    thread = threading.Thread(target=load, daemon=True)
    thread.start()
    thread.join(20)
    assert len(failed) == 1
