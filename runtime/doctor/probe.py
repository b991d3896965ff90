"""Queries that may hang or crash, run in a child process: the reply is one JSON line on stdout."""

# cuda-python and TensorRT publish no types.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportAttributeAccessIssue=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import ctypes
import importlib
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from thor_dflash.core import strict_records
from thor_dflash.core.errors import ThorError
from thor_dflash.runtime.doctor.facts import Cuda, Gpu, Nvrtc, TensorRT

NO_BINDINGS = "no bindings"
OPERATOR, SOURCE = "standard", "kernel.cu"
"""The trial kernel: small, but includes the headers that every kernel includes."""
LIBRARIES = ("libnvinfer.so.10", "libnvinfer.so.11")


def main(query: str, *arguments: str) -> None:
    """Print the reply to one query."""
    reply: object
    if query == "cuda":
        reply = cuda()
    elif query == "nvrtc":
        reply = nvrtc(arguments[0], int(arguments[1]))
    else:
        reply = tensorrt()
    print(json.dumps(strict_records.encode(reply)), flush=True)


def cuda() -> Cuda:
    """See LocalMachine."""
    try:
        from cuda.bindings import driver
    except ImportError as e:
        return Cuda(error=f"{NO_BINDINGS}: {_why('cuda-bindings', e)}")
    try:
        _, version = driver.cuDriverGetVersion()
    except RuntimeError as e:  # the bindings found no libcuda
        return Cuda(error=f"no driver: {e}", bindings=int(driver.CUDA_VERSION))
    known = Cuda(driver=int(version), bindings=int(driver.CUDA_VERSION))
    try:
        _call(driver, "cuInit", 0)
        count = int(_call(driver, "cuDeviceGetCount"))
        return replace(known, devices=tuple(_gpu(driver, i) for i in range(count)))
    except _DriverError as e:
        return replace(known, error=str(e))


def _why(package: str, error: ImportError) -> str:
    """Why a package cannot be imported: it is not there, or what one of its libraries lacks."""
    absent = isinstance(error, ModuleNotFoundError)
    return f"{package} is not installed" if absent else f"{package} cannot be loaded: {error}"


class _DriverError(Exception):
    """A driver call failed; the message names the error and the call."""


def _call(driver: Any, name: str, *arguments: Any) -> Any:
    status, *values = getattr(driver, name)(*arguments)
    if int(status) != 0:
        raise _DriverError(f"{status.name} from {name}")
    return values[0] if len(values) == 1 else values


def _gpu(driver: Any, index: int) -> Gpu:
    handle = _call(driver, "cuDeviceGet", index)

    def attribute(name: str) -> int:
        kind = getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(_call(driver, "cuDeviceGetAttribute", kind, handle))

    context = _call(driver, "cuDevicePrimaryCtxRetain", handle)
    _call(driver, "cuCtxSetCurrent", context)
    free, total = _call(driver, "cuMemGetInfo")
    return Gpu(
        name=_call(driver, "cuDeviceGetName", 256, handle).split(b"\0")[0].decode(),
        major=attribute("COMPUTE_CAPABILITY_MAJOR"),
        minor=attribute("COMPUTE_CAPABILITY_MINOR"),
        multiprocessors=attribute("MULTIPROCESSOR_COUNT"),
        memory=int(total),
        free=int(free),
        integrated=bool(attribute("INTEGRATED")),
    )


def nvrtc(arch: str, device: int) -> Nvrtc:
    """See LocalMachine."""
    from thor_dflash.plugins.cuda.compile import ROOT, compile_source
    from thor_dflash.plugins.cuda.driver import Driver

    try:
        from cuda.bindings import nvrtc as bindings

        _, major, minor = bindings.nvrtcVersion()
        version = f"{major}.{minor}"
    except ImportError as e:
        return Nvrtc(error=_why("cuda-bindings", e))
    except RuntimeError as e:
        return Nvrtc(error=str(e))
    start = time.perf_counter()
    try:
        cubin = compile_source(ROOT / OPERATOR / SOURCE, {}, arch)
        seconds = time.perf_counter() - start
        if device >= 0:
            Driver(device)("cuModuleLoadData", cubin.image)
    except ThorError as e:
        return Nvrtc(error=str(e), version=version)
    return Nvrtc(version=version, seconds=seconds, loaded=device >= 0)


def tensorrt() -> TensorRT:
    """See LocalMachine."""
    try:
        trt = importlib.import_module("tensorrt")
    except ImportError as e:
        return TensorRT(error=_why("tensorrt", e))
    except Exception as e:  # if one of its libraries is missing, it may raise anything
        return TensorRT(error=f"{type(e).__name__}: {e}")
    return TensorRT(bindings=str(trt.__version__), library=_library())


def _library() -> int:
    """Version of the library that the bindings loaded into this process."""
    for name in LIBRARIES:
        try:
            # RTLD_NOLOAD: only the loaded library, not another version that is on the disk.
            library = ctypes.CDLL(name, mode=4)
        except OSError:
            continue
        return int(library.getInferLibVersion())
    return 0


def arguments(query: str, more: Sequence[str], path: Sequence[str]) -> list[str]:
    """Interpreter arguments for a child that replies to one query with this sys.path."""
    call = ", ".join(repr(word) for word in (query, *more))
    return [
        "-c",
        f"import sys; sys.path[:] = {list(path)!r}\n"
        f"from thor_dflash.runtime.doctor.probe import main\nmain({call})",
    ]
