"""Synthetic packages: those of a full-size model without its weights, for measurements.

The time of a step depends on shapes, not on values. So an engine that fills the weights in device
memory itself runs such a package like the real one, without tens of gigabytes on disk.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from thor_dflash.builders.build import describe, make_plan
from thor_dflash.builders.checkpoint.drafter import drafter_layout
from thor_dflash.builders.checkpoint.expected_tensors import ExpectedTensors
from thor_dflash.builders.checkpoint.mtp import HALVES, mtp_dims, mtp_layout
from thor_dflash.builders.checkpoint.quantized_matrix import Matrix, WeightFormat
from thor_dflash.builders.checkpoint.target import target_layout
from thor_dflash.builders.checkpoint.vision import tower_layout
from thor_dflash.builders.lowering.packed_weights import CONSTANTS
from thor_dflash.config.build import BuildConfig
from thor_dflash.core.model_dims import (
    AttentionDims,
    DraftConvDims,
    DrafterDims,
    DraftLayerDims,
    GdnDims,
    SelectorDims,
    TargetDims,
    TowerDims,
    VisionDims,
)
from thor_dflash.core.tensors import Array
from thor_dflash.package import manifest
from thor_dflash.package.launch_program import ENDING, render
from thor_dflash.package.manifest import Manifest
from thor_dflash.plugins.numpy_math import NVFP4_GROUP

QWEN36_27B = TargetDims(
    vocab=248320,
    hidden=5120,
    intermediate=17408,
    layers=("gdn", "gdn", "gdn", "attention") * 16,
    attention=AttentionDims(heads=24, kv_heads=4, head_dim=256, rotary_dim=64, rope_theta=1e7),
    gdn=GdnDims(key_heads=16, value_heads=48, key_dim=128, value_dim=128, conv_kernel=4),
    eps=1e-6,
    tied=False,
    max_position=262144,
)
"""Source: config.json of Qwen/Qwen3.6-27B."""

QWEN36_27B_DFLASH = DrafterDims(
    vocab=248320,
    hidden=5120,
    intermediate=17408,
    layers=(
        *[DraftLayerDims(causal=True, window=2048)] * 4,
        DraftLayerDims(causal=False, window=0),
    ),
    attention=AttentionDims(heads=32, kv_heads=8, head_dim=128, rotary_dim=128, rope_theta=1e7),
    eps=1e-6,
    block=16,
    taps=(1, 16, 31, 46, 61),
    mask_token=248070,
    target_layers=64,
    max_position=262144,
)
"""Source: config.json of z-lab/Qwen3.6-27B-DFlash."""

QWEN38_27B_DFLASH2 = replace(
    QWEN36_27B_DFLASH,
    layers=(DraftLayerDims(causal=False, window=2048),) * 5,
    block=8,
    taps=(5, 19, 33, 47, 61),
    conv=DraftConvDims(taps=2, group=16),
    selector=SelectorDims(rank=256, top_k=16),
)
"""Source: config.json of z-lab/Qwen3.8-27B-DFlash2."""

QWEN36_27B_VISION = VisionDims(
    tower=TowerDims(depth=27, hidden=1152, heads=16, intermediate=4304, positions=48),
    mrope=(11, 10),
    image_token=248056,
    reserved=(248056, 248053, 248054, 248057),
    shortest=65536,
    longest=16777216,
)
"""Source: config.json of Qwen/Qwen3.6-27B, as published configurations quote it."""

SHAPES = {
    "qwen3.6-27b": (QWEN36_27B, QWEN36_27B_DFLASH),
    "qwen3.8-27b": (QWEN36_27B, QWEN38_27B_DFLASH2),
}
"""Qwen3.8-27B has the sizes of 3.6."""

BF16_LINEARS = ("in_proj_a", "in_proj_b", "kernel_projection", "hidden_projection")
"""Linears with so few rows that no NVFP4 checkpoint quantises them."""


@dataclass(frozen=True, slots=True)
class SyntheticCheckpoint:
    """A checkpoint with the right names, types and shapes; each array repeats one number."""

    directory: Path
    dims: Any
    """TargetDims or DrafterDims."""
    layout: ExpectedTensors
    skipped: tuple[str, ...] = ()
    kind: WeightFormat = WeightFormat.NVFP4

    def matrix(self, name: str) -> Matrix:
        """Return a linear's weight."""
        half = name in HALVES
        rows, columns = self.layout.matrices["fc" if half else name]
        columns //= 1 + half
        if self.kind is WeightFormat.BF16 or name.endswith(BF16_LINEARS):
            return Matrix(name, _all(ml_dtypes.bfloat16, (rows, columns)))
        ones = _all(np.float32, (rows,))
        if self.kind is WeightFormat.FP8:
            return Matrix(name, _all(ml_dtypes.float8_e4m3fn, (rows, columns)), None, ones)
        scales = _all(ml_dtypes.float8_e4m3fn, (rows, columns // NVFP4_GROUP))
        return Matrix(name, _all(np.uint8, (rows, columns // 2)), scales, ones, 1.0)

    def tensor(self, name: str) -> Array:
        """Return any other tensor."""
        # A drafter's norms are as in a checkpoint, an MTP layer's have 1 added.
        kind = np.float32 if self.kind is WeightFormat.BF16 else ml_dtypes.bfloat16
        return _all(kind, self.layout.tensors[name])

    def kv_scales(self, layer: int) -> tuple[float, float] | None:
        """Return the FP8 scales of the cache: None, which means 1."""
        return None


@dataclass(frozen=True, slots=True)
class SyntheticTower:
    """A vision tower, as SyntheticCheckpoint."""

    directory: Path
    dims: VisionDims
    layout: ExpectedTensors
    names: frozenset[str] = frozenset()

    def matrix(self, name: str) -> Matrix:
        """Return a linear's weight."""
        rows, *columns = self.layout.tensors[f"{name}.weight"]
        return Matrix(name, _all(ml_dtypes.bfloat16, (rows, math.prod(columns))))

    def tensor(self, name: str) -> Array:
        """Return any other tensor."""
        kind = np.float32 if name.endswith(".bias") else ml_dtypes.bfloat16
        return _all(kind, self.layout.tensors[name])


def _all(kind: Any, shape: tuple[int, ...]) -> Array:
    return np.broadcast_to(np.ones((), kind), shape)


def write_synthetic(
    shape: str,
    out: Path,
    config: BuildConfig,
    blocks: tuple[int, ...] = (),
    *,
    mtp: bool = False,
) -> Manifest:
    """Write the programs, constants and manifest of a package into the directory `out`.

    `blocks` as for `make_plan`; block sizes may be odd. A vision tower only with build.vision on.
    With `mtp` the drafter is the target's MTP layer, in BF16 as published checkpoints have it.
    """
    target, dflash = SHAPES[shape]
    drafter = SyntheticCheckpoint(out, dflash, drafter_layout(dflash))
    if mtp:
        dims, bf16 = mtp_dims(target, config.drafts), WeightFormat.BF16
        drafter = SyntheticCheckpoint(out, dims, mtp_layout(target), kind=bf16)
    vision, tower = QWEN36_27B_VISION, None
    if config.vision == "on":
        tower = SyntheticTower(out, vision, tower_layout(vision.tower, target.hidden))
    (out / "config.json").write_text("{}")
    plan = make_plan(
        SyntheticCheckpoint(out, target, target_layout(target)),
        drafter,
        config,
        blocks,
        tower,
    )
    files: Mapping[str, manifest.FileEntry] = {}
    for program in plan.programs:
        path = out / f"{program.name}{ENDING}"
        path.write_text(render(program), encoding="utf-8")
        files = {**files, path.name: manifest.hash_file(path)}
    (out / CONSTANTS).parent.mkdir()
    plan.weights.write(CONSTANTS, lambda count: None, out / CONSTANTS)
    files = {**files, CONSTANTS: manifest.hash_file(out / CONSTANTS)}
    made = replace(describe(plan), files=files)
    (out / manifest.NAME).write_text(manifest.render(made), encoding="utf-8")
    (out / "config.json").unlink()
    return made
