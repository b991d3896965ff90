"""The backend of tests/kernels.py that runs on a GPU, guards and poison included."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from kernels import GUARD, Buffer, Pointers, Step, Value

from thor_dflash.plugins.cuda.compile import architecture, load
from thor_dflash.plugins.cuda.driver import Driver
from thor_dflash.plugins.cuda.enqueue import enqueue
from thor_dflash.plugins.launch import Int, Real
from thor_dflash.tensors import Array


class Gpu:
    """Launches one behind the other on one stream, each as early as it says it may start."""

    def __init__(self, cubins: Path) -> None:
        self.driver = Driver()
        self._cubins = cubins
        self._modules: dict[tuple[object, ...], Any] = {}

    def __call__(self, buffers: Sequence[Buffer], steps: Sequence[Step]) -> None:
        """Run the steps."""
        driver = self.driver
        driver.enter()
        places = {id(b): self._put(b.memory) for b in buffers}
        # All arguments first: a copy between two launches would keep them apart.
        tables: list[int] = []
        arguments = [[self._value(v, places, tables) for v in step.arguments] for step in steps]
        kernels = [self._kernel(step) for step in steps]
        for i, step in enumerate(steps):
            overlap = step.launch.overlap and i > 0
            enqueue(driver, kernels[i], step.launch, arguments[i], overlap=overlap)
        driver.synchronize()
        for b in buffers:
            driver("cuMemcpyDtoH", b.memory.ctypes.data, places[id(b)], b.memory.nbytes)
        for address in (*places.values(), *tables):
            driver("cuMemFree", address)

    def _put(self, x: Array) -> int:
        address = self.driver.allocate(x.nbytes)
        self.driver("cuMemcpyHtoD", address, x.ctypes.data, x.nbytes)
        return address

    def _value(
        self, given: Value, places: Mapping[int, int], tables: list[int]
    ) -> tuple[str, int | float]:
        match given:
            case Int(number):
                return "int", number
            case Real(number):
                return "real", number
            case Pointers(targets):
                table = np.array([_address(b, places) for b in targets], np.uint64)
                tables.append(self._put(table))
                return "address", tables[-1]
            case _:
                return "address", _address(given, places)

    def _kernel(self, step: Step) -> Any:
        one = step.launch
        key = step.source, tuple(sorted(one.defines.items()))
        if key not in self._modules:
            arch = architecture(self.driver.info.device.capability)
            cubin = load(step.source, one.defines, arch, self._cubins)
            self._modules[key] = self.driver.module(cubin.image)
        return self.driver.function(self._modules[key], one.kernel, one.shared)

    def close(self) -> None:
        """Give the context back."""
        self.driver.close()


def _address(given: Buffer | None, places: Mapping[int, int]) -> int:
    return 0 if given is None else places[id(given)] + GUARD
