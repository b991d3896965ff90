"""Random tensors as if they were stored: nothing is held but a table of normal numbers.

Element i of a tensor is element (start + i) mod PERIOD of the table, with a start from the tensor's
name. So any part can be made by itself, and a value depends on the name alone.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from math import prod
from pathlib import Path

import numpy as np

from thor_dflash.builders.checkpoint.drafter import DrafterCheckpoint, drafter_layout
from thor_dflash.builders.checkpoint.expected_tensors import ExpectedTensors, check
from thor_dflash.builders.checkpoint.mtp import PREFIX as MTP
from thor_dflash.builders.checkpoint.mtp import mtp_layout
from thor_dflash.builders.checkpoint.shards import Shards, TensorEntry
from thor_dflash.builders.checkpoint.target import (
    HEAD,
    PREFIXES,
    TargetCheckpoint,
    target_layout,
)
from thor_dflash.core.model_dims import DrafterDims, TargetDims
from thor_dflash.core.tensors import Array, DType

PERIOD = 1_000_003
"""Numbers in the table: a prime, so that no two rows of a matrix are equal."""
PLACE = Path("random values")


def random_target(dims: TargetDims, *, mtp: bool = False) -> TargetCheckpoint:
    """Return a target whose tensors are those of `RandomReader`, with the multimodal model's
    names. It has no vision tower, and an MTP layer only if wanted.
    """
    prefix = PREFIXES[0]

    def stored_name(name: str) -> str:
        return HEAD if name == HEAD else prefix + name

    layout = target_layout(dims)
    shapes = _shapes(layout, stored_name)
    further = _shapes(mtp_layout(dims), lambda name: MTP + name) if mtp else {}
    shards = _shards({**shapes, **further})
    linears = check(shards, layout, stored_name, besides=further)
    return TargetCheckpoint(PLACE, dims, prefix, tuple(further), shards, linears)


def random_drafter(dims: DrafterDims) -> DrafterCheckpoint:
    """Return a drafter whose tensors are those of `RandomReader`."""
    layout = drafter_layout(dims)
    shards = _shards(_shapes(layout, str))
    return DrafterCheckpoint(PLACE, dims, shards, check(shards, layout, str))


def _shapes(
    layout: ExpectedTensors, stored_name: Callable[[str], str]
) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {stored_name(n): s for n, s in layout.tensors.items()}
    return shapes | {f"{stored_name(name)}.weight": s for name, s in layout.matrices.items()}


def _shards(shapes: Mapping[str, tuple[int, ...]]) -> Shards:
    stored: dict[str, TensorEntry] = {}
    at = 0
    for name, shape in sorted(shapes.items()):
        end = at + 2 * prod(shape)
        stored[name] = TensorEntry(PLACE, DType.BF16.numpy, shape, at, end)
        at = end
    return Shards(PLACE, stored, {})


class RandomReader:
    """Gives the tensors of a checkpoint that exists nowhere."""

    def __init__(self, shards: Shards, *, drafter: bool) -> None:
        self._shards = shards
        self._drafter = drafter

    @property
    def shards(self) -> Shards:
        """See TensorReader."""
        return self._shards

    def read(self, name: str, begin: int, size: int) -> bytes:
        """See TensorReader."""
        return self._values(name, begin // 2, size // 2).tobytes()

    def rows(self, name: str, first: int, last: int) -> Array:
        """See TensorReader."""
        shape = self._shards.entry(name).shape
        row = prod(shape[1:])
        return self._values(name, first * row, (last - first) * row).reshape(-1, *shape[1:])

    def prefetch(self, names: Sequence[str]) -> None:
        """See TensorReader. Nothing is stored."""

    def _values(self, name: str, at: int, count: int) -> Array:
        shape = self._shards.entry(name).shape
        centre, spread = _distribution(name, shape, self._drafter)
        table = _table(centre, spread)
        start = (zlib.crc32(name.encode()) + at) % PERIOD
        if start + count <= PERIOD:
            return table[start : start + count]
        return np.tile(table, -(-(start + count) // PERIOD))[start : start + count]


def _distribution(name: str, shape: tuple[int, ...], drafter: bool) -> tuple[float, float]:
    """Return mean and standard deviation of a tensor's numbers: with these, rows keep their size
    from layer to layer, and a state forgets within some tokens.
    """
    if name.endswith(("A_log", "dt_bias")):
        return 0.0, 0.5
    if name.endswith("norm.weight") or "layernorm" in name:
        # A target's norms multiply by 1 + w, except the one after GDN.
        return float(drafter or "linear_attn" in name), 0.1
    if name.endswith(("conv1d.weight", "base_kernel")):
        return 0.0, 0.3
    return 0.0, 0.02 if len(shape) < 2 or "embed" in name else shape[1] ** -0.5


@cache
def _table(centre: float, spread: float) -> Array:
    """PERIOD numbers in BF16."""
    numbers = np.random.default_rng(0).standard_normal(PERIOD, np.float32)
    return (numbers * np.float32(spread) + np.float32(centre)).astype(DType.BF16.numpy)
