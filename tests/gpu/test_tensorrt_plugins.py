"""Every operator's TensorRT plugin on the GPU, with a stand-in of TensorRT: `enqueue`, run
directly and from a captured graph, gives the same bits as the operator's launches.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from stand_ins import tensorrt_module as trt
from support.gpu_backend import Gpu
from support.kernel_cases import cases_of
from support.kernel_runner import Refused, call_of, launch
from support.plugin_enqueue import Ready

from thor_dflash.core.tensors import Array
from thor_dflash.plugins import OPS
from thor_dflash.plugins.contract import Op
from thor_dflash.plugins.cuda.driver import Driver
from thor_dflash.plugins.cuda.kernel_cache import Kernels
from thor_dflash.runtime.engines.cuda.graph_capture import capture

pytestmark = pytest.mark.gpu


class Device:
    """The memory, kernels and stream that a plugin under test uses (see enqueued.Ready)."""

    def __init__(self, driver: Driver, kernels: Kernels) -> None:
        self.driver, self.kernels = driver, kernels
        self.stream = int(driver.stream)
        self._held: list[int] = []

    def allocate(self, nbytes: int) -> int:
        self._held.append(self.driver.allocate(nbytes))
        return self._held[-1]

    def put(self, address: int, content: Array) -> None:
        data = np.ascontiguousarray(content)
        if data.nbytes:
            self.driver("cuMemcpyHtoD", address, data.ctypes.data, data.nbytes)
        self.driver("cuCtxSynchronize")

    def get(self, address: int, nbytes: int) -> Array:
        out = np.empty(nbytes, np.uint8)
        self.driver("cuMemcpyDtoH", out.ctypes.data, address, nbytes)
        return out

    def free(self) -> None:
        for address in self._held:
            self.driver.free(address)


@pytest.fixture(scope="module")
def gpu(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gpu]:
    made = Gpu(tmp_path_factory.mktemp("cubins"))
    yield made
    made.close()


@pytest.fixture(autouse=True)
def tensorrt(monkeypatch: pytest.MonkeyPatch) -> None:
    trt.stand_in(monkeypatch)


@pytest.mark.parametrize(
    ("op", "name"),
    [pytest.param(op, name, id=f"{op.name}-{name}") for op in OPS for name in cases_of(op)],
)
def test_enqueue_leaves_the_bits_that_the_launches_leave(gpu: Gpu, op: Op, name: str) -> None:
    try:
        call = call_of(op, cases_of(op)[name])
    except Refused:
        return  # the message is tested on the CPU
    driver = gpu.driver
    want = launch(call, gpu, driver.info.device)
    for apart in (False, True):
        device = Device(driver, gpu.kernels)
        ready = Ready(device, call, apart=apart)
        ready.fill()
        ready.enqueue()
        driver.synchronize()
        equal(ready.outputs(), want)
        captured = capture("plugin", driver, [ready.enqueue], graph=True)
        for _ in range(2):
            ready.fill()
            captured.run()
            driver.synchronize()
            equal(ready.outputs(), want)
        captured.ended(2)
        captured.collect()
        ready.plugin.destroy()
        device.free()


def equal(got: dict[str, Array], want: dict[str, Array]) -> None:
    for port, value in want.items():
        np.testing.assert_array_equal(got[port].view(np.uint8), value.view(np.uint8), port)
