"""Runs launches eagerly or as a captured CUDA graph, with events around them to measure time."""

# cuda-python publishes no types.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from thor_dflash.plugins.cuda.driver import Driver


@dataclass(frozen=True, slots=True)
class HostCopy:
    """A copy from the device to page-locked memory."""

    device: int
    """Address, as is the next."""
    host: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Readback:
    """Copies to the host that are made while the rest of a step still runs."""

    after: int
    """Number of calls of the step after which they can be made."""
    copies: tuple[HostCopy, ...]


@dataclass(frozen=True, slots=True)
class CapturedReadback:
    """A readback as it was captured."""

    event: Any
    """Recorded when the copies of the run started last have been made."""
    copies: Mapping[int, HostCopy]
    """By device address."""


@dataclass(slots=True)
class CapturedGraph:
    """A step that can be run again and again."""

    name: str
    """The names of its graphs, joined by "+"."""
    driver: Driver
    start: Callable[[], None]
    readback: CapturedReadback | None = None
    executable: Any = None
    """The driver's graph; None if the calls are made anew for every run."""
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

    def free(self) -> None:
        """Free the graph and its events, after the last run has been collected."""
        for made in (*self._spare, *([] if self.executable is None else [self.executable])):
            self.driver.free(made)
        self._spare.clear()

    def _event(self) -> Any:
        return self._spare.pop() if self._spare else self.driver.make("cuEventCreate", 0)

    def ended(self, runs: int) -> None:
        """Note that the oldest `runs` runs have ended."""
        for _ in range(runs):
            self._ended.append(self._running.pop(0))

    def collect(self) -> list[float]:
        """Return the seconds of each run noted as ended since the last call."""
        seconds: list[float] = []
        while self._ended:
            # Removed first: after an interrupt here, a spare event must not be read as an old one.
            before, after = self._ended.pop(0)
            seconds.append(1e-3 * float(self.driver("cuEventElapsedTime", before, after)))
            self._spare += [before, after]
        return seconds


def capture(
    name: str,
    driver: Driver,
    calls: Sequence[Callable[[], None]],
    readback: Readback | None = None,
    *,
    graph: bool,
) -> CapturedGraph:
    """Capture what `calls` enqueue as one graph; or, with `graph` false, call them for every run,
    without a readback.

    Raises:
        EngineError: a call raised it, or did something that cannot be captured.
    """
    if not graph:
        return CapturedGraph(name, driver, partial(_all, calls))
    with driver.all_or_nothing():
        made, captured = _graph(driver, calls, readback)
        executable = driver.make("cuGraphInstantiate", made, 0)
        driver.free(made)
        driver("cuGraphUpload", executable, driver.stream)
    start = partial(driver, "cuGraphLaunch", executable, driver.stream)
    return CapturedGraph(name, driver, start, captured, executable)


def _graph(
    driver: Driver, calls: Sequence[Callable[[], None]], readback: Readback | None
) -> tuple[Any, CapturedReadback | None]:
    """Return the graph of what `calls` enqueue, and its readback."""
    modes, captured = driver.cu.CUstreamCaptureMode, None
    driver.capturing = True
    try:
        # Inside, so that an interrupt right after it ends the capture: nothing could run any more.
        driver("cuStreamBeginCapture", driver.stream, modes.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)
        if readback is None:
            _all(calls)
        else:
            _all(calls[: readback.after])
            captured, back = _read_back(driver, readback.copies)
            _all(calls[readback.after :])
            driver("cuStreamWaitEvent", driver.stream, back, 0)
        return driver.make("cuStreamEndCapture", driver.stream), captured
    except BaseException:
        # Not checked: it may have no graph to return, or the capture may have ended.
        status, *part = driver.cu.cuStreamEndCapture(driver.stream)
        if int(status) == 0:
            driver.cu.cuGraphDestroy(*part)
        raise
    finally:
        driver.capturing = False


def _all(calls: Sequence[Callable[[], None]]) -> None:
    for call in calls:
        call()


def _read_back(driver: Driver, copies: Sequence[HostCopy]) -> tuple[CapturedReadback, Any]:
    """Copy to the host on a side stream, in parallel with what the stream runs next. Also return an
    event that the stream must wait for before the capture ends.
    """
    flags, marks = driver.cu.CUevent_flags, driver.cu.CUevent_record_flags
    made, there, back = (
        driver.make("cuEventCreate", flags.CU_EVENT_DISABLE_TIMING.value) for _ in range(3)
    )
    driver("cuEventRecord", there, driver.stream)
    driver("cuStreamWaitEvent", driver.beside, there, 0)
    for copy in copies:
        driver("cuMemcpyDtoHAsync", copy.host, copy.device, copy.nbytes, driver.beside)
    external = marks.CU_EVENT_RECORD_EXTERNAL.value
    driver("cuEventRecordWithFlags", made, driver.beside, external)
    driver("cuEventRecord", back, driver.beside)
    return CapturedReadback(made, {copy.device: copy for copy in copies}), back
