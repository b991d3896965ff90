"""Launches, eagerly or as a captured CUDA graph, with events around them to tell their time."""

# cuda-python publishes no types.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from thor_dflash.plugins.cuda.driver import Driver
from thor_dflash.plugins.cuda.enqueue import Arguments, enqueue, values
from thor_dflash.plugins.cuda.kernels import Kernels
from thor_dflash.plugins.launch import Launch
from thor_dflash.runtime.engines.cuda.bound import Planned


@dataclass(slots=True)
class Captured:
    """A step that can be run again and again."""

    name: str
    """Its graphs' names, joined by "+"."""
    driver: Driver
    start: Callable[[], None]
    _spare: list[Any] = field(default_factory=list[Any])
    _running: list[tuple[Any, Any]] = field(default_factory=list[tuple[Any, Any]])
    _ended: list[tuple[Any, Any]] = field(default_factory=list[tuple[Any, Any]])

    def run(self) -> None:
        """Enqueue it."""
        before, after = self._event(), self._event()
        self.driver("cuEventRecord", before, self.driver.stream)
        self.start()
        self.driver("cuEventRecord", after, self.driver.stream)
        self._running.append((before, after))

    def _event(self) -> Any:
        return self._spare.pop() if self._spare else self.driver("cuEventCreate", 0)

    def idle(self) -> None:
        """The stream has been waited for: what ran has ended."""
        self._ended += self._running
        self._running.clear()

    def collect(self) -> list[float]:
        """Seconds of each run that had ended when `idle` was last said, each told once."""
        seconds: list[float] = []
        for before, after in self._ended:
            seconds.append(1e-3 * float(self.driver("cuEventElapsedTime", before, after)))
            self._spare += [before, after]
        self._ended.clear()
        return seconds


class Runner:
    """Runs single launches that belong to no program, such as filling memory."""

    def __init__(self, driver: Driver, cubins: Path) -> None:
        self._driver = driver
        self._kernels = Kernels(driver, driver.info.device, cubins)

    def run(self, source: Path, launch: Launch, at: Mapping[str, int]) -> None:
        """Enqueue one launch. Its arguments are ports, whose addresses `at` gives, and numbers."""
        kernel = self._kernels.function(source, launch)
        found = values(launch, at.__getitem__, _nothing, _nothing, _nothing)
        enqueue(self._driver, self._driver.stream, kernel, launch, found, overlap=False)


def _nothing(wanted: object) -> int:
    raise AssertionError(wanted)


class Launcher:
    """Launches kernels with their attributes."""

    def __init__(self, driver: Driver, kernels: Kernels, *, overlap: bool) -> None:
        self._driver = driver
        self._kernels = kernels
        self._overlap = overlap

    def capture(
        self, name: str, launches: Sequence[tuple[Planned, Arguments]], *, graph: bool
    ) -> Captured:
        """The launches as one graph; or, with `graph` false, as themselves every time."""
        driver = self._driver

        def eager() -> None:
            for i, (planned, arguments) in enumerate(launches):
                launch = planned.launch
                kernel = self._kernels.function(planned.source, launch)
                overlap = self._overlap and launch.overlap and i > 0
                enqueue(driver, driver.stream, kernel, launch, arguments, overlap=overlap)

        return capture(name, driver, eager, graph=graph)


def capture(name: str, driver: Driver, eager: Callable[[], None], *, graph: bool) -> Captured:
    """What `eager` puts on the stream, as one graph; or, with `graph` false, as it is every time.

    Raises:
        EngineError: what `eager` raised, or it did something that cannot be captured.
    """
    if not graph:
        return Captured(name, driver, eager)
    modes = driver.cu.CUstreamCaptureMode
    driver("cuStreamBeginCapture", driver.stream, modes.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)
    try:
        eager()
    except BaseException:
        driver.cu.cuStreamEndCapture(driver.stream)  # it may have no graph to give
        raise
    made = driver("cuStreamEndCapture", driver.stream)
    executable = driver("cuGraphInstantiate", made, 0)
    driver("cuGraphDestroy", made)
    driver("cuGraphUpload", executable, driver.stream)
    return Captured(name, driver, lambda: driver("cuGraphLaunch", executable, driver.stream))
