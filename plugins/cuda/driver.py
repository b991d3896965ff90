"""The CUDA driver: all calls go through one gate that checks them and explains errors.

A kernel that reads or writes outside its memory, hangs or hits a hardware fault breaks CUDA for
the whole process: every later call, even in a new context, would report the same error. So the gate
makes no more calls to a broken driver; it reports what broke it and that the process must be
restarted. Source: CUDA driver API, CUDA_ERROR_ILLEGAL_ADDRESS ("the process must be terminated and
relaunched"); confirmed on an H100 with a driver for CUDA 13.0.
"""

# cuda-python publishes no types.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportAttributeAccessIssue=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import ctypes
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from thor_dflash.core.errors import EngineError, EngineLost
from thor_dflash.core.tensors import Array
from thor_dflash.plugins.launch import Device

STICKY = {
    "CUDA_ERROR_ILLEGAL_ADDRESS": "a kernel read or wrote outside its memory",
    "CUDA_ERROR_LAUNCH_TIMEOUT": "a kernel ran longer than the display's watchdog allows",
    "CUDA_ERROR_HARDWARE_STACK_ERROR": "the device reported a stack error",
    "CUDA_ERROR_ILLEGAL_INSTRUCTION": "a kernel ran into an instruction the device does not have",
    "CUDA_ERROR_MISALIGNED_ADDRESS": "a kernel used an address that is not aligned",
    "CUDA_ERROR_INVALID_ADDRESS_SPACE": "a kernel used an address of another memory space",
    "CUDA_ERROR_INVALID_PC": "a kernel jumped outside its code",
    "CUDA_ERROR_LAUNCH_FAILED": "a kernel failed",
    "CUDA_ERROR_ECC_UNCORRECTABLE": "the device's memory reported an error it cannot correct",
    "CUDA_ERROR_TENSOR_MEMORY_LEAK": "a kernel kept tensor memory",
    "CUDA_ERROR_CONTAINED": "a kernel accessed memory in a way that the device had to contain",
    "CUDA_ERROR_EXTERNAL_DEVICE": "a device outside CUDA took part in a synchronisation and failed",
    "CUDA_ERROR_MPS_CLIENT_TERMINATED": "the MPS server ended this process's work",
}
"""Errors after which every CUDA call of the process fails, and what each means."""

AGAIN = "CUDA answers nothing else in this process: start it again"

HINTS = {
    "CUDA_ERROR_OUT_OF_MEMORY": "lower engine.capacity, or free memory on the device (on a Jetson, "
    "the page cache too: sync && echo 3 | sudo tee /proc/sys/vm/drop_caches)",
    "CUDA_ERROR_NO_BINARY_FOR_GPU": "the kernels were compiled for another device",
    "CUDA_ERROR_NO_DEVICE": "this machine has no CUDA device that the driver can use",
    "CUDA_ERROR_INVALID_DEVICE": "engine.device is not one of this machine's",
    "CUDA_ERROR_INSUFFICIENT_DRIVER": "install a driver for CUDA 13",
}

FREES = {
    "cuMemAlloc": "cuMemFree",
    "cuMemAllocHost": "cuMemFreeHost",
    "cuStreamCreate": "cuStreamDestroy",
    "cuEventCreate": "cuEventDestroy",
    "cuModuleLoadData": "cuModuleUnload",
    "cuStreamEndCapture": "cuGraphDestroy",
    "cuGraphInstantiate": "cuGraphExecDestroy",
}
"""Functions that make something -> the function that frees it."""


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """Properties of a device, as the driver reports them."""

    name: str
    device: Device
    memory: int
    """Total memory, bytes."""
    integrated: bool
    """Whether it shares its memory with the CPU, as a Jetson does."""
    driver: int
    """CUDA version of the driver: 13000 is 13.0."""

    def __str__(self) -> str:
        return f"{self.name}, {self.device.multiprocessors} SMs, driver {self.driver}"


