"""Launches of a product with at most 32 rows: the rows of a verify or draft block, or one token."""

from __future__ import annotations

from dataclasses import asdict, astuple, dataclass
from enum import IntEnum
from functools import lru_cache

import numpy as np

from thor_dflash.core.tensors import Array, DType
from thor_dflash.plugins.launch import (
    MOST_PREFETCHED,
    PREFETCHED,
    ActiveClusters,
    Argument,
    CallSite,
    Choice,
    Device,
    Int,
    Launch,
    Pointer,
    PointerTable,
    Real,
    Table,
)
from thor_dflash.plugins.linear.layout import (
    KIND_OF,
    NARROW_IN_TILE,
    PackedLayout,
    WeightKind,
    layout,
    segments,
)
from thor_dflash.plugins.linear.partition import (
    OFFSET_UNIT,
    SLIM,
    WARPS,
    CutChoice,
    Partition,
    cut_by,
    cut_candidates,
    first_tiles,
    halves,
    lanes,
    partition,
)
from thor_dflash.plugins.linear.prologue_launch import SLAB, padded, prepared

MOST_ROWS = 32
SQUARES_COLUMNS = 32
"""Columns that one sum of squares covers."""
SQUARES_ROWS = 32
"""Most rows for which sums of squares are made."""
HEAD_COLUMNS = 128
"""Width of the heads whose factors 1 / rms may be applied to sums; as in activation_slabs.cuh."""
HEAD_PIECES = 8
"""Sums of squares of a row and head, each over 16 neighbouring columns (activation_slabs.cuh)."""
TILE_ROWS = 16
_SLABS = {WARPS: 4, SLIM: 2}
"""Slabs of a stage, by warps of a block."""
_HEAD_SLABS = 2
"""The same if rows come without the factors of their heads: one head of a step of K."""
_PLACE = 2048
"""Bytes of a warp's sums for half an n-tile and 16 rows. With 32 rows a warp has as many sums, of
half the columns."""
_NARROW = 2, WeightKind.NVFP4.slot_bytes // NARROW_IN_TILE, 8 * 1024
"""If items may have a narrow tile: slabs of a stage, bytes of the narrow slot for each slab, bytes
of the tile's sums. There are fewer slabs to make operator for it, since two blocks must fit on a
multiprocessor."""
_SIDE = 256
"""Barriers and row scales, bytes."""
_STAGED = 288
"""Bytes a warp needs in the epilogue of an item, as STAGED_BYTES in epilogue_tiles.cuh."""


class Epilogue(IntEnum):
    """As EPILOGUE in epilogue.cuh."""

    NONE = 0
    SWIGLU = 1
    RESIDUAL = 2
    LOGITS = 3
    GELU_TANH = 4
    GELU_ERF = 5


@dataclass(frozen=True, slots=True)
class FusedEpilogue:
    """The epilogue of the product, and the ports of its results."""

    epilogue: Epilogue
    outputs: tuple[str, ...]
    folder: str = ""
    """Path of linear's sources, relative to the operator's own folder."""


def takes_heads(site: CallSite) -> bool:
    """Whether the product can take rows in `x_slabs` that still lack the factor 1 / rms of each
    head, with `x_squares` as head_squares says. Weights may be stored or packed.
    """
    a, ports = site.attributes, site.ports
    fits = a.integer("head_dim") == HEAD_COLUMNS and a.word("epilogue") != "swiglu"
    if "weight0" not in site:
        return fits and set(segments(site)[0]) == {WeightKind.NVFP4}
    weights = (ports[f"weight{i}"].dtype for i in range(a.integer("segments")))
    return fits and all(KIND_OF.get(dtype) is WeightKind.NVFP4 for dtype in weights)


