"""tests/gpu/part.py without a device: that it runs on some multiprocessors, and what it prints."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from stand_ins.fake_driver import FACTS, MS, OK, FakeCuda, fake

from thor_dflash.core.errors import ConfigError
from thor_dflash.runtime.engines.cuda.engine import CudaEngine, Driver

SCRIPT = Path(__file__).parents[1] / "gpu" / "part.py"
KHZ = 1_980_000


@pytest.fixture(scope="module")
def part() -> ModuleType:
    spec = importlib.util.spec_from_file_location("part", SCRIPT)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def device(small_shape: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeCuda:
    """A fake device that sets multiprocessors apart in groups of eight, as an H100 does."""
    made: Any = fake(monkeypatch)

    def split(groups: int, whole: object, flags: int, count: int) -> Any:
        made.calls.append(f"split {count}")
        group = SimpleNamespace(sm=SimpleNamespace(smCount=-(-count // 8) * 8))
        return OK, [group], groups, "the others"

    made.CUdevResourceType = SimpleNamespace(CU_DEV_RESOURCE_TYPE_SM=1)
    made.CUgreenCtxCreate_flags = SimpleNamespace(CU_GREEN_CTX_DEFAULT_STREAM=1)
    made.CUdevice_attribute = SimpleNamespace(**FACTS, CU_DEVICE_ATTRIBUTE_CLOCK_RATE=KHZ)
    made.cuDeviceGetDevResource = lambda handle, kind: (OK, "all")
    made.cuDevSmResourceSplitByCount = split
    made.cuDevResourceGenerateDesc = lambda groups, count: (OK, "a group")
    made.cuGreenCtxCreate = lambda group, handle, flag: (OK, "green")
    made.cuCtxFromGreenCtx = lambda green: made.cuCtxCreate(green)
    made.cuCtxGetDevice = lambda: (OK, 0)
    monkeypatch.setenv("HOME", str(tmp_path))
    return made


def test_steps_are_measured_on_a_part_and_scaled(
    part: ModuleType, device: FakeCuda, capsys: pytest.CaptureFixture[str]
) -> None:
    assert part.main(["--shape", "small", "--multiprocessors", "16"]) == 0
    out, err = capsys.readouterr()
    head, _, *lines = out.splitlines()
    assert "16 SMs" in head
    assert "split 16" in device.calls
    assert "cuCtxDestroy" not in device.calls
    rows = {line[:24].strip(): line[24:].split() for line in lines}
    assert {"linears, 1 row", "linears, 32 rows", "cycle at 2048", "prefill of 128"} <= rows.keys()
    here, size, _, ours, memory = rows["verify at 32768"]
    assert float(here) == MS
    assert float(ours) == pytest.approx(MS * 16 / 20 * KHZ * 1e3 / 1.575e9, abs=1e-3)
    assert float(memory) == pytest.approx(int(size) * 1e9 / 259.7e9, rel=0.01)
    assert int(size) > int(rows["verify at 2048"][1]) > int(rows["linears, 16 rows"][1])
    assert "compiling kernels" in err
    assert CudaEngine.__init__.__globals__["Driver"] is Driver, "nothing is left patched"


@pytest.mark.parametrize(
    ("count", "message"),
    [("0", r">= 1 \(got 0\)"), ("20", r"can set apart \(got 20, which would be 24\)")],
)
@pytest.mark.usefixtures("device")
def test_a_part_that_cannot_be_is_refused(part: ModuleType, count: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"--multiprocessors must be .*{message}"):
        part.main(["--shape", "small", "--multiprocessors", count])
