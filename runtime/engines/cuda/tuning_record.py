"""The tuning record of a device: the launches that were measured, and what replaces the rules'.

One JSON file for each device, driver, power mode and set of kernels, which `thor-dflash tune` and a
server write and every engine of that device reads. How K is cut decides how sums are rounded, so
`digest` names the bits of what runs by the choices that it runs with.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

from thor_dflash import __version__
from thor_dflash.config.engine import EngineConfig
from thor_dflash.core import strict_records
from thor_dflash.core.errors import EngineError
from thor_dflash.core.progress import Progress
from thor_dflash.package import manifest
from thor_dflash.package.manifest import Manifest
from thor_dflash.plugins.cuda.compile import sources_digest
from thor_dflash.plugins.cuda.driver import DeviceInfo
from thor_dflash.plugins.launch import CallSite, Choice
from thor_dflash.runtime.engines import resolve_options

FORMAT = 2
"""Version of the file format. A runtime reads only its own."""
AGAIN = "delete the file, and thor-dflash tune --package PKG"
WAIT_S, POLL_S = 240.0, 0.1
"""Longest wait for another process that tunes, s: twice what one takes. A server then starts by the
rules."""
COMMAND_S = 5.0
"""Time limit of the command that prints a board's power mode."""
POWER_MODE = re.compile(r"NV Power Mode:\s*(\S+)")
"""The line of `nvpmodel -q` that names it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidateTime:
    """One measured choice for a launch."""

    choice: dict[str, int]
    us: tuple[float, ...]
    """Median time of the chain around the launch for each context that was measured, divided by the
    launches in it, microseconds. Only differences between candidates are times of the launch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TunedLaunch:
    """What was measured for one launch."""

    name: str
    """Graph and step of the first call, layers as *: "verify: layers.*.mlp.down_proj"."""
    count: int
    """Calls of that graph."""
    chosen: int
    """Index of the choice that is used; 0: the rule's."""
    candidates: tuple[CandidateTime, ...]
    """The rule's choice first."""

    @property
    def gain(self) -> float:
        """By how much the chosen launch is faster than the rule's, microseconds, over all
        contexts.
        """
        rule, chosen = self.candidates[0].us, self.candidates[self.chosen].us
        return (sum(rule) - sum(chosen)) / len(rule)

    @property
    def text(self) -> str:
        """The chosen launch, and the rule's if that is another one."""
        rule, chosen = (words(self.candidates[i].choice) for i in (0, self.chosen))
        return f"{chosen}, not {rule}" if self.chosen else f"{chosen} (rule)"


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningRecord:
    """All launches that were measured on one device in one power mode."""

    format: int = FORMAT
    tool: str = __version__
    device: str
    driver: int
    """CUDA version of the driver: 13000 is 13.0."""
    kernels: str
    """Hash of kernels, launch rules and compiler."""
    power: str = ""
    """Power mode of a Jetson; "" elsewhere."""
    launches: dict[str, TunedLaunch] = field(default_factory=dict[str, TunedLaunch])
    """By the key of a call."""
    packages: tuple[str, ...] = ()
    """Packages, with the sizes that a session chose, of which every launch was measured."""
    sha256: str = ""
    """Of all other fields. An engine takes the choices as they are: a cut that no rule would make
    may compute anything."""

    def sealed(self) -> TuningRecord:
        """This record with its hash."""
        bare = replace(self, sha256="")
        text = json.dumps(strict_records.encode(bare), sort_keys=True)
        return replace(bare, sha256=hashlib.sha256(text.encode()).hexdigest())

    def choices(self) -> dict[str, Choice]:
        """The choices that are not the rules', by the key of a call."""
        return {
            key: launch.candidates[launch.chosen].choice
            for key, launch in self.launches.items()
            if launch.chosen
        }

    def adding(self, launches: Mapping[str, TunedLaunch], package: str = "") -> TuningRecord:
        """This record with further launches, with which `package` is complete."""
        packages = dict.fromkeys((*self.packages, *([package] if package else [])))
        return replace(self, launches={**self.launches, **launches}, packages=tuple(packages))


def words(choice: Choice) -> str:
    """A choice as text."""
    return " ".join(f"{name} {value}" for name, value in choice.items())


def package_name(config: EngineConfig, found: Manifest) -> str:
    """A package and what a session chose of it, as a record names it."""
    block, chunk = resolve_options.block(config, found), resolve_options.chunk(config, found)
    return f"{manifest.identity(found)[:16]}, block {block}, steps of {chunk}"


