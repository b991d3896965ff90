"""Runs single launches that belong to no program, such as filling memory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from thor_dflash.plugins.cuda.driver import Driver
from thor_dflash.plugins.cuda.enqueue import enqueue, values
from thor_dflash.plugins.cuda.kernel_cache import Kernels
from thor_dflash.plugins.launch import Launch


class LaunchRunner:
    """Enqueues launches on the stream of a driver; `cubins`: directory of compiled kernels."""

    def __init__(self, driver: Driver, cubins: Path) -> None:
        self._driver = driver
        self._kernels = Kernels(driver, driver.info.device, cubins)

    def run(self, source: Path, launch: Launch, at: Mapping[str, int]) -> None:
        """Enqueue one launch. Its arguments must be ports, with addresses in `at`, or numbers."""
        kernel = self._kernels.function(source, launch)
        found = values(launch, at.__getitem__, _nothing, _nothing, _nothing)
        enqueue(self._driver, self._driver.stream, kernel, launch, found, overlap=False)


def _nothing(wanted: object) -> int:
    raise AssertionError(wanted)
