"""`thor-dflash bench`: measures the parts of a step against the device's read rate, and the time a
process takes until it can answer.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from thor_dflash.cli import option_checks
from thor_dflash.config.build import BuildConfig
from thor_dflash.config.engine import EngineConfig
from thor_dflash.config.tree import Config
from thor_dflash.core.errors import ConfigError, EngineError
from thor_dflash.core.message_text import show
from thor_dflash.core.progress import Progress

if TYPE_CHECKING:
    from thor_dflash.package.manifest import Manifest
    from thor_dflash.runtime.measure.bench_report import Figure
    from thor_dflash.runtime.session import Session

DRAFT_VOCABULARY = 65536
"""Rows of the reduced draft head. Source: TensorRT-Edge-LLM's sweep, in which 64 k kept all of the
acceptance and 32 k did not."""
CAPACITY = 33280
"""Context, tokens: the longest that is measured, also of recorded turns, and a block."""
CHUNK = 2048
"""Default rows of a prefill step: a prompt of 2,048 is one step. 512 rows leave a third of an H100
idle, whose 132 multiprocessors then share the 80 tiles of a product with 5,120 columns."""
TURN_CHUNK = 128
"""The same where turns are measured, which read whole chunks again."""
PROMPT = (1, 2)
"""A process is ready once it has answered it. Two ids, so that one is prefilled."""
ANSWER_TOKENS = 2
"""Length of that answer."""
READY = 10.0
"""Seconds a process may take until it is ready, in addition to reading its package from disk."""

MAIN = "import sys; from thor_dflash.cli.main import main; sys.exit(main())"
"""The command line, in a new process of this interpreter."""


@dataclass(frozen=True, slots=True)
class Variant:
    """A configuration to measure: the given one, or that with one feature left out."""

    name: str
    build: BuildConfig
    engine: EngineConfig


def run(args: Namespace, config: Config, progress: Progress) -> None:
    """Measure and print."""
    if args.image:
        _print(args, _images(args, config, progress))
        return
    if args.package is not None:
        if not args.ready:
            raise ConfigError("--package must go with --ready or --image (got --package alone)")
        _print(args, ready_here(args.package, config.engine, progress))
        return
    _check_shape(args, config)
    _device(config.engine)
    rows = _written(args, config, progress) if args.ready else _measured(args, config, progress)
    _print(args, rows)


def _check_shape(args: Namespace, config: Config) -> None:
    from thor_dflash.core.extras import extra

    with extra("build"):
        from thor_dflash.builders.synthetic import SHAPES

    if args.shape not in SHAPES:
        raise ConfigError(f"--shape must be one of {', '.join(SHAPES)} (got {show(args.shape)})")
    if not args.random_weights:
        raise ConfigError("--shape must go with --random-weights (got --shape alone)")
    if config.build.engine != "cuda":
        raise ConfigError(f"--shape must go with --engine cuda (got {config.build.engine})")
    option_checks.refuse_tensorrt(args.set, config.build.engine)
    if (args.out is not None) != args.ready:
        alone = "ready" if args.ready else "out"
        raise ConfigError(
            f"--ready and --out must be given together for a --shape (got --{alone} alone)"
        )


def _device(config: EngineConfig) -> None:
    """Fail early if there is no device.

    Raises:
        EngineError: with the driver's reason.
    """
    from thor_dflash.plugins.cuda.driver import Driver

    Driver(config.device).close()


def _print(args: Namespace, rows: list[Figure]) -> None:
    from thor_dflash.runtime.measure.bench_report import table

    # allow_nan=False: JSON has no NaN, and every figure must be a number.
    text = json.dumps([dataclasses.asdict(row) for row in rows], indent=1, allow_nan=False)
    print(text if args.json else table(rows))


# ---- steps ---------------------------------------------------------------------------------------
def variants(config: Config, *, ablations: bool) -> Iterator[Variant]:
    """The given configuration and, with `ablations`, variants with one feature left out each."""
    build, engine = config.build, config.engine
    chunk = build.chunk or CHUNK
    build = dataclasses.replace(build, chunk=chunk, chunks=build.chunks or (chunk,))
    yield Variant("as built", build, engine)
    if ablations:
        replace = dataclasses.replace
        yield Variant("no dependent launch", build, replace(engine, overlap=False))
        yield Variant("no graph", build, replace(engine, graphs=False))
        yield Variant("states instead of records", replace(build, saves="states"), engine)


def _measured(args: Namespace, config: Config, progress: Progress) -> list[Figure]:
    from thor_dflash.runtime.measure.bench_report import CONTEXT

    rows: list[Figure] = []
    for variant in variants(config, ablations=not args.quick):
        whole = {
            name: row.value
            for row in rows
            for name in ("verify", "cycle")
            if row.name == f"{name} at {CONTEXT}" and row.section == "figures"
        }
        rows += _variant(args.shape, variant, whole, progress)
    progress.close()
    return rows


def _variant(
    shape: str, variant: Variant, whole: dict[str, float], progress: Progress
) -> list[Figure]:
    """All figures of the first variant, for which `whole` is empty; for other variants only the few
    figures that show the effect of what was left out.
    """
    from thor_dflash.runtime.engines.cuda.engine import CudaEngine
    from thor_dflash.runtime.measure.bench_report import WIDTHS, brief, figures
    from thor_dflash.runtime.measure.cuda_bench import open_bench
    from thor_dflash.runtime.measure.random_weights import RandomWeights

    widths = () if whole else WIDTHS
    cubins = variant.engine.cubins_directory
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory)
        manifest = hollow(shape, out, variant, widths)
        engine = CudaEngine(out, variant.engine, progress, RandomWeights(out, cubins))
        with closing(engine):
            bench = open_bench(engine, manifest, CAPACITY, widths, cubins)
            if not whole:
                return list(figures(bench, progress))
            with progress.task(f"measuring: {variant.name}"):
                return list(brief(bench, variant.name, whole))


def hollow(
    shape: str, out: Path, variant: Variant, widths: tuple[int, ...] = (), *, mtp: bool = False
) -> Manifest:
    """Write a package without weights, and with a reduced draft head, to the directory `out`."""
    from thor_dflash.builders.synthetic import write_synthetic

    with tempfile.TemporaryDirectory() as directory:
        ids = Path(directory) / "draft_ids.json"
        ids.write_text(json.dumps(list(range(DRAFT_VOCABULARY))))
        build = variant.build
        build = dataclasses.replace(build, draft_ids=build.draft_ids or str(ids))
        return write_synthetic(shape, out, build, widths, mtp=mtp)


@contextmanager
def random_session(
    shape: str, tokenizer: Path | None, config: Config, reuse: int, progress: Progress
) -> Generator[Session]:
    """A session of a full-size model with random weights, and the tokenizer of a directory if one
    is given.

    Raises:
        ConfigError: there is no such shape.
    """
    from thor_dflash.builders.synthetic import SHAPES
    from thor_dflash.runtime.decoding.model_runner import ModelRunner
    from thor_dflash.runtime.engines.cuda.engine import CudaEngine
    from thor_dflash.runtime.measure.random_weights import RandomWeights
    from thor_dflash.runtime.session import Session
    from thor_dflash.runtime.text.tokenizer import Tokenizer

    if shape not in SHAPES:
        raise ConfigError(f"--shape must be one of {', '.join(SHAPES)} (got {show(shape)})")
    chunk = config.engine.chunk or TURN_CHUNK
    sizes = tuple(rows for rows in (32, 64, 128, 512, 2048) if rows <= chunk)
    build = dataclasses.replace(config.build, engine="cuda", chunk=chunk, chunks=sizes)
    engine_config = dataclasses.replace(config.engine, chunk=0)
    variant = next(variants(dataclasses.replace(config, build=build), ablations=False))
    text = Tokenizer.load(tokenizer) if tokenizer else None
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory)
        made = hollow(shape, out, variant)
        fill = RandomWeights(out, engine_config.cubins_directory)
        with closing(CudaEngine(out, engine_config, progress, fill)) as engine:
            capacity = config.engine.capacity or CAPACITY
            sizes = (chunk, *(rows for rows in sizes if rows != chunk))
            model = ModelRunner(engine, made, capacity, made.block, sizes, reuse)
            yield Session(model, text)


# ---- images --------------------------------------------------------------------------------------
def _images(args: Namespace, config: Config, progress: Progress) -> list[Figure]:
    """Measure images in prompts, on a package or on random weights."""
    from thor_dflash.runtime.measure.image_bench import REUSE, image_figures
    from thor_dflash.runtime.session import open_session

    sizes = [_image_size(text) for text in args.image]
    if args.ready or args.out is not None:
        raise ConfigError("--image must be given without --ready and --out (got both)")
    opened: AbstractContextManager[Session]
    if args.package is not None:
        opened = closing(open_session(args.package, config.engine, progress, reuse=REUSE))
    else:
        _check_shape(args, config)
        _device(config.engine)
        build = dataclasses.replace(config.build, vision="on")
        random = dataclasses.replace(config, build=build)
        opened = random_session(args.shape, None, random, REUSE, progress)
    with opened as session:
        rows = list(image_figures(session, sizes, progress, predict=bool(args.shape)))
    progress.close()
    return rows


def _image_size(text: str) -> tuple[int, int]:
    width, _, height = text.partition("x")
    try:
        return int(width), int(height)
    except ValueError as e:
        rule = "WIDTHxHEIGHT in pixels, such as 640x480"
        raise ConfigError(f"--image must be {rule} (got {show(text)})") from e


# ---- ready ---------------------------------------------------------------------------------------
def _written(args: Namespace, config: Config, progress: Progress) -> list[Figure]:
    """Write a random package, and open it in a new process."""
    from thor_dflash.runtime.measure.startup import forget, read_seconds

    out = write_random(args.shape, args.out, config, progress)
    files = sorted(p for p in out.rglob("*") if p.is_file())
    size = sum(p.stat().st_size for p in files)
    forget(files)
    with progress.task("reading the package", size, "bytes") as task:
        disk = read_seconds(files, task.advance)
    forget(files)
    command = [sys.executable, "-c", MAIN, "bench", "--package", str(out)]
    command += ["--ready", "--json", *(["-c", str(args.config)] if args.config else [])]
    for item in args.set:
        command += ["-s", item] if item.strip().startswith("engine.") else []
    with progress.task("opening the package in a new process"):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise EngineError(f"the new process must become ready (got: {done.stderr.strip()})")
    return [*disk_rows(size, disk), *ready_rows(json.loads(done.stdout), disk)]


def write_random(shape: str, out: Path, config: Config, progress: Progress) -> Path:
    """Write a complete package of random weights, hashes included, to the new directory `out`.
    Return its real path.

    Raises:
        ConfigError: `out` exists.
        PackageError: `out` is inside another package.
    """
    from thor_dflash.builders.output.atomic_package import parents
    from thor_dflash.package import manifest

    # The path as given may end in "..", or lead out of a directory that is missing.
    out = Path(os.path.realpath(out))
    manifest.check_outside("--out", out)
    if os.path.lexists(out):  # not `exists`, which calls a link to itself free
        raise ConfigError(f"--out must be a new directory (got {out}, which is there)")
    # In a temporary directory next to it, so that `out` is never incomplete.
    with (
        parents(out),
        tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as directory,
    ):
        part = Path(directory) / out.name
        part.mkdir()
        _fill(shape, part, config, progress)
        part.rename(out)
    return out


def _fill(shape: str, part: Path, config: Config, progress: Progress) -> None:
    """Write the package to an empty directory."""
    from thor_dflash.package import manifest
    from thor_dflash.runtime.decoding.model_runner import ModelRunner
    from thor_dflash.runtime.engines.cuda.engine import CudaEngine
    from thor_dflash.runtime.measure.random_weights import RandomWeights, SavedWeights

    made = hollow(shape, part, next(variants(config, ablations=False)))
    fill = SavedWeights(RandomWeights(part, config.engine.cubins_directory), progress)
    with closing(CudaEngine(part, config.engine, progress, fill)) as engine:
        ModelRunner(engine, made, made.capacity, made.block)
    files = sorted(p for p in part.rglob("*") if p.is_file() and p.name != manifest.NAME)
    with progress.task("hashing", sum(p.stat().st_size for p in files), "bytes") as task:
        entries = {
            p.relative_to(part).as_posix(): manifest.hash_file(p, task.advance) for p in files
        }
    made = dataclasses.replace(made, files=entries)
    (part / manifest.NAME).write_text(manifest.render(made), encoding="utf-8")


def ready_here(package: Path, config: EngineConfig, progress: Progress) -> list[Figure]:
    """Open a package in this process and make a short answer, which captures its graphs.

    Raises:
        ConfigError: the context is too short for that.
    """
    from thor_dflash.runtime.decoding.mtp import own_drafter
    from thor_dflash.runtime.measure.bench_report import Figure
    from thor_dflash.runtime.measure.startup import since_start
    from thor_dflash.runtime.session import Request, open_session

    begun = since_start()
    with closing(open_session(package, config, progress)) as session:
        opened = since_start()
        lacks = len(PROMPT) + ANSWER_TOKENS - session.model.limit
        if lacks > 0:
            capacity = session.model.capacity
            raise ConfigError(
                f"engine.capacity must be at least {capacity + lacks} for --ready: a prompt of "
                f"{len(PROMPT)} tokens, an answer of {ANSWER_TOKENS} and a block (got {capacity})"
            )
        drafter = own_drafter(session.manifest)
        request = Request(prompt=PROMPT, max_tokens=ANSWER_TOKENS, stop=frozenset())
        for _ in session.run(request, drafter):
            pass
        ready = since_start()
    return [
        Figure("ready", "from process start to the package", begun, "s", "Python and imports"),
        Figure("ready", "from process start to loaded", opened, "s", "checked, loaded, compiled"),
        Figure("ready", "from process start to ready", ready, "s", "two tokens answered"),
    ]


def disk_rows(size: int, seconds: float) -> Iterator[Figure]:
    """The row with the time to read the package from disk."""
    from thor_dflash.runtime.measure.bench_report import Figure

    note = f"{size / 1e9:.2f} GB at {size / seconds / 1e9:.2f} GB/s"
    yield Figure("ready", "reading the package from disk", seconds, "s", note)


def ready_rows(found: list[dict[str, object]], disk: float) -> Iterator[Figure]:
    """The rows of the other process, with a target for the last one."""
    from thor_dflash.runtime.measure.bench_report import BenchTarget, Figure, judge

    rows = [Figure(**row) for row in found]  # type: ignore[arg-type]
    yield from rows[:-1]
    most = round(disk + READY, 3)
    yield judge(rows[-1], BenchTarget(most, most))
