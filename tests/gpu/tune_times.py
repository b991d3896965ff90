"""Times a full-size model launched by the rules and as tuned, in one process, and tunes it twice.

    python tests/gpu/tune_times.py [--multiprocessors 16 [--reader]] [--cycle] [--again]
    python tests/gpu/tune_times.py --planted [--cycle]

Prints JSON: name -> table. With `--multiprocessors` on a part of the device, whose times are scaled
to the number and clock of a Thor's multiprocessors; beside them is the time that a Thor's memory
needs for the bytes. With `--reader` the other multiprocessors read memory all the time, so that the
part gets as many bytes per multiprocessor and clock as the device can be brought down to: 11 on an
H100, 8.7 on a Thor. That is a prediction: it holds if a multiprocessor of a Thor does as much in a
clock cycle as one of this device. GPCs, clusters, L2 cache and clocks of a Thor are not shown.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from threading import Event, Thread
from typing import Any
from unittest.mock import patch

sys.path[:0] = [str(Path(__file__).parents[2])]

from thor_dflash.cli.commands.bench import CAPACITY, hollow, variants
from thor_dflash.config.engine import EngineConfig
from thor_dflash.config.tree import Config
from thor_dflash.core.errors import ConfigError, ThorError
from thor_dflash.core.progress import Progress, choose
from thor_dflash.package.manifest import Manifest
from thor_dflash.plugins.cuda.driver import DeviceInfo, Driver
from thor_dflash.plugins.launch import Choice, Device, Int, Launch, Pointer
from thor_dflash.plugins.linear import partition
from thor_dflash.plugins.registry import ROOT
from thor_dflash.runtime.decoding.model_runner import ModelRunner
from thor_dflash.runtime.engines.cuda import engine as engines
from thor_dflash.runtime.engines.cuda.launch_runner import LaunchRunner
from thor_dflash.runtime.engines.cuda.tuning_record import TuningRecord, words
from thor_dflash.runtime.measure import cuda_bench
from thor_dflash.runtime.measure import tune as tuning
from thor_dflash.runtime.measure.bench_report import CONTEXT, CYCLE, LINEARS, LONG, THOR_READ
from thor_dflash.runtime.measure.chain_timer import TunableLaunch, tunable
from thor_dflash.runtime.measure.cuda_bench import BLOCK_BYTES, CudaBench, operators
from thor_dflash.runtime.measure.random_weights import RandomWeights
from thor_dflash.runtime.measure.tune import Tuning, tune

THOR_MULTIPROCESSORS, THOR_CLOCK = 20, 1.575e9
"""Clock in Hz. Source: NVIDIA, Jetson Thor modules, T5000."""
PROMPTS = (2048, 512, 128, 32)
"""Rows of a prefill step."""
READ = (20, 100, 512, 2048)
"""Lengths of prompts that are read."""
CYCLE_GRAPHS = ("verify", "propose", "observe")
ROUNDS = 4
"""Rounds in which rules and choices take turns."""
Table = list[list[Any]]
Times = dict[str, float]


class Part(Driver):
    """A driver whose context has only `count` multiprocessors (a green context)."""

    count = 0
    rest = False
    """Whether it has all others instead."""

    def describe(self, handle: Any) -> DeviceInfo:
        """Describe the device as if it had no other multiprocessors."""
        info = super().describe(handle)
        all_of = info.device.multiprocessors
        count = all_of - self.count if self.rest else self.count
        device = dataclasses.replace(info.device, multiprocessors=count)
        return dataclasses.replace(info, device=device)

    def _create_context(self, handle: Any) -> Any:
        kind = self.cu.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
        whole = self("cuDeviceGetDevResource", handle, kind)
        groups, _, others = self("cuDevSmResourceSplitByCount", 1, whole, 0, self.count)
        if (got := groups[0].sm.smCount) != self.count:
            raise ConfigError(
                f"--multiprocessors must be what the device can set apart (got {self.count}, "
                f"which would be {got})"
            )
        group = self("cuDevResourceGenerateDesc", [others] if self.rest else groups, 1)
        flag = self.cu.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM
        self._green = self("cuGreenCtxCreate", group, handle, flag)
        return self("cuCtxFromGreenCtx", self._green)

    def close(self) -> None:
        """Free everything in the context, and the context. Idempotent."""
        context, self._context = self._context, None
        if context is not None:
            self.cu.cuCtxSetCurrent(context)
            self._free_unchecked(0)
            self.cu.cuGreenCtxDestroy(self._green)


class Rest(Part):
    """A driver whose context has the multiprocessors that `Part` leaves."""

    rest = True


class Reader:
    """Reads memory on the multiprocessors that `Part` leaves, until it is closed."""

    def __init__(self, cubins: Path) -> None:
        self._end, self._cubins = Event(), cubins
        self._thread = Thread(target=self._work)
        self._thread.start()

    def _work(self) -> None:
        with closing(Rest()) as driver:
            runner, size = LaunchRunner(driver, self._cubins), 4 << 30
            launch = Launch(
                "read_memory",
                (driver.info.device.multiprocessors * 4, 1, 1),
                512,
                (Pointer("from"), Pointer("sink"), Int(size // BLOCK_BYTES)),
            )
            at = {"from": driver.allocate(size), "sink": driver.allocate(4096)}
            while not self._end.is_set():
                for _ in range(4):  # about 6 ms, for which an allocation may have to wait
                    runner.run(ROOT / "cuda" / "bandwidth.cu", launch, at)
                driver.synchronize()

    def close(self) -> None:
        """End it."""
        self._end.set()
        self._thread.join()


class Opened:
    """A package of random weights, which can be opened by the rules and as tuned."""

    def __init__(self, folder: Path, manifest: Manifest, progress: Progress) -> None:
        self.folder, self.manifest, self.progress = folder, manifest, progress
        self.config = EngineConfig(tunings=str(folder / "tunings"))

    @contextmanager
    def bench(self, tuned: str) -> Iterator[CudaBench]:
        """Open it with `engine.tune` set to `tuned`."""
        config = dataclasses.replace(self.config, tune=tuned)  # type: ignore[arg-type]
        cubins = config.cubins_directory
        weights = RandomWeights(self.folder, cubins)
        engine = engines.CudaEngine(self.folder, config, self.progress, weights)
        with closing(engine):
            model = ModelRunner(engine, self.manifest, CAPACITY, self.manifest.block, PROMPTS)
            extra = CudaBench(engine, model, LaunchRunner(engine.driver, cubins), {}, 0)
            extra.fill_state()
            yield extra

    def tune(self, *, again: bool = False) -> Tuning:
        """Tune it."""
        with self.bench("off") as bench:
            return tune(bench, self.progress, name="full size", again=again)


def steps(bench: CudaBench) -> Iterator[tuple[str, float, int]]:
    """Name, milliseconds and bytes that must be read (of states: read and written) of each step."""
    weights, state, each = bench.bytes("verify", LINEARS), bench.state_bytes(), bench.cache_bytes()
    draft, context = (bench.bytes(step, LINEARS) for step in ("propose", "observe"))
    bench.at(CONTEXT, bench.block)
    yield "linears of a verify", bench.steps(["verify"], operators(*LINEARS)).median, weights
    yield "gdn of a verify", bench.steps(["verify"], operators("gdn")).median, state
    yield "propose", bench.steps(["propose"]).median, draft
    whole = weights + state + draft + context + CONTEXT * each
    yield f"cycle at {CONTEXT}", bench.steps(CYCLE).median, whole
    for length in (CONTEXT, *LONG):
        bench.at(length, bench.block)
        yield f"verify at {length}", bench.steps(["verify"]).median, weights + state + length * each


def prompts(bench: CudaBench) -> Iterator[tuple[str, float, int]]:
    """The same for reading a prompt."""
    weights = bench.bytes("verify", LINEARS)
    for tokens in READ:
        bench.model.chunk = next(rows for rows in sorted(PROMPTS) if rows >= tokens)
        yield f"prompt of {tokens}", 1e3 * bench.prefill(tokens), weights


def compared(
    opened: Opened, rounds: int, *, cycle: bool
) -> tuple[dict[str, list[Times]], dict[str, int]]:
    """Times of every step in each round, by the rules ("off") and as tuned ("auto"), and bytes."""
    found: dict[str, list[Times]] = {"off": [], "auto": []}
    nbytes: dict[str, int] = {}
    with opened.bench("off") as rules, opened.bench("auto") as tuned:
        benches = {"off": rules, "auto": tuned}
        for number in range(rounds):
            for how in ("off", "auto") if number % 2 == 0 else ("auto", "off"):
                benches[how].engine.driver.enter()
                rows = [*steps(benches[how]), *([] if cycle else prompts(benches[how]))]
                found[how].append({name: ms for name, ms, _ in rows})
                nbytes |= {name: size for name, _, size in rows}
    return found, nbytes


def step_table(times: Mapping[str, list[Times]], nbytes: Mapping[str, int], factor: float) -> Table:
    """Medians of the rounds. `factor`: from here to a Thor's multiprocessors; 0 on a whole
    device.
    """
    header = ["step", "rules, ms", "tuned, ms", "gain, %", "spread of the rules, %"]
    if factor:
        header += ["a Thor's multiprocessors by the rules, ms", "tuned, ms", "its memory, ms"]
    rows: Table = [header]
    for name, size in nbytes.items():
        rules, tuned = ([one[name] for one in times[how]] for how in ("off", "auto"))
        before, after = statistics.median(rules), statistics.median(tuned)
        spread = (max(rules) - min(rules)) / before
        row = [name, round(before, 4), round(after, 4), round(100 * (1 - after / before), 2),
               round(100 * spread, 2)]  # fmt: skip
        if factor:
            row += [round(before * factor, 2), round(after * factor, 2),
                    round(1e3 * size / THOR_READ, 2)]  # fmt: skip
        rows.append(row)
    return rows


def launch_table(record: TuningRecord) -> Table:
    """Every launch that was measured."""
    rows: Table = [["launch", "calls", "rule", "chosen", "gain, us", "candidates"]]
    for one in record.launches.values():
        rule, chosen = (one.candidates[i].choice for i in (0, one.chosen))
        others = "; ".join(
            f"{words(c.choice)}: "
            + " ".join(f"{a - b:+.2f}" for a, b in zip(c.us, one.candidates[0].us, strict=True))
            for c in one.candidates[1:]
        )
        rows.append([one.name, one.count, words(rule), words(chosen), round(one.gain, 2), others])
    return rows


def repeated_table(first: TuningRecord, second: TuningRecord) -> Table:
    """How many launches two tunings chose alike, or equally fast: within 0.5 % of their chains."""
    same = close = 0
    rows: Table = [["launch", "first", "second", "second's times: first's choice, us", "own, us"]]
    for key, one in first.launches.items():
        other = second.launches[key]
        mine, its = one.candidates[one.chosen].choice, other.candidates[other.chosen]
        if mine == its.choice:
            same += 1
            continue
        was = next(c for c in other.candidates if c.choice == mine)
        close += sum(was.us) <= 1.005 * sum(its.us)
        rows.append([one.name, words(mine), words(its.choice), sum(was.us), sum(its.us)])
    rows.append([f"{len(first.launches)} launches", f"{same} the same", f"{close} equally fast",
                 0, 0])  # fmt: skip
    return rows


def planted(opened: Opened) -> Table:
    """Tune with a rule that always takes clusters of eight blocks of eight warps where it can."""
    ranked = partition._ranked

    def slow(*args: Any, **more: Any) -> Any:
        found = ranked(*args, **more)
        bad = [one for one in found if (one[1].warps, one[1].parts) == (8, 8)]
        return [*bad[:1], *(one for one in found if one is not (bad or [None])[0])]

    path = opened.folder / "planted"
    other = Opened(opened.folder, opened.manifest, opened.progress)
    other.config = dataclasses.replace(opened.config, tunings=str(path))
    partition.partition.cache_clear()
    with patch.object(partition, "_ranked", slow):
        record = other.tune().record
    partition.partition.cache_clear()
    rows: Table = [["launch", "planted", "chosen", "gain, us"]]
    for one in record.launches.values():
        rule, chosen = (one.candidates[i].choice for i in (0, one.chosen))
        if _planted(rule):
            rows.append([one.name, words(rule), words(chosen), round(one.gain, 2)])
    return rows


def _planted(choice: Choice) -> bool:
    return choice.get("warps") == 8 and choice.get("parts") == 8


def of_a_cycle(bench: CudaBench, device: Device) -> list[TunableLaunch]:
    """The launches of a cycle."""
    return [one for one in tunable(bench, device) if one.call.graph.name in CYCLE_GRAPHS]


def clock(bench: CudaBench) -> float:
    """Highest clock of the multiprocessors, Hz."""
    driver = bench.engine.driver
    kind = driver.cu.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_CLOCK_RATE
    return 1e3 * float(driver("cuDeviceGetAttribute", kind, driver("cuCtxGetDevice")))


def measured(args: argparse.Namespace, opened: Opened, progress: Progress) -> dict[str, Table]:
    """Everything that was asked for."""
    if args.planted:
        return {"planted": planted(opened)}
    found: dict[str, Table] = {}
    begun = time.monotonic()
    first = opened.tune()
    with opened.bench("auto") as bench:
        device, hz, read = bench.device, clock(bench), bench.bandwidth()
        count = bench.engine.info.device.multiprocessors
    factor = args.multiprocessors / THOR_MULTIPROCESSORS * hz / THOR_CLOCK
    header = ["device", "launches", "of which tuned", "seconds", "with opening", "read, GB/s",
              "bytes per multiprocessor and clock"]  # fmt: skip
    found["tuning"] = [header, [device, len(first.measured), len(first.record.choices()),
                                round(first.seconds, 1), round(time.monotonic() - begun, 1),
                                round(read / 1e9, 1), round(read / count / hz, 2)]]  # fmt: skip
    found["launches"] = launch_table(first.record)
    head, *rows = found["launches"]
    found["changed"] = [head[:-1], *(row[:-1] for row in rows if row[2] != row[3])]
    _note(found)
    with progress.task("rules and tuned in turn"):
        found["steps"] = step_table(*compared(opened, args.rounds, cycle=args.cycle), factor)
    _note(found)
    if args.again:
        found["tuned twice"] = repeated_table(first.record, opened.tune(again=True).record)
    return found


def _note(found: dict[str, Table]) -> None:
    """What was found so far, for the log of a run that is ended early."""
    print(json.dumps(found), file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--shape", default="qwen3.6-27b", metavar="NAME", help="a model's sizes")
    parser.add_argument("--multiprocessors", type=int, default=0, metavar="N", help="0: all")
    parser.add_argument("--reader", action="store_true", help="let the others read memory")
    parser.add_argument("--rounds", type=int, default=ROUNDS, metavar="N",
                        help="of rules and tuned in turn")  # fmt: skip
    parser.add_argument("--cycle", action="store_true", help="only what a cycle launches")
    parser.add_argument("--again", action="store_true", help="tune twice")
    parser.add_argument("--planted", action="store_true", help="only repair a planted slow rule")
    args = parser.parse_args(arguments)
    for option, number, least in (("multiprocessors", args.multiprocessors, 0),
                                  ("rounds", args.rounds, 1)):  # fmt: skip
        if number < least:
            raise ConfigError(f"--{option} must be >= {least} (got {number})")
    if args.reader and not args.multiprocessors:
        raise ConfigError("--reader must go with --multiprocessors (got --reader alone)")
    config, progress = Config(), choose(sys.stderr)
    build = dataclasses.replace(config.build, engine="cuda", chunk=PROMPTS[0], chunks=PROMPTS)
    variant = next(variants(dataclasses.replace(config, build=build), ablations=False))
    part = patch.object(engines, "Driver", Part) if args.multiprocessors else nullcontext()
    # Steps take ten times as long on a part, and have less noise.
    fewer = {"WARM": 3, "RUNS": 7} if args.multiprocessors else {}
    only = patch.object(tuning, "tunable", of_a_cycle) if args.cycle else nullcontext()
    with (
        tempfile.TemporaryDirectory() as name,
        patch.object(Part, "count", args.multiprocessors),
        patch.multiple(cuda_bench, **fewer) if fewer else nullcontext(),
        part,
        only,
    ):
        folder = Path(name)
        manifest = hollow(args.shape, folder, variant)
        opened = Opened(folder, manifest, progress)
        cubins = opened.config.cubins_directory
        with closing(Reader(cubins)) if args.reader else nullcontext():
            tables = measured(args, opened, progress)
        progress.close()
        print(json.dumps(tables, indent=1))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ThorError as e:
        print(f"tune_times: {e}", file=sys.stderr)
        sys.exit(2)