class DriverCalls:
    """Calls the driver's functions in the current context, and checks and explains their errors."""

    def __init__(self) -> None:
        self.cu = _bindings()
        self._broken = ""
        self._made: list[tuple[str, Any]] = []
        """What `make` made and `free` did not free, oldest first: the function that frees it, and
        its handle or address.
        """

    def __call__(self, name: str, *arguments: Any) -> Any:
        """Call a driver function by name. Returns its value, a tuple of several values, or None.

        Raises:
            EngineError: the call failed; names the call and what its error means.
            EngineLost: an error after which every CUDA call of this process fails.
        """
        if self._broken:
            kind = EngineLost if AGAIN in self._broken else EngineError
            raise kind(f"{name} must be called on a usable CUDA driver (got: {self._broken})")
        status, *values = getattr(self.cu, name)(*arguments)
        if int(status) != 0:
            self._fail(name, status)
        return values[0] if len(values) == 1 else tuple(values) or None

    def make(self, name: str, *arguments: Any) -> Any:
        """Call one of the functions of FREES and note what it made, for `free`. Returns a handle,
        or the address if it is memory.

        Raises:
            EngineError: as a call of the gate.
        """
        made = self(name, *arguments)
        if name.startswith("cuMem"):
            made = int(made)
        self._made.append((FREES[name], made))
        return made

    def free(self, made: Any) -> None:
        """Free what `make` returned. Does nothing if the driver can no longer be used: then the
        process or the context frees it.
        """
        [at] = [i for i, (_, one) in enumerate(self._made) if one == made]
        name, _ = self._made.pop(at)
        if not self._broken:
            self(name, made)

    @contextmanager
    def all_or_nothing(self) -> Generator[None]:
        """On an error in its body, free what was made there."""
        before = len(self._made)
        try:
            yield
        except BaseException:
            self._free_unchecked(before)
            raise

    def _free_unchecked(self, first: int) -> None:
        """Free what was made, from number `first` on, the latest first. Status codes are ignored:
        another error is being reported, or a broken context is being closed.
        """
        while len(self._made) > first:
            name, made = self._made.pop()
            getattr(self.cu, name)(made)

    def _fail(self, name: str, status: Any) -> None:
        code = status.name
        _, text = self.cu.cuGetErrorString(status)
        meaning = STICKY.get(code) or (text.decode() if text else "unknown")
        report = f"{code}: {meaning}"
        if code in STICKY:
            self._broken = f"{name} reported {report}; {AGAIN}"
            raise EngineLost(f"{name} must succeed (got {report}); {AGAIN}")
        hint = f"; {HINTS[code]}" if code in HINTS else ""
        raise EngineError(f"{name} must succeed (got {report}){hint}")

    def _attribute(self, handle: Any, name: str) -> int:
        kind = getattr(self.cu.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(self("cuDeviceGetAttribute", kind, handle))

    def describe(self, handle: Any) -> DeviceInfo:
        """Returns the properties of a device.

        Raises:
            EngineError: the kernels cannot run on it.
        """
        capability = (
            self._attribute(handle, "COMPUTE_CAPABILITY_MAJOR"),
            self._attribute(handle, "COMPUTE_CAPABILITY_MINOR"),
        )
        name = self("cuDeviceGetName", 256, handle).split(b"\0")[0].decode()
        if capability < (9, 0):
            raise EngineError(
                f"engine cuda must run on compute capability 9.0 or later (got {name}, "
                f"{capability[0]}.{capability[1]})"
            )
        device = Device(
            capability,
            self._attribute(handle, "MULTIPROCESSOR_COUNT"),
            self._attribute(handle, "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
        )
        return DeviceInfo(
            name,
            device,
            int(self("cuDeviceTotalMem", handle)),
            bool(self._attribute(handle, "INTEGRATED")),
            int(self("cuDriverGetVersion")),
        )

    @property
    def ended(self) -> str:
        """Why the driver can no longer be used: what broke it, or that it was closed; or empty."""
        return self._broken

    def allocate(self, nbytes: int) -> int:
        """Allocates device memory and returns its address, which `free` takes."""
        return int(self.make("cuMemAlloc", nbytes))


class Driver(DriverCalls):
    """A context on one device and its streams. Must be used from one thread.

    `beside` is a second stream, for work that a captured graph runs in parallel to `stream`. With
    `shared`, uses the device's primary context, which other libraries of the process use too; for a
    library that launches work of its own.
    """

    def __init__(self, index: int = 0, *, shared: bool = False) -> None:
        super().__init__()
        self._context: Any = None
        self._copy: Any = None
        self._shared = shared
        self("cuInit", 0)
        self._handle = self("cuDeviceGet", index)
        self.info = self.describe(self._handle)
        self.stream: Any = None
        self.beside: Any = None
        self.capturing = False
        """Whether a capture is going on, during which nothing may wait for the stream."""
        self._context = self._create_context(self._handle)
        apart = self.cu.CUstream_flags.CU_STREAM_NON_BLOCKING.value
        try:
            self.enter()
            self.stream = self.make("cuStreamCreate", apart)
            self.beside = self.make("cuStreamCreate", apart)
        except BaseException:
            self.close()  # the caller gets no object that it could close
            raise

    def _create_context(self, handle: Any) -> Any:
        if self._shared:
            return self("cuDevicePrimaryCtxRetain", handle)
        # A context of its own: destroying it frees all its memory, modules and graphs. In CUDA 13
        # the function has one more parameter, the first.
        if self.cu.CUDA_VERSION >= 13000:
            return self("cuCtxCreate", None, 0, handle)
        return self("cuCtxCreate", 0, handle)

    def free_memory(self) -> int:
        """Returns the bytes that can be allocated now. A device that shares the CPU's memory counts
        the page cache as used, although the system releases it on demand.
        """
        free = int(self("cuMemGetInfo")[0])
        return max(free, _available()) if self.info.integrated else free

    def pinned(self, nbytes: int) -> PinnedMemory:
        """Allocates page-locked host memory, which the device can copy from and to directly."""
        address = self.make("cuMemAllocHost", nbytes)
        view = (ctypes.c_uint8 * nbytes).from_address(address)
        return PinnedMemory(address, np.ctypeslib.as_array(view))

    def enter(self) -> None:
        """Make the context current in this thread."""
        self("cuCtxSetCurrent", self._context)

    @contextmanager
    def entered(self) -> Generator[None]:
        """Make the context current in this thread, and afterwards the one that was before. In the
        meantime the thread may wait for the stream even if it captures another one.
        """
        before, modes = self("cuCtxGetCurrent"), self.cu.CUstreamCaptureMode
        mode = self("cuThreadExchangeStreamCaptureMode", modes.CU_STREAM_CAPTURE_MODE_RELAXED)
        try:
            self.enter()
            yield
        finally:
            # Not checked: an error in the body is reported instead, and another thread may have
            # closed that context's engine meanwhile.
            self.cu.cuCtxSetCurrent(before)
            self.cu.cuThreadExchangeStreamCaptureMode(mode)

    def copy_rows(
        self, source: tuple[int, int], target: tuple[int, int], nbytes: int, count: int
    ) -> None:
        """Copy `count` pieces of `nbytes` within the device, in the order of the stream. Source and
        target: the first piece's address, and the bytes from each to the next.
        """
        if count == 1:
            self("cuMemcpyDtoDAsync", target[0], source[0], nbytes, self.stream)
            return
        if self._copy is None:  # kept: making one costs more than the call
            self._copy = self.cu.CUDA_MEMCPY2D()
            device = self.cu.CUmemorytype.CU_MEMORYTYPE_DEVICE
            self._copy.srcMemoryType = self._copy.dstMemoryType = device
        copy = self._copy
        (copy.srcDevice, copy.srcPitch), (copy.dstDevice, copy.dstPitch) = source, target
        copy.WidthInBytes, copy.Height = nbytes, count
        self("cuMemcpy2DAsync", copy, self.stream)

    def synchronize(self) -> None:
        """Wait for all work on the stream."""
        self("cuStreamSynchronize", self.stream)

    def close(self) -> None:
        """Release the context, and with it all memory, modules and graphs. Idempotent."""
        context, self._context = self._context, None
        if context is not None:
            # Status codes are ignored: on a broken context these calls fail.
            if self._shared:
                # Other libraries may keep the context, so releasing it frees nothing by itself.
                self.cu.cuCtxSetCurrent(context)
                self._free_unchecked(0)
                self.cu.cuDevicePrimaryCtxRelease(self._handle)
            else:
                self.cu.cuCtxDestroy(context)
            self._broken = self._broken or "it was closed"


def _available() -> int:
    """Returns the memory available without swapping, as Linux reports it, bytes; 0 if unknown."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    found = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(found[0]) << 10 if found else 0


@dataclass(frozen=True, slots=True, eq=False)
class PinnedMemory:
    """Page-locked host memory."""

    address: int
    bytes: Array
    """uint8 view."""


def pack(values: Sequence[tuple[str, int | float]]) -> tuple[Any, list[Any]]:
    """Returns kernel arguments as cuLaunchKernelEx takes them: an array of pointers, and the values
    they point to, which must be kept alive. Kinds: "address" (8 bytes), "int" (4), "real" (4).
    """
    kinds: dict[str, Any] = {
        "address": ctypes.c_uint64,
        "int": ctypes.c_int32,
        "real": ctypes.c_float,
    }
    held = [kinds[kind](value) for kind, value in values]
    pointers = (ctypes.c_void_p * len(held))(*[ctypes.addressof(h) for h in held])
    return pointers, held


@cache
def _bindings() -> Any:
    try:
        from cuda.bindings import driver
    except ImportError as e:
        raise EngineError(
            f"engine cuda must have cuda-python: pip install 'thor-dflash[cuda]' (got: {e})"
        ) from e
    try:
        driver.cuDriverGetVersion()
    except RuntimeError as e:
        raise EngineError(
            f"engine cuda must have NVIDIA's driver on this machine (got: {e})"
        ) from e
    return driver