def row_squares(columns: int) -> tuple[int, int]:
    """Returns the shape of float32 sums of squares of rows: [SQUARES_COLUMNS columns, row]."""
    return -(-columns // SQUARES_COLUMNS), SQUARES_ROWS


def head_squares(heads: int) -> tuple[int, int, int]:
    """Returns the shape of float32 sums of squares by head: [head, row, piece of the head]."""
    return heads, SQUARES_ROWS, HEAD_PIECES


def decode_launches(site: CallSite, device: Device, fused: FusedEpilogue) -> tuple[Launch, ...]:
    """Returns the launch of the product, preceded by the prologue unless the call receives prepared
    rows in `x_slabs`. These are already gated if the call has a gate. If it has a norm, they lack
    only the factor 1 / rms of the row, which the epilogue applies, or of each head of it, which is
    applied to sums (head_norm.cuh); either is computed from `x_squares`.
    """
    if "x_slabs" in site:
        return (_product(site, device, fused, Pointer("x_slabs")),)
    rows, before = prepared(site, fused.folder, slabs=True)
    return (*before, _product(site, device, fused, rows))


def slabs(rows: int, columns: int) -> tuple[int, int, int]:
    """Returns the shape of a product's bf16 input rows: [slab, row, column of the slab]."""
    return padded(columns) // SLAB, rows, SLAB


def _product(site: CallSite, device: Device, fused: FusedEpilogue, rows: Argument) -> Launch:
    plan = layout(site)
    count = site.size("x", 0)
    tiles = -(-count // TILE_ROWS)
    cut = _cut(site, device)
    ahead = first_read(site.following, device)
    first = first_tiles(plan, cut)
    return Launch(
        kernel="linear",
        source=f"{fused.folder}decode.cu",
        grid=(cut.parts * len(cut.clusters), 1, 1),
        threads=32 * (cut.warps + 1),
        arguments=(
            Pointer("packed"),
            Pointer("scales"),
            rows,
            Pointer("x_squares"),
            Pointer("residual"),
            PointerTable(fused.outputs),
            Pointer("y0_squares"),
            Pointer("y0_slabs"),
            Pointer("next_norm_weight"),
            Table(cut.item_table()),
            Table(strip_table(plan)),
            Int(cut.most_items),
            *(Int(value) for value in astuple(first)),
            Int(count),
            Real(site.attributes.real("norm_eps")),
            Real(_next_offset(site)),
            Pointer(PREFETCHED),
            Table(ahead if len(ahead) else np.zeros((1, 2), np.int32)),
            Int(len(ahead)),
        ),
        shared=_shared(tiles, plan, cut),
        defines={
            "K_SIZE": plan.k,
            "WARPS": cut.warps,
            "ROW_TILES": tiles,
            "FULL": int(count == tiles * TILE_ROWS),
            "KINDS": sum(1 << kind for kind in set(plan.kinds)),
            "ROW_SCALE": int(_unscaled(site) and not cut.by_head),
            "HEAD_SCALE": int(cut.by_head),
            "EPILOGUE": int(fused.epilogue),
            "NEXT": _next(site),
            "PARTS": cut.parts,
            "MANY": int(cut.most_items > 1),
            "TILES": cut.tiles,
            "LANES": max(lanes(plan, i.piece, cut) for items in cut.clusters for i in items),
            "NARROW": int(bool(plan.narrow)),
            "LOADED": _loaded(first.loaded, len(cut.clusters)),
        },
        cluster=cut.parts,
    )


def _unscaled(site: CallSite) -> bool:
    """Whether the call receives rows that lack a factor 1 / rms."""
    return "x_slabs" in site and "x_squares" in site


def _by_head(site: CallSite) -> bool:
    """Whether it receives rows that lack the factors 1 / rms of their heads."""
    return _unscaled(site) and bool(site.attributes.values.get("head_dim", 0))


def _cut(site: CallSite, device: Device) -> Partition:
    by_head = _by_head(site)
    if choice := device.choice(site):
        return cut_by(layout(site), CutChoice(**choice), by_head=by_head)
    return partition(layout(site), device.multiprocessors, by_head=by_head)


def decode_candidates(
    site: CallSite, device: Device, active: ActiveClusters | None, fused: FusedEpilogue
) -> tuple[Choice, ...]:
    """Returns the `Candidates` of a product with few rows: cuts of its columns and of K."""

    def count(choice: CutChoice) -> int:
        assert active is not None
        chosen = device.choosing(site, asdict(choice))
        return active(_product(site, chosen, fused, Pointer("x_slabs")))

    plan, by_head = layout(site), _by_head(site)
    counted = count if active else None
    cuts = cut_candidates(plan, device.multiprocessors, counted, by_head=by_head)
    return tuple(asdict(choice) for choice in cuts)


def _loaded(count: int, clusters: int) -> int:
    """Which clusters load their first item, as LOADED in pipeline.cuh: none, some or all."""
    return 0 if count == 0 else 1 if count < clusters else 2


def first_read(site: CallSite | None, device: Device) -> Array:
    """Returns what a product reads first of its packed weight, int32 [pieces, 2], offset and size
    in units of 512 bytes: for each block of a cluster, the first step of all columns. Empty if the
    product is not known or if this is more than MOST_AHEAD bytes.
    """
    if site is None:
        return np.zeros((0, 2), np.int32)
    plan = layout(site)
    runs = halves(plan, _cut(site, device).parts)
    pieces = [
        (group.offset + run.start // 2 * group.step_bytes, group.step_bytes)
        for run in runs
        for group in plan.groups
        if run
    ]
    if sum(size for _, size in pieces) > MOST_PREFETCHED:
        pieces = []
    return (np.array(pieces, np.int64).reshape(-1, 2) // OFFSET_UNIT).astype(np.int32)


def _shared(tiles: int, plan: PackedLayout, cut: Partition) -> int:
    narrow = bool(plan.narrow)
    slabs, slot, sums = _NARROW if narrow else (_SLABS[cut.warps], 0, 0)
    factors = 0
    if cut.by_head:
        slabs, factors = _HEAD_SLABS, -(-plan.steps // cut.parts) * tiles * TILE_ROWS * 4
    stage = cut.warps * WeightKind.NVFP4.slot_bytes + slabs * (TILE_ROWS * tiles * 2 * SLAB + slot)
    reduction = 2 * max(cut.warps, cut.parts) * _PLACE + sums
    stages = 2 if tiles > 1 else 3
    staged = cut.warps + (tiles if narrow and tiles > 1 else 0)
    return stages * stage + reduction + _SIDE + staged * _STAGED + factors


def _next(site: CallSite) -> int:
    """In which form the call leaves its rows for the next product, as NEXT in epilogue.cuh."""
    if "y0_slabs" not in site:
        return 0
    if "next_norm_weight" not in site:
        return 3
    return 2 if site.ports["next_norm_weight"].dtype is DType.F32 else 1


def _next_offset(site: CallSite) -> float:
    values = site.attributes.values
    return site.attributes.real("next_norm_offset") if "next_norm_offset" in values else 0.0


@lru_cache(maxsize=256)
def strip_table(plan: PackedLayout) -> Array:
    """int32 [packed columns / 8, 2]: segment << 24 | column, or -1 for padding; segment width."""
    return np.array(
        [
            (-1, 0) if s is None else (s.segment << 24 | s.column, plan.widths[s.segment])
            for s in plan.strips
        ],
        np.int32,
    )
