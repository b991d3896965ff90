"""The CUDA driver behind one gate: every call is checked, named and explained.

A call that leaves the context broken (an illegal address, a hung kernel) ends it: whatever is
asked of it afterwards is refused at once, saying what broke it. A new `Driver` has a new context.
"""

# cuda-python publishes no types.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from thor_dflash.errors import EngineError
from thor_dflash.plugins.launch import Device
from thor_dflash.tensors import Array

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
}
"""Errors after which a context answers nothing else, and what each says."""

HINTS = {
    "CUDA_ERROR_OUT_OF_MEMORY": "lower engine.capacity, or free memory on the device",
    "CUDA_ERROR_NO_BINARY_FOR_GPU": "the kernels were compiled for another device",
    "CUDA_ERROR_NO_DEVICE": "this machine has no CUDA device that the driver can use",
    "CUDA_ERROR_INVALID_DEVICE": "engine.device is not one of this machine's",
    "CUDA_ERROR_INSUFFICIENT_DRIVER": "install a driver for CUDA 13",
}


@dataclass(frozen=True, slots=True)
class Info:
    """A device as the driver describes it."""

    name: str
    device: Device
    memory: int
    """Bytes, all of it."""
    integrated: bool
    """Shares its memory with the CPU, as a Jetson does."""
    driver: int
    """CUDA version of the driver: 13000 is 13.0."""


class Driver:
    """One context on one device, its stream, and what is made of them. Use from one thread."""

    def __init__(self, index: int = 0) -> None:
        self.cu = _bindings()
        self._broken = ""
        self._context: Any = None
        self("cuInit", 0)
        handle = self("cuDeviceGet", index)
        self.info = self._describe(handle)
        self._context = self._create_context(handle)
        self.stream = self("cuStreamCreate", self.cu.CUstream_flags.CU_STREAM_NON_BLOCKING.value)

    def __call__(self, name: str, *arguments: Any) -> Any:
        """Call a driver function by name; its one value, a tuple of several, or None.

        Raises:
            EngineError: names the call and what its error means.
        """
        if self._broken:
            raise EngineError(
                f"{name} must follow a new engine: this one ended (got: {self._broken})"
            )
        status, *values = getattr(self.cu, name)(*arguments)
        if int(status) != 0:
            self._fail(name, status)
        return values[0] if len(values) == 1 else tuple(values) or None

    def _fail(self, name: str, status: Any) -> None:
        code = status.name
        _, text = self.cu.cuGetErrorString(status)
        meaning = STICKY.get(code) or (text.decode() if text else "unknown")
        report = f"{code}: {meaning}"
        if code in STICKY:
            self._broken = f"{name} reported {report}"
            raise EngineError(
                f"{name} must succeed (got {report}); this engine has ended, open a new one"
            )
        hint = f"; {HINTS[code]}" if code in HINTS else ""
        raise EngineError(f"{name} must succeed (got {report}){hint}")

    def _attribute(self, handle: Any, name: str) -> int:
        kind = getattr(self.cu.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(self("cuDeviceGetAttribute", kind, handle))

    def _describe(self, handle: Any) -> Info:
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
        return Info(
            name,
            device,
            int(self("cuDeviceTotalMem", handle)),
            bool(self._attribute(handle, "INTEGRATED")),
            int(self("cuDriverGetVersion")),
        )

    def _create_context(self, handle: Any) -> Any:
        # A context of its own: a broken one goes away with its engine, and the next engine of the
        # process starts clean. CUDA 13 takes parameters first, CUDA 12 does not.
        if self.cu.CUDA_VERSION >= 13000:
            return self("cuCtxCreate", None, 0, handle)
        return self("cuCtxCreate", 0, handle)

    @property
    def ended(self) -> str:
        """What broke the context; empty while it is whole."""
        return self._broken

    def free_memory(self) -> int:
        """Bytes that can be allocated now."""
        return int(self("cuMemGetInfo")[0])

    def allocate(self, nbytes: int) -> int:
        """Device memory, as an address."""
        return int(self("cuMemAlloc", nbytes))

    def pinned(self, nbytes: int) -> Pinned:
        """Host memory the device can copy from and to without a detour."""
        address = int(self("cuMemAllocHost", nbytes))
        view = (ctypes.c_uint8 * nbytes).from_address(address)
        return Pinned(address, np.ctypeslib.as_array(view))

    def enter(self) -> None:
        """Make the context current in this thread."""
        self("cuCtxSetCurrent", self._context)

    def synchronize(self) -> None:
        """Wait for all work of the stream."""
        self("cuStreamSynchronize", self.stream)

    def module(self, image: bytes) -> Any:
        """Load a cubin."""
        return self("cuModuleLoadData", image)

    def function(self, module: Any, name: str, shared: int) -> Any:
        """A kernel, allowed `shared` bytes of dynamic shared memory."""
        found = self("cuModuleGetFunction", module, name.encode())
        if shared > 48 << 10:
            kind = self.cu.CUfunction_attribute
            self(
                "cuFuncSetAttribute",
                found,
                kind.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                shared,
            )
        return found

    def close(self) -> None:
        """Give the context back, and with it all memory, modules and graphs. Idempotent."""
        context, self._context = self._context, None
        if context is not None:
            self.cu.cuCtxDestroy(context)  # a broken context cannot be asked to succeed
            self._broken = self._broken or "it was closed"


@dataclass(frozen=True, slots=True, eq=False)
class Pinned:
    """Page-locked host memory."""

    address: int
    bytes: Array
    """uint8 view."""


def pack(values: Sequence[tuple[str, int | float]]) -> tuple[Any, list[Any]]:
    """Kernel arguments as cuLaunchKernelEx takes them: an array of pointers, and what they point
    at. Kinds: "address" (8 bytes), "int" (4), "real" (4).
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
