"""A backend of tests/support/kernel_runner.py that runs the launches on a GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from support.kernel_runner import GUARD, Buffer, Pointers, Step, Value

from thor_dflash.core.tensors import Array
from thor_dflash.plugins.cuda.driver import Driver
from thor_dflash.plugins.cuda.enqueue import enqueue
from thor_dflash.plugins.cuda.kernel_cache import Kernels
from thor_dflash.plugins.launch import Int, Real


class Gpu:
    """Enqueues launches on one stream; each may start before the previous one has ended if its rule
    allows that (Launch.overlap). Guards and poison are copied to the device and back.
    """

    def __init__(self, cubins: Path) -> None:
        self.driver = Driver()
        self.kernels = Kernels(self.driver, self.driver.info.device, cubins)

    def __call__(self, buffers: Sequence[Buffer], steps: Sequence[Step]) -> None:
        """Run the launches in order."""
        driver = self.driver
        driver.enter()
        places = {id(b): self._put(b.memory) for b in buffers}
        # All tables first: a copy between two launches would keep them from overlapping.
        tables: list[int] = []
        arguments = [[self._value(v, places, tables) for v in step.arguments] for step in steps]
        kernels = [self.kernels.function(step.source, step.launch) for step in steps]
        driver("cuCtxSynchronize")  # a call that copies may return before the copy is complete
        for i, step in enumerate(steps):
            overlap = step.launch.overlap and i > 0
            enqueue(driver, driver.stream, kernels[i], step.launch, arguments[i], overlap=overlap)
        driver.synchronize()
        for b in buffers:
            driver("cuMemcpyDtoH", b.memory.ctypes.data, places[id(b)], b.memory.nbytes)
        for address in (*places.values(), *tables):
            driver.free(address)

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

    def close(self) -> None:
        """Release the context."""
        self.driver.close()


def _address(given: Buffer | None, places: Mapping[int, int]) -> int:
    return 0 if given is None else places[id(given)] + GUARD + given.offset