def digest(sites: Iterable[CallSite], tuned: Mapping[str, Choice]) -> str:
    """Names the choices with which some calls run, as 12 hexadecimal digits; "" if all are the
    rules'.
    """
    keys = {site.key for site in sites} & tuned.keys() if tuned else set[str]()
    used = {key: dict(tuned[key]) for key in keys}
    text = json.dumps(used, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12] if used else ""


@dataclass(frozen=True, slots=True)
class TuningFile:
    """Where the record of a device is, in one power mode."""

    directory: Path
    device: str
    """With number of multiprocessors and compute capability."""
    driver: int
    power: str

    @property
    def path(self) -> Path:
        """The file."""
        return self.directory / f"{self._stem}.{_plain(self.power) or 'default'}.json"

    @property
    def _stem(self) -> str:
        parts = (self.device, self.driver, sources_digest())
        return f"{_plain(self.device)}.{hashlib.sha256(repr(parts).encode()).hexdigest()[:12]}"

    def empty(self) -> TuningRecord:
        """A record without launches."""
        return TuningRecord(
            device=self.device, driver=self.driver, kernels=sources_digest(), power=self.power
        )

    def read(self) -> TuningRecord | None:
        """Read the record of this power mode, else one of another mode; None if there is none.

        Raises:
            EngineError: a file is not as `write` writes it, or cannot be looked for.
        """
        try:
            others = sorted(self.directory.glob(f"{self._stem}.*.json"))
            found = next((path for path in (self.path, *others) if path.is_file()), None)
        except OSError as e:
            raise self._unusable(e) from e
        return self._load(found) if found else None

    def _load(self, path: Path) -> TuningRecord:
        try:
            found = strict_records.load(TuningRecord, path, EngineError)
        except EngineError as e:
            raise EngineError(f"{e}; {AGAIN}") from e
        mine = self.empty()
        for name, want, got in (
            ("format", mine.format, found.format),
            ("device", mine.device, found.device),
            ("driver", mine.driver, found.driver),
            ("kernels", mine.kernels, found.kernels),
            ("sha256", found.sealed().sha256, found.sha256),
        ):
            if want != got:
                raise EngineError(
                    f"{path} must be a tuning record with {name} {want} (got {got}); {AGAIN}"
                )
        return found

    def write(self, record: TuningRecord) -> None:
        """Write the record of this power mode atomically.

        Raises:
            EngineError: the directory cannot keep it.
        """
        text = json.dumps(strict_records.encode(record.sealed()), indent=1) + "\n"
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=self.directory, suffix=".tmp")
            try:
                with os.fdopen(handle, "w", encoding="utf-8") as file:
                    os.fchmod(handle, 0o644)
                    file.write(text)
                    file.flush()
                    os.fsync(handle)
                Path(name).replace(self.path)
            except BaseException:
                Path(name).unlink(missing_ok=True)
                raise
        except OSError as e:
            raise self._unusable(e) from e

    @contextmanager
    def alone(self, progress: Progress) -> Generator[None]:
        """Wait for other processes that measure: two at a time would measure each other, and one
        would overwrite what the other wrote.

        Raises:
            EngineError: the directory cannot be made or opened, or they take too long.
        """
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            handle = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as e:
            raise self._unusable(e) from e
        try:
            if not _locked(handle):
                with progress.task("waiting for another process that tunes"):
                    end = time.monotonic() + WAIT_S
                    while not _locked(handle):
                        if time.monotonic() > end:
                            raise EngineError(
                                f"{self.directory} must be free to tune (got another process that "
                                f"tunes, for {WAIT_S:.0f} s)"
                            )
                        time.sleep(POLL_S)
            yield
        finally:
            os.close(handle)

    def _unusable(self, error: OSError) -> EngineError:
        return EngineError(
            f"engine.tunings must be a directory that can keep tuning records (got "
            f"{self.directory}: {error.strerror})"
        )


def _locked(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def tuning_file(directory: Path, info: DeviceInfo, power: str) -> TuningFile:
    """Where the record of a device is."""
    major, minor = info.device.capability
    device = f"{info.name}, {info.device.multiprocessors} SMs, {major}.{minor}"
    return TuningFile(directory, device, info.driver, power)


@cache
def power_mode() -> str:
    """The power mode of a Jetson; "" on other machines. Read once."""
    try:
        done = subprocess.run(
            ["nvpmodel", "-q"], capture_output=True, text=True, timeout=COMMAND_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    found = POWER_MODE.search(done.stdout)
    return found[1] if found else ""


def _plain(text: str) -> str:
    """A text as part of a file name."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
