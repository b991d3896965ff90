"""Times a full-size model on some of a device's multiprocessors and predicts a Jetson Thor's times.

    python tests/gpu/part.py --multiprocessors 16

Few multiprocessors get more bytes from memory than they can process, so the times are limited by
computing. They are scaled to the number and clock of a Thor's multiprocessors; beside them is the
time that a Thor's memory needs for the bytes. This is a prediction: it holds if a multiprocessor of
a Thor does as much in a clock cycle as one of this device.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path[:0] = [str(Path(__file__).parents[2])]

from thor_dflash.cli.commands.bench import CAPACITY, hollow, variants
from thor_dflash.config.tree import Config
from thor_dflash.core.errors import ConfigError, ThorError
from thor_dflash.core.progress import choose
from thor_dflash.plugins.cuda.driver import DeviceInfo, Driver
from thor_dflash.runtime.engines.cuda import engine as engines
from thor_dflash.runtime.measure import cuda_bench as benches
from thor_dflash.runtime.measure.bench_report import (
    CONTEXT,
    CYCLE,
    LINEARS,
    LONG,
    THOR_READ,
    WIDTHS,
)
from thor_dflash.runtime.measure.cuda_bench import CudaBench, everything, rooms
from thor_dflash.runtime.measure.random_weights import RandomWeights

THOR_MULTIPROCESSORS, THOR_CLOCK = 20, 1.575e9
"""Clock in Hz. Source: NVIDIA, Jetson Thor modules, T5000."""
PROMPTS = (2048, 512, 256, 128, 64, 32)
"""Rows of a prefill step."""


class Part(Driver):
    """A driver whose context has only `count` multiprocessors (a green context)."""

    count = 0

    def describe(self, handle: Any) -> DeviceInfo:
        """Describe the device as if it had no other multiprocessors."""
        info = super().describe(handle)
        device = dataclasses.replace(info.device, multiprocessors=self.count)
        return dataclasses.replace(info, device=device)

    def _create_context(self, handle: Any) -> Any:
        kind = self.cu.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
        whole = self("cuDeviceGetDevResource", handle, kind)
        groups, *_ = self("cuDevSmResourceSplitByCount", 1, whole, 0, self.count)
        if (got := groups[0].sm.smCount) != self.count:
            raise ConfigError(
                f"--multiprocessors must be what the device can set apart (got {self.count}, "
                f"which would be {got})"
            )
        group = self("cuDevResourceGenerateDesc", groups, 1)
        flag = self.cu.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM
        return self("cuCtxFromGreenCtx", self("cuGreenCtxCreate", group, handle, flag))

    def close(self) -> None:
        """Do nothing: the context is released when the process ends."""


def main(arguments: list[str] | None = None) -> int:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--shape", default="qwen3.6-27b", metavar="NAME", help="a model's sizes")
    parser.add_argument("--multiprocessors", type=int, required=True, metavar="N")
    args = parser.parse_args(arguments)
    if args.multiprocessors < 1:
        raise ConfigError(f"--multiprocessors must be >= 1 (got {args.multiprocessors})")
    config, progress = Config(), choose(sys.stderr)
    build = dataclasses.replace(config.build, engine="cuda", chunk=PROMPTS[0], chunks=PROMPTS)
    variant = next(variants(dataclasses.replace(config, build=build), ablations=False))
    cubins = variant.engine.cubins_directory
    several = partial(benches.Model, chunks=PROMPTS)
    with (
        tempfile.TemporaryDirectory() as folder,
        patch.object(Part, "count", args.multiprocessors),
        patch.object(engines, "Driver", Part),
        patch.object(benches, "Model", several),
    ):
        out = Path(folder)
        manifest = hollow(args.shape, out, variant, WIDTHS)
        engine = engines.CudaEngine(out, variant.engine, progress, RandomWeights(out, cubins))
        with closing(engine):
            bench = benches.open_bench(engine, manifest, CAPACITY, WIDTHS, cubins)
            progress.close()
            show(bench)
    return 0


def show(bench: CudaBench) -> None:
    """Print a line for each step as soon as it is measured."""
    driver = bench.engine.driver
    kind = driver.cu.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_CLOCK_RATE
    clock = 1e3 * driver("cuDeviceGetAttribute", kind, driver("cuCtxGetDevice"))
    print(
        f"{bench.device}: {Part.count} multiprocessors, {clock / 1e9:.3f} GHz at most, "
        f"{bench.bandwidth() / 1e9:.0f} GB/s\n"
        f"{'ms':<24}{'here':>10}{'bytes':>12}{'a Thor: its multiprocessors':>30}{'its memory':>12}"
    )
    factor = Part.count / THOR_MULTIPROCESSORS * clock / THOR_CLOCK
    for name, ms, size in steps(bench):
        memory = 1e3 * size / THOR_READ
        print(
            f"{name:<24}{ms:>10.3f}{size / 1e6:>9.0f} MB{ms * factor:>30.3f}{memory:>12.3f}",
            flush=True,
        )


def steps(bench: CudaBench) -> Iterator[tuple[str, float, int]]:
    """Name, time in ms, and bytes that must be read (for states: read and written) of each step."""
    weights = bench.bytes("verify", LINEARS)
    state, each = bench.state_bytes(), bench.cache_bytes()
    draft, context = (bench.bytes(step, LINEARS) for step in ("propose", "observe"))
    linears = rooms(*LINEARS)
    bench.at(CONTEXT, bench.block)
    for rows, step in ((bench.block, "verify"), *((rows, f"verify.{rows}") for rows in WIDTHS)):
        name = f"linears, {rows} row" + "s" * (rows > 1)
        yield name, bench.steps([step], linears).median, weights
    yield "gdn", bench.steps(["verify"], rooms("gdn")).median, state
    yield "propose", bench.steps(["propose"]).median, draft
    whole = weights + state + draft + context + CONTEXT * each
    yield f"cycle at {CONTEXT}", bench.steps(CYCLE).median, whole
    for length in (CONTEXT, *LONG):
        bench.at(length, bench.block)
        for name, keep, size in (
            ("attention", rooms("verify_attention"), 0),
            ("verify", everything, weights + state),
        ):
            ms = bench.steps(["verify"], keep).median
            yield f"{name} at {length}", ms, size + length * each
    for rows in PROMPTS:
        bench.model.chunk = rows
        yield f"prefill of {rows}", 1e3 * bench.prefill(rows), weights


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ThorError as e:
        print(f"part: {e}", file=sys.stderr)
        sys.exit(2)
