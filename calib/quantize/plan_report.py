"""What a plan costs and gives: bytes per class, disk, time of the work, time of a cycle."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import numpy as np

from thor_dflash.builders.checkpoint.quantized_matrix import WeightFormat
from thor_dflash.builders.checkpoint.target import EMBEDDING, TargetCheckpoint
from thor_dflash.calib.quantize import nvfp4
from thor_dflash.calib.quantize.classes import class_of
from thor_dflash.calib.quantize.plan import QuantizePlan
from thor_dflash.calib.quantize.quantize import processes
from thor_dflash.calib.quantize.staged_checkpoint import RESERVE
from thor_dflash.core.model_dims import TargetDims
from thor_dflash.core.progress import amount
from thor_dflash.core.text_table import columns

THOR = 273e9
"""Memory bandwidth of a Jetson AGX Thor, bytes/s. Source: NVIDIA's data sheet."""
CONTEXT = 4096
"""Tokens of context in the predicted verify step."""
SMALL, EMBED, OUTSIDE = "other", "embedding", "not of the text model"
"""Classes of tensors that are no linears with a class."""
SAMPLE = (64, 2048)
"""Shape of the weights that are quantised to measure how long it takes here."""


@dataclass(frozen=True, slots=True)
class ClassBytes:
    """The tensors of one class with one format."""

    label: str
    kind: str
    count: int
    """Linears, or tensors that are none."""
    nbytes: int


def class_bytes(plan: QuantizePlan) -> list[ClassBytes]:
    """Return a row for each class and format, the largest first."""
    rows: dict[tuple[str, str], list[int]] = {}
    for label, kind, size in _parts(plan):
        row = rows.setdefault((label, kind), [0, 0])
        row[0] += 1
        row[1] += size
    made = (ClassBytes(*key, count, size) for key, (count, size) in rows.items())
    return sorted(made, key=lambda row: -row.nbytes)


def _parts(plan: QuantizePlan) -> Iterator[tuple[str, str, int]]:
    """Yield class, format and bytes of every linear and of every other tensor."""
    linears = {plan.source.linears[name].codes: name for name in plan.kinds}
    for unit in plan.units:
        each = len(unit.tensors) // max(1, len(unit.linears))
        for i, name in enumerate(unit.linears):
            size = sum(tensor.nbytes for tensor in unit.tensors[i * each : (i + 1) * each])
            assert unit.kind is not None
            yield class_of(name) or SMALL, unit.kind.value, size
        for tensor in unit.tensors if unit.kind is None else ():
            label = class_of(linears.get(tensor.name, "")) or _label(plan, tensor.name)
            yield label, tensor.dtype.lower(), tensor.nbytes


def _label(plan: QuantizePlan, name: str) -> str:
    """Return the class of a tensor that is no linear with a class."""
    source = plan.source
    if not isinstance(source, TargetCheckpoint):
        return SMALL
    if name in source.skipped:
        return OUTSIDE
    return EMBED if name == source.prefix + EMBEDDING else SMALL


def step_bytes(plan: QuantizePlan) -> int:
    """Return the bytes that one step of the model reads and writes: for a target one verify step
    with CONTEXT tokens of context, for a drafter its own weights.
    """
    weights = sum(row.nbytes for row in class_bytes(plan) if row.label not in (EMBED, OUTSIDE))
    if not isinstance(plan.source, TargetCheckpoint):
        return weights
    dims = plan.source.dims
    if dims.tied:
        weights += next(row.nbytes for row in class_bytes(plan) if row.label == EMBED)
    return weights + _state_bytes(dims, 2 if plan.config.kv == "none" else 1)


def _state_bytes(dims: TargetDims, kv_bytes: int) -> int:
    g, a = dims.gdn, dims.attention
    state = 4 * g.value_heads * g.key_dim * g.value_dim  # float32
    tail = 2 * g.conv_channels * (g.conv_kernel - 1)
    cache = 2 * kv_bytes * a.kv_heads * a.head_dim * CONTEXT
    gdn = dims.layers.count("gdn")
    return 2 * gdn * (state + tail) + (len(dims.layers) - gdn) * cache


def seconds(plan: QuantizePlan) -> float:
    """Return how long the arithmetic will take on this machine's cores, measured on a sample."""
    weights = sum(
        prod(plan.source.linears[name].shape(plan.source.shards))
        for name, kind in plan.kinds.items()
        if kind is WeightFormat.NVFP4
    )
    sample = np.random.default_rng(0).standard_normal(SAMPLE).astype(np.float32)
    amax = np.float32(np.abs(sample).max())
    scale2 = nvfp4.tensor_scale(float(amax))
    begin = time.thread_time()
    blocks = nvfp4.as_blocks(sample)
    scales = nvfp4.rounded_scales(blocks, scale2)
    if plan.config.method != "rtn":
        even = nvfp4.channel_weights(np.ones(SAMPLE[1], np.float32))
        factors = even if plan.config.method == "act" else None
        scales = nvfp4.searched_scales(blocks, amax, factors)
    nvfp4.encode(blocks, scales, scale2)
    spent = time.thread_time() - begin
    return spent / sample.size * weights / processes(plan.config)


def table(plan: QuantizePlan, *, random: bool = False) -> str:
    """The plan as text: what is stored how, what it needs, what a step then takes. `random`: the
    values are made, not read.
    """
    rows = [("tensors", "stored as", "count", "size")]
    for row in class_bytes(plan):
        rows.append((row.label, row.kind, str(row.count), amount(row.nbytes, "bytes")))
    moved = step_bytes(plan)
    step = "a draft" if not isinstance(plan.source, TargetCheckpoint) else "a verify step"
    context = f" with {CONTEXT:,} tokens of context" if "verify" in step else ""
    other = (
        "draft (--drafter DIR --plan)" if "verify" in step else "verify step (--target DIR --plan)"
    )
    cycle = f"; a cycle is that and a {other}"
    read = sum(unit.reads for unit in plan.units)
    reads = "" if random else f"reads {amount(read, 'bytes')}, "
    encodes = WeightFormat.NVFP4 in plan.kinds.values()
    spent = f"{seconds(plan):,.0f} s on this machine (measured on a sample)" if encodes else ""
    work = [f"arithmetic: about {spent}"] * encodes
    return "\n".join([
        f"preset {plan.config.preset}, method {plan.config.method}, dialect {plan.config.dialect}, "
        f"cache {plan.config.kv}",
        *columns(rows, left=2, indent="  "),
        f"{reads}writes {amount(plan.nbytes, 'bytes')} in {amount(len(plan.files), 'files')}, "
        f"needs {amount(plan.nbytes + RESERVE, 'bytes')} of disk",
        *work,
        f"{step}{context} moves {amount(moved, 'bytes')}: {moved / THOR * 1e3:.1f} ms on a Jetson "
        f"AGX Thor (predicted from its bandwidth alone){cycle}",
    ])  # fmt: skip
