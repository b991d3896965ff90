"""`thor-dflash bench`: what each part of a step costs here, against this device's read rate."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from argparse import Namespace
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from thor_dflash.config import BuildConfig, Config, EngineConfig
from thor_dflash.errors import ConfigError
from thor_dflash.progress import Progress

if TYPE_CHECKING:
    from thor_dflash.manifest import Manifest
    from thor_dflash.runtime.engines.cuda.bench import Bench

DRAFT_VOCABULARY = 65536
"""Rows of the reduced draft head. Source: TensorRT-Edge-LLM's sweep, in which 64 k kept all of the
acceptance and 32 k did not."""
CONTEXT, LONG = 2048, (8192, 32768)
CAPACITY = 33280
"""Holds the longest context and a block."""
PROMPT = 2048
CYCLES = 100
LINEARS = ("linear", "head")
THOR_READ = 259.7e9
"""Bytes a second a Jetson Thor reads in a long stream. Source: ApxInf, doc/THOR-ROOFLINE.md."""


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table."""

    name: str
    value: float
    unit: str
    note: str = ""


def run(args: Namespace, config: Config, progress: Progress) -> None:
    """Measure and print."""
    from thor_dflash.builders.hollow import SHAPES

    if args.shape not in SHAPES:
        raise ConfigError(f"--shape must be one of {', '.join(SHAPES)} (got {args.shape})")
    if not args.random_weights:
        raise ConfigError("--shape must go with --random-weights (got --shape alone)")
    if config.build.engine != "cuda":
        raise ConfigError(f"bench must have --engine cuda (got {config.build.engine})")
    rows: list[Row] = []
    for name, build, engine in variants(config, ablations=args.ablations):
        with progress.task(f"measuring: {name}"):
            rows += [
                dataclasses.replace(row, name=f"{name}: {row.name}" if rows else row.name)
                for row in _variant(args.shape, build, engine, progress, brief=bool(rows))
            ]
    progress.close()
    if args.json:
        print(json.dumps([dataclasses.asdict(row) for row in rows], indent=1))
    else:
        print(table(rows))


def variants(config: Config, *, ablations: bool) -> Iterator[tuple[str, BuildConfig, EngineConfig]]:
    """What is measured: the configuration as it is, and with one thing left out at a time."""
    build, engine = config.build, config.engine
    yield "as built", build, engine
    if ablations:
        replace = dataclasses.replace
        yield "no dependent launch", build, replace(engine, overlap=False)
        yield "no graph", build, replace(engine, graphs=False)
        yield "states instead of records", replace(build, saves="states"), engine


def _variant(
    shape: str, build: BuildConfig, engine: EngineConfig, progress: Progress, *, brief: bool
) -> list[Row]:
    from thor_dflash.builders.hollow import write_hollow
    from thor_dflash.runtime.engines.cuda.bench import open_bench
    from thor_dflash.runtime.engines.cuda.engine import CudaEngine
    from thor_dflash.runtime.engines.cuda.random import RandomWeights

    widths = () if brief else (1, 32)
    cubins = Path(engine.cubins).expanduser()
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory)
        ids = out / "draft_ids.json"
        ids.write_text(json.dumps(list(range(DRAFT_VOCABULARY))))
        build = dataclasses.replace(build, draft_ids=build.draft_ids or str(ids))
        manifest = write_hollow(shape, out, build, widths)
        opened = CudaEngine(out, engine, progress, RandomWeights(out, cubins))
        with closing(opened):
            bench = open_bench(opened, manifest, CAPACITY, widths, cubins)
            return list(_brief(bench) if brief else _full(bench, manifest))


def _brief(bench: Bench) -> Iterator[Row]:
    bench.at(CONTEXT, 16)
    yield Row(f"verify at {CONTEXT}", bench.steps(["verify"]).median, "ms")
    yield Row("cycle", bench.steps(CYCLE).median, "ms")


CYCLE = ("propose", "verify", "accept", "observe")


def _full(bench: Bench, manifest: Manifest) -> Iterator[Row]:
    del manifest
    engine = bench.engine
    info = engine.info
    yield Row(info.name, info.device.multiprocessors, "SMs", f"driver {info.driver}")
    read = bench.bandwidth()
    yield Row("read bandwidth", read / 1e9, "GB/s")
    bench.at(CONTEXT, 16)
    yield from _linears(bench, read)
    yield from _rooms(bench)
    verify = bench.steps(["verify"]).median
    yield Row(f"verify at {CONTEXT}", verify, "ms")
    plain = bench.steps(["verify", "accept"]).median
    yield Row("plain step", plain, "ms", f"{plain / verify:.3f} of the verify")
    cycle = bench.steps(CYCLE).median
    yield Row("cycle", cycle, "ms", f"{engine.launches([bench.call(n) for n in CYCLE])} launches")
    yield from _contexts(bench, verify, read)
    seconds = bench.prefill(PROMPT)
    yield Row(f"prefill of {PROMPT}", seconds, "s", f"{PROMPT / seconds:.0f} tokens/s")
    clock, graph = bench.loop(CONTEXT, CYCLES)
    share = 100 * (clock - graph) / clock
    yield Row("cycle of the loop", 1e3 * clock, "ms", f"{1e3 * graph:.3f} ms in the graph")
    yield Row("host time outside the graph", share, "%")
    for kind, size in engine.memory.items():
        yield Row(f"memory: {kind}", size / 1e9, "GB")


def _linears(bench: Bench, read: float) -> Iterator[Row]:
    from thor_dflash.runtime.engines.cuda.bench import rooms

    size = bench.bytes("verify", LINEARS)
    base = bench.steps(["verify"], rooms(*LINEARS)).median
    fraction = size / base * 1e3 / read
    yield Row("linears of a verify", base, "ms", f"{size / 1e9:.2f} GB, {fraction:.1%} of read")
    for rows in (1, 32):
        other = bench.steps([f"verify.{rows}"], rooms(*LINEARS)).median
        yield Row(f"the same, {rows} rows", other, "ms", f"{other / base:.3f} of 16 rows")
    thor = size / (fraction * THOR_READ) * 1e3
    yield Row("predicted on Thor: linears", thor, "ms", "same bytes and share of its read rate")


def _rooms(bench: Bench) -> Iterator[Row]:
    from thor_dflash.runtime.engines.cuda.bench import rooms

    for room in ("gdn", "verify_attention", "head", "linear"):
        timing = bench.steps(["verify"], rooms(room))
        yield Row(f"{room} of a verify", timing.median, "ms")
    for room in ("linear", "head", "draft_attention"):
        yield Row(f"{room} of a draft", bench.steps(["propose"], rooms(room)).median, "ms")
    for name in ("propose", "accept", "observe"):
        yield Row(name, bench.steps([name]).median, "ms")


def _contexts(bench: Bench, verify: float, read: float) -> Iterator[Row]:
    each = bench.cache_bytes()
    for length in LONG:
        bench.at(length, 16)
        longer = bench.steps(["verify"]).median
        floor = each * (length - CONTEXT) / read * 1e3
        yield Row(
            f"verify at {length}", longer, "ms",
            f"+{longer - verify:.3f} ms for {each * (length - CONTEXT) / 1e6:.0f} MB of cache, "
            f"{floor:.3f} ms at read rate",
        )  # fmt: skip


def table(rows: list[Row]) -> str:
    """Aligned."""
    wide = max(len(row.name) for row in rows)
    return "\n".join(
        f"  {row.name:<{wide}}  {row.value:>10.3f} {row.unit:<5} {row.note}".rstrip()
        for row in rows
    )
