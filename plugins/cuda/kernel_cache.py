"""Compiles the kernels of launches, loads them into a context and keeps them."""

# cuda-python publishes no types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

from thor_dflash.plugins.cuda.compile import Cubin, architecture, load
from thor_dflash.plugins.cuda.driver import DriverCalls
from thor_dflash.plugins.cuda.enqueue import configuration
from thor_dflash.plugins.launch import Device, Launch

COMPILERS = 4
"""Source files compiled in parallel."""
MOST_STATIC = 48 << 10
"""Dynamic shared memory that a launch may use without setting a function attribute first, bytes."""
SHARED_SHARE = 100
"""Preferred shared-memory carveout of every kernel, in percent of the memory that shared memory and
L1 cache divide. Kernels with different carveouts may not overlap on the device, but blocks of the
next kernel should start before this one's have exited. Source: CUDA Driver API,
cuFuncSetCacheConfig; worth 0.06 ms of a verify on an H100."""

Image = tuple[Path, tuple[tuple[str, int], ...]]
"""Identifies a cubin: source and constants."""


class Kernels:
    """The kernels of one context; `cubins` is the directory where compiled kernels are cached."""

    def __init__(
        self, gate: DriverCalls, device: Device, cubins: Path, *, overlap: bool = True
    ) -> None:
        self.gate = gate
        self.device = device
        self.overlap = overlap
        """Whether a kernel may start before the previous one has ended, if its launch says so."""
        self._cubins = cubins
        self._modules: dict[Image, Any] = {}
        self._found: dict[tuple[Image, str], Any] = {}
        self._shared: dict[tuple[Image, str], int] = {}

    def compiling(
        self, launches: Iterable[tuple[Path, Launch]], threads: int = COMPILERS
    ) -> Compiling:
        """Start compiling all that these launches need and that is not loaded, given with their
        source files, on several threads in the background.
        """
        wanted = dict.fromkeys(_image(source, launch) for source, launch in launches)
        missing = [image for image in wanted if image not in self._modules]
        return Compiling(self, missing, self._cubins, threads)

    def take(self, image: Image, cubin: Cubin) -> None:
        """Load an image.

        Raises:
            EngineError: the driver rejects it.
        """
        self._modules[image] = self.gate.make("cuModuleLoadData", cubin.image)

    def function(self, source: Path, launch: Launch) -> Any:
        """Returns the kernel of a launch, permitted to use the shared memory the launch needs."""
        image = _image(source, launch)
        if image not in self._modules:
            self.take(image, _cubin(image, self.device, self._cubins))
        key, kinds = (image, launch.kernel), self.gate.cu.CUfunction_attribute
        if key not in self._found:
            name = launch.kernel.encode()
            found = self.gate("cuModuleGetFunction", self._modules[image], name)
            divide = kinds.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
            self.gate("cuFuncSetAttribute", found, divide, SHARED_SHARE)
            self._found[key] = found
        if launch.shared > self._shared.get(key, MOST_STATIC):
            most = kinds.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            self.gate("cuFuncSetAttribute", self._found[key], most, launch.shared)
            self._shared[key] = launch.shared
        return self._found[key]

    def active_clusters(self, source: Path, launch: Launch) -> int:
        """Returns how many clusters of a launch the device runs at the same time, by the driver."""
        kernel = self.function(source, launch)
        config = configuration(self.gate, None, launch, overlap=False)
        return int(self.gate("cuOccupancyMaxActiveClusters", kernel, config))


class Compiling:
    """Images being compiled in background threads; a context manager, whose exit ends them."""

    def __init__(
        self, kernels: Kernels, wanted: Iterable[Image], cubins: Path, threads: int
    ) -> None:
        self._kernels = kernels
        self._pool = ThreadPoolExecutor(threads)
        self._jobs = {
            image: self._pool.submit(_cubin, image, kernels.device, cubins) for image in wanted
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def __len__(self) -> int:
        return len(self._jobs)

    def load(self, advance: Callable[[int], None]) -> None:
        """Load every image once it is compiled, calling `advance(1)` after each.

        Raises:
            EngineError: a source does not compile for this device, or its cubin cannot be stored.
        """
        for image, job in self._jobs.items():
            self._kernels.take(image, job.result())
            advance(1)


def _image(source: Path, launch: Launch) -> Image:
    return source, tuple(sorted(launch.defines.items()))


def _cubin(image: Image, device: Device, cubins: Path) -> Cubin:
    source, defines = image
    return load(source, dict(defines), architecture(device.capability), cubins)
