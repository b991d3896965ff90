"""The CUDA driver: which devices are refused, what is free, what a broken one reports."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from stand_ins.fake_driver import FACTS, FakeCuda, fake

from thor_dflash.core.errors import EngineError, EngineLost
from thor_dflash.plugins.cuda.driver import Driver


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return fake(monkeypatch)


@pytest.mark.parametrize(("minor", "major"), [(9, 8), (0, 9), (0, 11)])
def test_a_device_that_is_too_old_is_refused(
    device: FakeCuda, monkeypatch: pytest.MonkeyPatch, major: int, minor: int
) -> None:
    name = "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY"
    facts = SimpleNamespace(**{**FACTS, f"{name}_MAJOR": major, f"{name}_MINOR": minor})
    monkeypatch.setattr(device, "CUdevice_attribute", facts)
    if major < 9:
        with pytest.raises(EngineError, match=r"9.0 or later \(got Fake H100, 8.9\)"):
            Driver()
        assert device.contexts == 0
    else:
        assert Driver().info.device.capability == (major, minor)


def test_what_broke_a_driver_is_reported_also_after_it_was_closed(
    device: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> Any:
        return (type("Status", (int,), {"name": "CUDA_ERROR_ILLEGAL_ADDRESS"})(700),)

    driver, closed = Driver(), Driver()
    closed.close()
    with pytest.raises(EngineError, match=r"usable CUDA driver \(got: it was closed\)") as error:
        closed.synchronize()
    assert not isinstance(error.value, EngineLost)
    monkeypatch.setattr(device, "cuStreamSynchronize", fails)
    monkeypatch.setattr(device, "cuGetErrorString", lambda _: (0, b"address"), raising=False)
    with pytest.raises(EngineLost, match="cuStreamSynchronize must succeed"):
        driver.synchronize()
    driver.close()
    with pytest.raises(EngineLost, match=r"cuCtxSetCurrent must be .* outside its memory; CUDA an"):
        driver.enter()
