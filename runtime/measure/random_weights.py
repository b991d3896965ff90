"""Random weights of a model's full size, made on the device.

A step takes the same time for any ordinary values, so a model can be measured without its weights.
The values must be of ordinary size, or a step would fault, and must differ, since memory is faster
on constant data.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from thor_dflash.core.progress import Progress, Silent
from thor_dflash.core.tensors import DType
from thor_dflash.package.launch_program import Weight
from thor_dflash.plugins.cuda.driver import Driver, PinnedMemory
from thor_dflash.plugins.launch import CallSite, Device, Launch
from thor_dflash.plugins.linear.layout import STEP, WeightKind, layout
from thor_dflash.plugins.linear.pack import NVFP4_FACTOR
from thor_dflash.plugins.registry import ROOT
from thor_dflash.plugins.standard import fill
from thor_dflash.runtime.engines.cuda.launch_runner import LaunchRunner
from thor_dflash.runtime.engines.cuda.weight_loader import PIECE, FileWeights

SOURCE = ROOT / "standard" / "fill.cu"

NVFP4_DEVIATION = 2.1
"""Standard deviation of a random code times its block scale, as fill_nvfp4 makes them."""

PLAIN = (
    ("conv1d.weight", 0.0, 0.3),
    ("A_log", 0.0, 0.5),
    ("dt_bias", 0.0, 0.5),
    ("linear_attn.norm.weight", 1.0, 0.05),
    ("codebook", 0.0, 0.3),
    ("base_kernel", 0.5, 0.2),
    ("drafter.", 1.0, 0.05),
    ("embed_tokens.weight", 0.0, 0.5),
    ("", 0.0, 0.05),
)
"""For weights that are not packed matrices: part of the name, mean, deviation; the first match
counts. Norm weights of the target are offsets from 1; those of the drafter and the gdn heads are
not."""


@dataclass(frozen=True, slots=True)
class RandomWeights:
    """A WeightFiller with random weights. Weights whose files exist, such as a graph's constants,
    are read from the package.
    """

    package: Path
    cubins: Path
    matrices: bool = False
    """Also random where the files exist: packed matrices and embeddings, which are nearly all of a
    package. What holds indices is read."""

    def __call__(
        self,
        driver: Driver,
        weights: Mapping[str, Weight],
        at: Mapping[str, int],
        packed: Mapping[str, CallSite],
    ) -> None:
        """See WeightFiller."""
        runner, device = LaunchRunner(driver, self.cubins), driver.info.device
        there = {
            n: w
            for n, w in weights.items()
            if (self.package / w.file).exists() and not (self.matrices and _is_matrix(n, packed))
        }
        FileWeights(self.package, Silent())(driver, there, at, packed)
        for seed, (name, weight) in enumerate(sorted(weights.items())):
            if name in there or name.endswith(".kinds"):
                continue
            for address, launch in _fills(device, name, weight, at[name], packed, seed):
                runner.run(SOURCE, launch, {"to": address})
        driver.synchronize()


@dataclass(frozen=True, slots=True)
class SavedWeights:
    """A WeightFiller that makes random weights and also writes them into the package, which is then
    a normal package except for its hashes.
    """

    random: RandomWeights
    progress: Progress

    def __call__(
        self,
        driver: Driver,
        weights: Mapping[str, Weight],
        at: Mapping[str, int],
        packed: Mapping[str, CallSite],
    ) -> None:
        """See WeightFiller."""
        package = self.random.package
        there = {w.file for w in weights.values() if (package / w.file).exists()}
        self.random(driver, weights, at, packed)
        missing = {n: w for n, w in weights.items() if w.file not in there}
        total = sum(w.nbytes for w in missing.values())
        pinned = driver.pinned(PIECE)
        with self.progress.task("writing weights", total, "bytes") as task:
            for name, weight in sorted(missing.items(), key=lambda item: item[1].offset):
                path = package / weight.file
                path.touch()
                with path.open("r+b") as file:
                    for size in _saved(driver, pinned, file, weight, at[name]):
                        task.advance(size)
        driver.free(pinned.address)


def _is_matrix(name: str, packed: Mapping[str, CallSite]) -> bool:
    """Whether a weight is a packed matrix, its scales, or an embedding."""
    base = name.removesuffix("scales")
    return name in packed or f"{base}packed" in packed or "embed_tokens.weight" in name


def _saved(
    driver: Driver, pinned: PinnedMemory, file: BinaryIO, weight: Weight, at: int
) -> Iterator[int]:
    file.seek(weight.offset)
    for start in range(0, weight.nbytes, PIECE):
        size = min(PIECE, weight.nbytes - start)
        driver("cuMemcpyDtoH", pinned.address, at + start, size)
        file.write(pinned.bytes[:size].data)
        yield size


def _fills(
    device: Device, name: str, weight: Weight, at: int, packed: Mapping[str, CallSite], seed: int
) -> Iterator[tuple[int, Launch]]:
    if name in packed:
        yield from _packed(device, packed[name], at, seed)
    elif name.endswith(".scales"):
        yield from _scales(device, packed[f"{name.removesuffix('scales')}packed"], at, seed)
    else:
        mean, deviation = next((m, d) for part, m, d in PLAIN if part in name)
        kind = DType(weight.dtype)
        count = weight.nbytes // kind.bytes
        make = fill.bf16 if kind is DType.BF16 else fill.f32
        yield at, make(device, count, seed, mean, deviation)


def _packed(device: Device, site: CallSite, at: int, seed: int) -> Iterator[tuple[int, Launch]]:
    plan = layout(site)
    deviation = (plan.steps * STEP) ** -0.5
    for group in plan.groups:
        size = plan.steps * group.tiles * group.kind.step_bytes
        where = at + group.offset
        if group.kind is WeightKind.NVFP4:
            slot = fill.NARROW_SLOT if group.narrow else fill.NVFP4_SLOT
            yield where, fill.nvfp4(device, size, seed + group.column, slot)
        elif group.kind is WeightKind.FP8:
            yield where, fill.fp8(device, size, seed + group.column)
        else:
            yield where, fill.bf16(device, size // 2, seed + group.column, 0.0, deviation)


def _scales(device: Device, site: CallSite, at: int, seed: int) -> Iterator[tuple[int, Launch]]:
    plan = layout(site)
    deviation = (plan.steps * STEP) ** -0.5
    unit = {
        WeightKind.NVFP4: float(NVFP4_FACTOR) * deviation / NVFP4_DEVIATION,
        WeightKind.FP8: deviation,
        WeightKind.BF16: 1.0,
    }
    for group in plan.groups:
        columns = group.tiles * 64
        yield at + 4 * group.column, fill.f32(device, columns, seed, unit[group.kind], 0.0)
