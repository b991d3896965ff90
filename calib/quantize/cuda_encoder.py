"""NVFP4 on a GPU: the same bytes as nvfp4.py, by plugins/cuda/nvfp4_encode.cu."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from thor_dflash.calib.quantize import nvfp4
from thor_dflash.core.tensors import Array, DType
from thor_dflash.plugins.cuda.compile import ROOT
from thor_dflash.plugins.cuda.driver import Driver
from thor_dflash.plugins.cuda.enqueue import enqueue
from thor_dflash.plugins.cuda.kernel_cache import Kernels
from thor_dflash.plugins.launch import Int, Launch, Pointer, Real
from thor_dflash.plugins.numpy_math import NVFP4_GROUP

SOURCE = ROOT / "cuda" / "nvfp4_encode.cu"
THREADS = 256
CHUNK = 1 << 21
"""Weights of a chunk: enough to fill a GPU, and little beside the memory of a host."""
NO_SEARCH = (1, 0)


@dataclass(frozen=True, slots=True)
class Scaling:
    """How the rows of one linear are encoded."""

    amax: np.float32
    """Largest magnitude of all weights that share the second scale."""
    second: np.float32
    search: tuple[int, int]
    """First and last offset from the rounded scale's byte; NO_SEARCH: none."""
    factors: NDArray[np.float32] | None
    """[K], of the squared errors; None: all 1."""

    @classmethod
    def of(cls, method: str, amax: float, weights: nvfp4.Floats | None) -> Scaling:
        """Return the scaling of a method; `weights` as for `searched_scales`."""
        search = nvfp4.PLAIN_SEARCH if weights is None else nvfp4.WEIGHTED_SEARCH
        factors = None if weights is None else weights[:, 0].T.reshape(-1)
        return cls(
            np.float32(amax),
            nvfp4.tensor_scale(amax),
            NO_SEARCH if method == "rtn" else search,
            None if factors is None else np.ascontiguousarray(factors),
        )


def encode_launch(rows: Array, scaling: Scaling) -> Launch:
    """Return the launch for rows [N, K] in bf16 or float32. Its pointers are named as in `inputs`
    and `outputs`.
    """
    blocks = rows.size // NVFP4_GROUP
    names = ("rows", "factors", "values", "steps", "codes", "scales")
    return Launch(
        kernel="nvfp4_encode",
        grid=(-(-blocks // THREADS), 1, 1),
        threads=THREADS,
        arguments=(
            *map(Pointer, names),
            Int(blocks),
            Int(rows.shape[1] // NVFP4_GROUP),
            *map(Int, scaling.search),
            Real(float(scaling.second)),
            Real(float(np.float32(6) * scaling.second)),
        ),
        defines={"WIDE": int(rows.dtype == np.float32)},
        source=SOURCE.name,
        overlap=False,
    )


def inputs(rows: Array, scaling: Scaling) -> dict[str, Array]:
    """Return the arrays that the launch reads, by pointer."""
    steps = ((nvfp4.E4M3 / nvfp4.E4M3[nvfp4.TOP]) * scaling.amax) / np.float32(6)
    made: dict[str, Array] = {"rows": rows, "values": nvfp4.E4M3, "steps": steps}
    return made if scaling.factors is None else made | {"factors": scaling.factors}


def outputs(rows: Array) -> dict[str, Array]:
    """Return empty arrays for what the launch writes, by pointer."""
    count, columns = rows.shape
    return {
        "codes": np.empty((count, columns // 2), np.uint8),
        "scales": np.empty((count, columns // NVFP4_GROUP), np.uint8),
    }


def encoded(rows: Array, made: Mapping[str, Array]) -> nvfp4.EncodedRows:
    """Return what the launch wrote, with the count of blocks that may have lost their values."""
    scales = made["scales"]
    low = rows.reshape(*scales.shape, NVFP4_GROUP)[scales == nvfp4.TINIEST]
    flushed = int(low.astype(np.float32).any(axis=1).sum())
    return nvfp4.EncodedRows(made["codes"], scales, flushed)


class CudaEncoder:
    """A context on one GPU. Use as a context manager, from one thread."""

    def __init__(self, device: int, cubins: Path) -> None:
        """`cubins`: directory of compiled kernels.

        Raises: EngineError: there is no such device, driver or compiler.
        """
        self._driver = Driver(device)
        self._kernels = Kernels(self._driver, self._driver.info.device, cubins)
        self._memory: dict[str, tuple[int, int]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._driver.close()

    def encode(self, rows: Array, scaling: Scaling) -> nvfp4.EncodedRows:
        """Encode rows [N, K] in bf16 or float32.

        Raises: EngineError.
        """
        assert rows.dtype in (DType.BF16.numpy, np.float32), rows.dtype
        given, made = inputs(rows, scaling), outputs(rows)
        places = {"factors": 0}
        for name, x in given.items():
            data = np.ascontiguousarray(x)
            places[name] = self._place(name, data.nbytes)
            self._driver("cuMemcpyHtoD", places[name], data.ctypes.data, data.nbytes)
        for name, x in made.items():
            places[name] = self._place(name, x.nbytes)
        launch = encode_launch(rows, scaling)
        arguments = [_value(argument, places) for argument in launch.arguments]
        kernel = self._kernels.function(SOURCE, launch)
        # A copy from memory that is not page-locked may return before the device has the bytes.
        self._driver("cuCtxSynchronize")
        enqueue(self._driver, self._driver.stream, kernel, launch, arguments, overlap=False)
        self._driver.synchronize()
        for name, x in made.items():
            self._driver("cuMemcpyDtoH", x.ctypes.data, places[name], x.nbytes)
        return encoded(rows, made)

    def _place(self, name: str, nbytes: int) -> int:
        """Return memory of at least so many bytes, kept from one call to the next."""
        address, size = self._memory.get(name, (0, 0))
        if size < nbytes:
            if address:
                self._driver.free(address)
            address = self._driver.allocate(nbytes)
            self._memory[name] = address, nbytes
        return address


def _value(argument: object, places: Mapping[str, int]) -> tuple[str, int | float]:
    match argument:
        case Pointer(port):
            return "address", places[port]
        case Int(value):
            return "int", value
        case Real(value):
            return "real", value
        case _:
            raise AssertionError(argument)
