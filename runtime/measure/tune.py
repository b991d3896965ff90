"""Measures the launches of a package on this device and keeps the fastest in the tuning record."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from thor_dflash.config.engine import EngineConfig
from thor_dflash.core.errors import ConfigError
from thor_dflash.core.progress import Progress
from thor_dflash.package import manifest as package_manifest
from thor_dflash.package.manifest import Manifest
from thor_dflash.plugins.cuda.driver import DriverCalls
from thor_dflash.plugins.launch import Choice, Device
from thor_dflash.plugins.registry import KERNELS
from thor_dflash.runtime.decoding.model_runner import ModelRunner
from thor_dflash.runtime.engines import resolve_options
from thor_dflash.runtime.engines.cuda.engine import CudaEngine
from thor_dflash.runtime.engines.cuda.launch_runner import LaunchRunner
from thor_dflash.runtime.engines.cuda.tuning_record import (
    CandidateTime,
    TunedLaunch,
    TuningFile,
    TuningRecord,
    package_name,
    power_mode,
    tuning_file,
    words,
)
from thor_dflash.runtime.measure.chain_timer import ChainTimer, TunableLaunch, tunable
from thor_dflash.runtime.measure.cuda_bench import CudaBench
from thor_dflash.runtime.measure.launch_search import SearchResult, search
from thor_dflash.runtime.measure.random_weights import RandomWeights

BUDGET_S = 120.0
"""Seconds that measuring may take unless another budget is given."""
COMPILERS = 16
"""Most candidates compiled at once."""
WARM_S = 1.0
"""Seconds of work before the first measurement: a cold board raises its clocks for about one."""


@dataclass(frozen=True, slots=True)
class Tuning:
    """The result of a tuning."""

    record: TuningRecord
    measured: tuple[str, ...]
    """Keys of the launches that were measured now."""
    left: int
    """Launches that the budget left unmeasured."""
    seconds: float
    path: Path
    """The record's file."""


def sizes(config: EngineConfig, found: Manifest) -> tuple[int, int, tuple[int, ...]]:
    """Context, block, and every size of a prefill step that a session may use."""
    chunk = resolve_options.chunk(config, found)
    every = (chunk, *(n for n in (found.chunk, *found.chunks) if n != chunk))
    return resolve_options.capacity(config, found), resolve_options.block(config, found), every


def needed(package: Path, config: EngineConfig) -> bool:
    """Whether a package of engine cuda has launches that were not measured on this device."""
    record, found = _file(config).read(), package_manifest.read(package)
    return record is None or package_name(config, found) not in record.packages


def _file(config: EngineConfig) -> TuningFile:
    driver = DriverCalls()  # makes no context, which takes longer than all the rest
    driver("cuInit", 0)
    info = driver.describe(driver("cuDeviceGet", config.device))
    return tuning_file(config.tunings_directory, info, power_mode())


def tune_package(
    package: Path,
    config: EngineConfig,
    progress: Progress,
    budget: float = BUDGET_S,
    *,
    again: bool = False,
) -> Tuning:
    """Measure what the record lacks, or with `again` everything, and write the record; one process
    at a time. The weights are random: they are not read, and a step takes the same time.

    Raises:
        ConfigError: the package is of another engine.
        EngineError: it does not run here, or the record cannot be read or written.
    """
    found = package_manifest.read(package)
    if found.engine != "cuda":
        raise ConfigError(f"tune must be for a package of engine cuda (got {found.engine})")
    weights = RandomWeights(package, config.cubins_directory, matrices=True)
    capacity, block, chunks = sizes(config, found)
    off = replace(config, tune="off")
    with (
        _file(config).alone(progress),  # before the engine, which takes memory
        closing(CudaEngine(package, off, progress, weights)) as engine,
    ):
        model = ModelRunner(engine, found, capacity, block, chunks)
        bench = CudaBench(
            engine, model, LaunchRunner(engine.driver, config.cubins_directory), {}, 0
        )
        return tune(bench, progress, budget, name=package_name(config, found), again=again)


