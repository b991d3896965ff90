"""Power and temperature of a board, from files that anybody may read; of others there is nothing.

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

from thor_dflash.runtime.profile import Power, Rail

ROOT = Path("/")
PERIOD = 0.05
"""Seconds between samples; a sensor averages over less."""
REST = 1.0
"""Seconds for which a board is looked at when idle."""
PATIENCE = 1.0
"""Seconds for a last sample, which takes milliseconds."""
JUNCTION = "tj-thermal"
CHANNELS = 3
"""Of a chip, from 1."""


class Sample(NamedTuple):
    """What all sensors said at a time."""

    at: float
    """Seconds of `time.perf_counter`."""
    watts: tuple[float, ...]
    """Of each rail."""
    celsius: float | None
    """Of the junction."""


@dataclass(frozen=True, slots=True)
class Sensor:
    """Power of one rail."""

    name: str
    watts_at: Path | None
    """Microwatts; where there is none, millivolts times milliamperes."""
    volts_at: Path
    amperes_at: Path

    def watts(self) -> float:
        """Now.

        Raises:
            OSError: it cannot be read.
            ValueError: it is no number.
        """
        if self.watts_at is not None:
            return 1e-6 * _number(self.watts_at)
        return 1e-6 * _number(self.volts_at) * _number(self.amperes_at)


def find(root: Path = ROOT) -> list[Sensor]:
    """Every rail that can be read now, by name."""
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
    """Where the junction temperature is, millidegrees Celsius."""
    for zone in sorted(root.glob("sys/class/thermal/thermal_zone*")):
        if _text(zone / "type") == JUNCTION:
            return zone / "temp"
    return None


@dataclass(slots=True)
class Watch:
    """Reads sensors again and again in a thread of its own, from `start` to `stop` or as long as a
    `with` lasts. Without any, nothing runs.
    """

    sensors: Sequence[Sensor]
    temperature: Path | None = None
    period: float = PERIOD
    _samples: list[Sample] = field(default_factory=list[Sample])
    _failed: str = ""
    _rested: float = 0.0
    _over: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def __enter__(self) -> Watch:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Begin. Once."""
        if self.sensors or self.temperature:
            self._thread = threading.Thread(target=self._run, name="sensors", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """End, after a sample that is under way, unless it takes long: an answer does not wait for
        a bus that hangs. Idempotent.
        """
        self._over.set()
        if self._thread is not None:
            self._thread.join(PATIENCE)
            if self._thread.is_alive():
                self._failed = f"a sensor said nothing for {PATIENCE} s"

    def rest(self) -> None:
        """Let the board be idle for some time, to know what it takes then."""
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
        """What was drawn until the rest had ended, and during some answers; how hot it was then.

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
                    statistics.median(joules),
                )
            )
        return Power(tuple(rails), hottest, self._failed)


def _hottest(
    samples: Sequence[Sample], at: Sequence[float], start: float, end: float
) -> float | None:
    """From `start` to `end`, the samples next to them included."""
    near = samples[max(0, bisect.bisect_right(at, start) - 1) : bisect.bisect_left(at, end) + 1]
    return max((s.celsius for s in near if s.celsius is not None), default=None)


def energy(at: Sequence[float], watts: Sequence[float], start: float, end: float) -> float:
    """Joules from `start` to `end`, by trapezoids between samples; before the first of them and
    after the last one power is theirs.

    Args:
        at: When samples were taken, s, rising.
        watts: What each said.
    """
    inner = range(bisect.bisect_right(at, start), bisect.bisect_left(at, end))
    times = [start, *(at[i] for i in inner), end]
    power = np.interp(times, at, watts)
    return float(np.sum((power[1:] + power[:-1]) / 2 * np.diff(times)))


def _number(path: Path) -> int:
    return int(path.read_text())


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip("\0\n ")
    except OSError:
        return ""
