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
from thor_dflash.plugins.launch import Int, Launch, Pointer, Real
from thor_dflash.plugins.numpy_math import NVFP4_GROUP
from thor_dflash.runtime.engines.cuda.launch_runner import LaunchRunner

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
        self._runner = LaunchRunner(self._driver, cubins)
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
        launch, places, made = self._loaded(rows, scaling)
        self._runner.run(SOURCE, launch, places)
        self._driver.synchronize()
        for name, x in made.items():
            self._driver("cuMemcpyDtoH", x.ctypes.data, places[name], x.nbytes)
        return encoded(rows, made)

    def seconds(self, rows: Array, scaling: Scaling, runs: int) -> float:
        """Return the device time of the kernel for such rows, the mean of so many runs.

        Raises: EngineError.
        """
        launch, places, _ = self._loaded(rows, scaling)
        before, after = (self._driver.make("cuEventCreate", 0) for _ in range(2))
        self._runner.run(SOURCE, launch, places)  # compiles
        self._driver("cuEventRecord", before, self._driver.stream)
        for _ in range(runs):
            self._runner.run(SOURCE, launch, places)
        self._driver("cuEventRecord", after, self._driver.stream)
        self._driver.synchronize()
        spent = 1e-3 * float(self._driver("cuEventElapsedTime", before, after))
        self._driver.free(before)
        self._driver.free(after)
        return spent / runs

    def _loaded(
        self, rows: Array, scaling: Scaling
    ) -> tuple[Launch, dict[str, int], dict[str, Array]]:
        """Copy the inputs to the device; return the launch, the addresses of its pointers, and
        arrays for the outputs.
        """
        given, made = inputs(rows, scaling), outputs(rows)
        places = {"factors": 0}
        for name, x in given.items():
            data = np.ascontiguousarray(x)
            places[name] = self._place(name, data.nbytes)
            self._driver("cuMemcpyHtoD", places[name], data.ctypes.data, data.nbytes)
        for name, x in made.items():
            places[name] = self._place(name, x.nbytes)
        # A copy from memory that is not page-locked may return before the device has the bytes.
        self._driver("cuCtxSynchronize")
        return encode_launch(rows, scaling), places, made

    def _place(self, name: str, nbytes: int) -> int:
        """Return memory of at least so many bytes, kept from one call to the next."""
        address, size = self._memory.get(name, (0, 0))
        if size < nbytes:
            if address:
                self._driver.free(address)
            address = self._driver.allocate(nbytes)
            self._memory[name] = address, nbytes
        return address
