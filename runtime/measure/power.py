"""Power and temperature of a Jetson board, from world-readable sysfs files; empty elsewhere.

Names are those of a Jetson's kernel: hwmon chips `ina*` with a label for each rail, and the thermal
zone `tj-thermal`. Source: the drivers ina238 and ina3221 in the kernel's Documentation/hwmon.
"""

from __future__ import annotations

import bisect
import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from thor_dflash.runtime.measure.profile import Power, Rail

ROOT = Path("/")
PERIOD = 0.05
"""Seconds between samples; a sensor averages over a shorter time."""
REST = 1.0
"""Seconds for which the idle board is sampled."""
PATIENCE = 1.0
"""Seconds to wait for the last sample, or for all sensors to be found; both take milliseconds."""
JUNCTION = "tj-thermal"
CHANNELS = 3
"""Channels per chip, numbered from 1."""


class Sample(NamedTuple):
    """One reading of all sensors."""

    at: float
    """Time by `time.perf_counter`, seconds."""
    watts: tuple[float, ...]
    """Power of each rail."""
    celsius: float | None
    """Junction temperature."""


@dataclass(frozen=True, slots=True)
class Sensor:
    """The power sensor of one rail."""

    name: str
    watts_at: Path | None
    """File in microwatts; None: power is voltage (millivolts) times current (milliamperes)."""
    volts_at: Path
    amperes_at: Path

    def watts(self) -> float:
        """Read the power now.

        Raises:
            OSError: a file cannot be read.
            ValueError: a file does not hold a number.
        """
        if self.watts_at is not None:
            return 1e-6 * _number(self.watts_at)
        return 1e-6 * _number(self.volts_at) * _number(self.amperes_at)


def find_sensors(root: Path = ROOT) -> list[Sensor]:
    """Every rail that can be read now, sorted by name. None at all if a reading takes longer than
    PATIENCE: a sensor bus that hangs would also stop the later readings.
    """
    found: list[Sensor] = []
    # A thread of its own: a read that hangs cannot be interrupted.
    thread = threading.Thread(target=lambda: found.extend(_sensors(root)), daemon=True)
    thread.start()
    thread.join(PATIENCE)
    return [] if thread.is_alive() else found


def _sensors(root: Path) -> list[Sensor]:
    found: dict[str, Sensor] = {}
    for chip in sorted(root.glob("sys/class/hwmon/hwmon*")):
        if not _text(chip / "name").startswith("ina"):
            continue
        for channel in range(1, CHANNELS + 1):
            name = _text(chip / f"in{channel}_label") or _text(chip / "label")
            power = chip / f"power{channel}_input"
            sensor = Sensor(
                name,
                power if power.exists() else None,
                chip / f"in{channel}_input",
                chip / f"curr{channel}_input",
            )
            if name and _reads(sensor):
                found.setdefault(name, sensor)
    return [found[name] for name in sorted(found)]


def _reads(sensor: Sensor) -> bool:
    try:
        sensor.watts()
    except (OSError, ValueError):
        return False
    return True


def junction(root: Path = ROOT) -> Path | None:
    """The file with the junction temperature in millidegrees Celsius."""
    for zone in sorted(root.glob("sys/class/thermal/thermal_zone*")):
        if _text(zone / "type") == JUNCTION:
            return zone / "temp"
    return None


@dataclass(slots=True)
class PowerSampler:
    """Samples sensors periodically in its own thread, from `start` to `stop` or inside a `with`.
    Without sensors, no thread runs.
    """

    sensors: Sequence[Sensor]
    temperature: Path | None = None
    period: float = PERIOD
    hung: bool = field(default=False, init=False)
    """Whether `stop` gave up waiting for a reading; its thread then waits on."""
    _samples: list[Sample] = field(default_factory=list[Sample])
    _failed: str = ""
    _rested: float = 0.0
    _over: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def __enter__(self) -> PowerSampler:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start sampling. Call once."""
        if self.sensors or self.temperature:
            self._thread = threading.Thread(target=self._run, name="sensors", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Stop sampling. Wait for a sample in progress, but at most PATIENCE seconds, in case a
        sensor bus hangs. Does nothing if it was called before.
        """
        if self._over.is_set():
            return
        self._over.set()
        if self._thread is not None:
            self._thread.join(PATIENCE)
            self.hung = self._thread.is_alive()
            if self.hung:
                self._failed = f"a sensor gave no reading for {PATIENCE} s"

    def rest(self) -> None:
        """Leave the board idle for REST seconds, to measure its idle power."""
        if self.sensors:
            time.sleep(REST)
            self._rested = time.perf_counter()

    def _run(self) -> None:
        while True:
            try:
                self._sample()
            except (OSError, ValueError) as e:
                self._failed = str(e)
                return
            if self._over.wait(self.period):
                return

    def _sample(self) -> None:
        watts = tuple(sensor.watts() for sensor in self.sensors)
        celsius = None if self.temperature is None else 1e-3 * _number(self.temperature)
        self._samples.append(Sample(time.perf_counter(), watts, celsius))

    def power(self, answers: Sequence[tuple[float, float]]) -> Power:
        """Return the power before the end of `rest` and during some answers, and the highest
        temperature during the answers.

        Args:
            answers: Beginning and end of each, seconds of `time.perf_counter`, in order.
        """
        samples = list(self._samples)
        at = [sample.at for sample in samples]
        hottest = _hottest(samples, at, answers[0][0], answers[-1][1])
        if len(samples) < 2:
            return Power((), hottest, self._failed)
        idle = max(1, bisect.bisect_left(at, self._rested))
        rails: list[Rail] = []
        for rail, sensor in enumerate(self.sensors):
            watts = [sample.watts[rail] for sample in samples]
            joules = [energy(at, watts, start, end) for start, end in answers]
            rails.append(
                Rail(
                    sensor.name,
                    statistics.fmean(watts[:idle]),
                    sum(joules) / sum(end - start for start, end in answers),
                    statistics.median_low(joules),
                )
            )
        return Power(tuple(rails), hottest, self._failed)


def _hottest(
    samples: Sequence[Sample], at: Sequence[float], start: float, end: float
) -> float | None:
    """Highest temperature from `start` to `end`, including the samples just outside."""
    near = samples[max(0, bisect.bisect_right(at, start) - 1) : bisect.bisect_left(at, end) + 1]
    return max((s.celsius for s in near if s.celsius is not None), default=None)


def energy(at: Sequence[float], watts: Sequence[float], start: float, end: float) -> float:
    """Joules from `start` to `end`, by the trapezoidal rule. Before the first sample and after the
    last one, power is taken to be constant.

    Args:
        at: Times of the samples, s, ascending.
        watts: Power of each sample.
    """
    first, last = bisect.bisect_right(at, start), bisect.bisect_left(at, end)
    # numpy copies what it is given, and all samples of a soak are too many for each answer of it.
    near = slice(max(0, first - 1), last + 1)
    times = [start, *at[first:last], end]
    power = np.interp(times, at[near], watts[near])
    return float(np.sum((power[1:] + power[:-1]) / 2 * np.diff(times)))


def _number(path: Path) -> int:
    return int(path.read_text())


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
