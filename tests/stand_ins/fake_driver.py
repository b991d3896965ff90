"""A fake of CUDA's driver without a device: memory has no content, and kernels do nothing.

It records allocations, launches, captured graphs and copies, so that a test can check what would
have run. Everything that is read back is int32 ones, which as a record means one committed row.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from thor_dflash.plugins.cuda import driver, kernel_cache
from thor_dflash.plugins.cuda.compile import Cubin

OK = type("Status", (int,), {"name": "CUDA_SUCCESS"})(0)
MS = 2.0
"""Time between any two events, milliseconds."""
MEMORY = 80 << 30
"""Device memory, bytes."""
FACTS = {
    "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR": 9,
    "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR": 0,
    "CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT": 132,
    "CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": 232448,
    "CU_DEVICE_ATTRIBUTE_INTEGRATED": 0,
}
"""Device attributes. The fake's enumeration members are these values themselves, so that asking
for an attribute returns its argument."""


class FakeCuda:
    """The driver's functions; each returns (status, values...) as cuda-python does."""

    CUDA_VERSION = 13000
    CUstream_flags = SimpleNamespace(CU_STREAM_NON_BLOCKING=SimpleNamespace(value=1))
    CUevent_flags = SimpleNamespace(CU_EVENT_DISABLE_TIMING=SimpleNamespace(value=2))
    CUevent_record_flags = SimpleNamespace(CU_EVENT_RECORD_EXTERNAL=SimpleNamespace(value=1))
    CUstreamCaptureMode = SimpleNamespace(
        CU_STREAM_CAPTURE_MODE_THREAD_LOCAL=1, CU_STREAM_CAPTURE_MODE_RELAXED=2
    )
    CUfunction_attribute = SimpleNamespace(
        CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES=8,
        CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT=9,
    )
    CUlaunchAttributeID = SimpleNamespace(
        CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION=6,
        CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION=4,
    )
    CUdevice_attribute = SimpleNamespace(**FACTS)

    def __init__(self) -> None:
        self.taken = 0
        """Bytes of device memory in use: allocations, and 4096 for each kernel in a graph."""
        self.calls: list[str] = []
        """Names of the functions that were called, in order; not all functions are recorded."""
        self.graphs: list[int] = []
        """Number of kernels of each captured graph."""
        self.launched: list[dict[int, Any]] = []
        """Attributes of each launch: CUlaunchAttributeID -> value."""
        self.sent: list[tuple[int, bytes]] = []
        """Asynchronous copies from the host, in order: device address and bytes."""
        self._host: list[Any] = []
        self._counted = -1
        self._last = 0
        self._capturing, self._mode = 0, 0
        self._end = 1 << 40
        self._sizes: dict[int, int] = {}
        self.contexts = 0
        self.current = 0
        """The current context of the only thread. A stream's handle is that of its context."""
        for name, value in (
            ("cuInit", ()), ("cuDeviceGet", (0,)), ("cuDeviceGetName", (b"Fake H100\0",)),
            ("cuDeviceTotalMem", (MEMORY,)), ("cuDriverGetVersion", (13000,)),
            ("cuMemsetD8", ()), ("cuMemcpyHtoD", ()),
            ("cuCtxSynchronize", ()), ("cuStreamDestroy", ()), ("cuGraphUpload", ()),
            ("cuEventSynchronize", ()), ("cuEventElapsedTime", (MS,)), ("cuFuncSetAttribute", ()),
            ("cuModuleGetFunction", ("kernel",)), ("cuOccupancyMaxActiveClusters", (30,)),
        ):  # fmt: skip
            if name not in dir(type(self)):
                self.__dict__[name] = self._says(name, value)
        self.alive: dict[int, str] = {}
        """What was made and not freed: handle -> the function that frees it."""
        for make, frees in (
            ("cuEventCreate", "cuEventDestroy"), ("cuModuleLoadData", "cuModuleUnload"),
            ("cuGraphInstantiate", "cuGraphExecDestroy"),
        ):  # fmt: skip
            if make not in dir(type(self)):
                self.__dict__[make] = self._makes(make, frees)
        for frees in ("cuEventDestroy", "cuModuleUnload", "cuGraphExecDestroy", "cuGraphDestroy"):
            self.__dict__[frees] = self._frees(frees)

    def _says(self, name: str, value: tuple[Any, ...]) -> Callable[..., Any]:
        def answer(*arguments: Any) -> Any:
            self.calls.append(name)
            return OK, *value

        return answer

    def _makes(self, name: str, frees: str) -> Callable[..., Any]:
        def make(*arguments: Any) -> Any:
            self.calls.append(name)
            return OK, self._new(frees)

        return make

    def _new(self, frees: str) -> int:
        self._last += 1
        self.alive[self._last] = frees
        return self._last

    def _frees(self, name: str) -> Callable[..., Any]:
        def free(handle: int) -> Any:
            self.calls.append(name)
            assert self.current, "freed without a context"
            assert self.alive.pop(handle) == name
            return (OK,)

        return free

    def cuDeviceGetAttribute(self, value: int, handle: Any) -> Any:  # noqa: N802
        return OK, value

    def cuMemGetInfo(self) -> Any:  # noqa: N802
        return OK, MEMORY - self.taken, MEMORY

    def cuMemAlloc(self, nbytes: int) -> Any:  # noqa: N802
        self.calls.append("cuMemAlloc")
        self.taken += nbytes
        self._end += -(-nbytes // 256) * 256
        self._sizes[self._end] = nbytes
        return OK, self._end

    def cuMemFree(self, address: int) -> Any:  # noqa: N802
        self.taken -= self._sizes.pop(address)
        return (OK,)

    def cuMemAllocHost(self, nbytes: int) -> Any:  # noqa: N802
        self._host.append(np.zeros(nbytes, np.uint8))
        self.alive[self._host[-1].ctypes.data] = "cuMemFreeHost"
        return OK, self._host[-1].ctypes.data

    def cuMemFreeHost(self, address: int) -> Any:  # noqa: N802
        self.calls.append("cuMemFreeHost")
        assert self.alive.pop(address) == "cuMemFreeHost"
        return (OK,)

    def cuCtxCreate(self, *arguments: Any) -> Any:  # noqa: N802
        self.contexts += 1
        self.current = self.contexts
        return OK, self.current

    def cuDevicePrimaryCtxRetain(self, device: int) -> Any:  # noqa: N802
        return self.cuCtxCreate(device)

    def cuDevicePrimaryCtxRelease(self, device: int) -> Any:  # noqa: N802
        return (OK,)

    def CUstream(self, number: int) -> int:  # noqa: N802
        return number

    def cuStreamIsCapturing(self, stream: int) -> Any:  # noqa: N802
        return OK, int(self._counted >= 0)

    def cuMemsetD8Async(self, to: int, value: int, count: int, stream: int) -> Any:  # noqa: N802
        self.calls.append("cuMemsetD8Async")
        return self._on(stream)

    def cuMemsetD32Async(self, to: int, value: int, count: int, stream: int) -> Any:  # noqa: N802
        return self._on(stream)

    def cuCtxSetCurrent(self, context: int) -> Any:  # noqa: N802
        self.current = context
        return (OK,)

    def cuCtxGetCurrent(self) -> Any:  # noqa: N802
        return OK, self.current

    def cuStreamCreate(self, flags: int) -> Any:  # noqa: N802
        return OK, self.current

    def cuStreamSynchronize(self, stream: int) -> Any:  # noqa: N802
        free = self._counted < 0 or (self._mode == 2 and stream != self._capturing)
        assert free, "a wait during a capture"
        return self._on(stream)

    def cuThreadExchangeStreamCaptureMode(self, mode: int) -> Any:  # noqa: N802
        mode, self._mode = self._mode, mode
        return OK, mode

    def cuGraphLaunch(self, graph: Any, stream: int) -> Any:  # noqa: N802
        return self._on(stream)

    def cuEventRecord(self, event: Any, stream: int) -> Any:  # noqa: N802
        return self._on(stream)

    def cuEventRecordWithFlags(self, event: Any, stream: int, flags: int) -> Any:  # noqa: N802
        assert self._counted >= 0, "an external event outside of a capture"
        return self._on(stream)

    def cuStreamWaitEvent(self, stream: int, event: Any, flags: int) -> Any:  # noqa: N802
        return self._on(stream)

    def cuMemcpyHtoDAsync(self, to: int, at: int, nbytes: int, stream: int) -> Any:  # noqa: N802
        self.sent.append((to, ctypes.string_at(at, nbytes)))
        return self._on(stream)

    def _on(self, stream: int) -> Any:
        assert stream == self.current, "a stream of another context"
        return (OK,)

    def cuMemcpyDtoHAsync(self, to: int, at: int, nbytes: int, stream: int) -> Any:  # noqa: N802
        assert at >= 1 << 40
        self._on(stream)
        ones = np.ones(-(-nbytes // 4), np.int32)
        ctypes.memmove(to, ones.ctypes.data, nbytes)
        return (OK,)

    def cuMemcpyDtoH(self, to: int, at: int, nbytes: int) -> Any:  # noqa: N802
        return self.cuMemcpyDtoHAsync(to, at, nbytes, self.current)

    def cuStreamBeginCapture(self, stream: Any, mode: Any) -> Any:  # noqa: N802
        self._counted, self._capturing = 0, stream
        return (OK,)

    def cuStreamEndCapture(self, stream: Any) -> Any:  # noqa: N802
        self.graphs.append(self._counted)
        self.taken += 4096 * self._counted
        self._counted = -1
        return OK, self._new("cuGraphDestroy")

    def cuLaunchKernelEx(self, config: Any, kernel: Any, arguments: Any, extra: Any) -> Any:  # noqa: N802
        assert config.numAttrs == len(config.attrs)
        self.launched.append({one.id: one.value for one in config.attrs})
        self._on(config.hStream)
        self.calls.append("cuLaunchKernelEx")
        if self._counted >= 0:
            self._counted += 1
        return (OK,)

    def cuCtxDestroy(self, context: Any) -> Any:  # noqa: N802
        self.taken -= sum(self._sizes.values()) + 4096 * sum(self.graphs)
        self._sizes.clear()
        return (OK,)

    def CUlaunchConfig(self) -> Any:  # noqa: N802
        return SimpleNamespace()

    def CUlaunchAttribute(self) -> Any:  # noqa: N802
        return SimpleNamespace(value=SimpleNamespace(clusterDim=SimpleNamespace()))


def fake(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """Replace the driver by a fake, and compiling by a function that returns empty cubins."""
    made = FakeCuda()
    monkeypatch.setattr(driver, "_bindings", lambda: made)
    monkeypatch.setattr(kernel_cache, "load", lambda *_, **__: Cubin(b"", ""))
    return made