def tune(
    bench: CudaBench, progress: Progress, budget: float = BUDGET_S, *, name: str, again: bool
) -> Tuning:
    """Measure the launches of a bench, as `tune_package`. `name`: of the package in the record."""
    begun, file, device = time.monotonic(), bench.engine.tunings, bench.engine.info.device
    record = file.read()
    if record is None or record.power != file.power:
        record = file.empty()
    file.write(record)  # refuses a directory that cannot keep it before minutes of compiling
    known = {} if again else record.launches
    timer = ChainTimer(bench)
    with progress.task("looking for candidates"):
        every = tunable(bench, device)
    left = [one for one in every if one.key not in known]
    device = replace(device, tuned=replace(record, launches=known).choices())
    choices = _compiled(bench, timer, left, device, progress)
    measured: list[str] = []
    with progress.task("measuring launches", len(left), "launches") as task:
        for one in left:
            # One at least, so that calls with a small budget come to an end, too.
            if measured and time.monotonic() - begun > budget:
                break
            tuned = _measured(timer, one, device, choices[one.key], warm=not measured)
            record = record.adding({one.key: tuned})
            file.write(record)  # after each, so that whatever ends this process loses nothing
            measured.append(one.key)
            if tuned.chosen:
                device = device.choosing(one.site, tuned.candidates[tuned.chosen].choice)
            task.advance(1)
    if len(measured) == len(left):
        record = record.adding({}, name)
        file.write(record)
    seconds = time.monotonic() - begun
    return Tuning(record, tuple(measured), len(left) - len(measured), seconds, file.path)


def _compiled(
    bench: CudaBench,
    timer: ChainTimer,
    every: Sequence[TunableLaunch],
    device: Device,
    progress: Progress,
) -> dict[str, tuple[Choice, ...]]:
    """The choices for every launch, by its key, with their kernels compiled and loaded."""
    found = {one.key: one.choices for one in every}
    for counted in (False, True):
        if counted:  # by now the driver knows how many clusters of each kernel run at once
            with progress.task("counting active clusters", len(every), "launches") as task:
                for one in every:
                    found[one.key] = _counted(timer, one, device)
                    task.advance(1)
        launches = [
            pair
            for one in every
            for choice in found[one.key]
            for pair in timer.launches(one, device.choosing(one.site, choice))
        ]
        with (
            bench.engine.kernels.compiling(launches, min(COMPILERS, os.cpu_count() or 1)) as images,
            progress.task("compiling candidates", len(images), "kernels") as task,
        ):
            images.load(task.advance)
    return found


def _counted(timer: ChainTimer, one: TunableLaunch, device: Device) -> tuple[Choice, ...]:
    active = partial(timer.active_clusters, one)
    return KERNELS[one.site.op.name].candidates(one.site, device, active)


def _measured(
    timer: ChainTimer,
    one: TunableLaunch,
    device: Device,
    choices: Sequence[Choice],
    *,
    warm: bool,
) -> TunedLaunch:
    contexts = timer.contexts(one)
    trials = timer.trials(one, device, choices)
    try:
        end = time.monotonic() + WARM_S * warm
        while time.monotonic() < end:
            timer.sample(one, trials[0], contexts)
        result = search(len(trials), lambda i: timer.sample(one, trials[i], contexts))
    finally:
        for trial in trials:
            trial.close()
    return tuned_launch(one.name, one.count, choices, result)


def tuned_launch(
    name: str, count: int, choices: Sequence[Choice], result: SearchResult
) -> TunedLaunch:
    """What a search found, as the record has it."""
    times = [
        CandidateTime(choice=dict(choice), us=tuple(round(us, 3) for us in medians))
        for choice, medians in zip(choices, result.medians, strict=True)
    ]
    return TunedLaunch(name=name, count=count, chosen=result.chosen, candidates=tuple(times))


def table(record: TuningRecord, *, explain: bool = False) -> str:
    """What was chosen, a line for each launch that is not the rule's; with `explain` for every
    launch, with all its candidates and by how many microseconds each is slower than the rule's.
    """
    lines = [f"{'launch':<52}{'calls':>6}{'gain, us':>10}  choice"]
    for one in record.launches.values():
        if not (one.chosen or explain):
            continue
        rule, chosen = one.candidates[0], one.candidates[one.chosen]
        lines.append(f"{one.name:<52}{one.count:>6}{one.gain:>10.2f}  {one.text}")
        for other in one.candidates if explain else ():
            by = " ".join(f"{a - b:+.2f}" for a, b in zip(other.us, rule.us, strict=True))
            mark = "*" if other is chosen else " "
            lines.append(f"  {mark} {words(other.choice):<62}{by}")
    tuned = sum(one.chosen > 0 for one in record.launches.values())
    lines.append(f"{len(record.launches)} launches measured, {tuned} not by the rules")
    return "\n".join(lines)
