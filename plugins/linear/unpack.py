"""Converts packed weights back to the contract's form, to compare kernels with the reference.

The inverse of pack.py except for what packing drops: the codes of a block whose scale is zero
become zero, and the sign of a zero scale is lost.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from thor_dflash.core.tensors import Array, DType
from thor_dflash.plugins.launch import CallSite
from thor_dflash.plugins.linear import pack
from thor_dflash.plugins.linear.layout import (
    NARROW_IN_TILE,
    SLOT_WEIGHTS,
    STRIP,
    TILE,
    PackedLayout,
    TileGroup,
    WeightKind,
    layout,
)

_DTYPE = {WeightKind.NVFP4: DType.U8, WeightKind.FP8: DType.FP8, WeightKind.BF16: DType.BF16}


def unpack(site: CallSite, packed: Array, scales: Array) -> dict[str, Array]:
    """Returns weight# [N#, C#], and block_scale# and row_scale# if the kind has them.

    `packed` uint8 [bytes] and `scales` float32 [packed columns] are as `pack` makes them for
    `site`.
    """
    plan = layout(site)
    out = _empty(plan)
    for group in plan.groups:
        size = plan.steps * group.step_bytes
        shape = (plan.steps, group.tiles, 2, group.kind.slots * group.kind.slot_bytes)
        blocks = packed[group.offset : group.offset + size].reshape(shape)
        factor = pack.NVFP4_FACTOR if group.kind is WeightKind.NVFP4 else np.float32(1)
        for tile in range(group.tiles):
            first = group.column + tile * TILE
            parts = _tile(plan, group, np.ascontiguousarray(blocks[:, tile]))
            parts["row_scale"] = scales[first : first + TILE] / factor
            _place(plan, first, parts, out)
    return {name: value for name, value in out.items() if value.size}


def _empty(plan: PackedLayout) -> dict[str, Array]:
    out: dict[str, Array] = {}
    for i, (kind, width) in enumerate(zip(plan.kinds, plan.widths, strict=True)):
        columns = plan.k // 2 if kind is WeightKind.NVFP4 else plan.k
        out[f"weight{i}"] = np.empty((width, columns), _DTYPE[kind].numpy)
        if kind is WeightKind.NVFP4:
            out[f"block_scale{i}"] = np.empty((width, plan.k // 16), DType.FP8.numpy)
        if kind is not WeightKind.BF16:
            out[f"row_scale{i}"] = np.empty(width, np.float32)
    return out


def _place(
    plan: PackedLayout, first: int, parts: Mapping[str, Array], out: Mapping[str, Array]
) -> None:
    """Copies 64 packed columns, strip by strip, to the rows of their segments."""
    for i in range(TILE // STRIP):
        strip = plan.strips[first // STRIP + i]
        if strip is None:
            continue
        for port, rows in parts.items():
            if (to := out.get(f"{port}{strip.segment}")) is not None:
                part = to[strip.column : strip.column + STRIP]
                found = rows[i * STRIP : i * STRIP + len(part)]
                part[...] = found[:, : part.shape[1]] if part.ndim == 2 else found


def _tile(plan: PackedLayout, group: TileGroup, blocks: Array) -> dict[str, Array]:
    """[steps, 2, bytes] -> weight [64, ...] and, for NVFP4, block_scale [64, K/16]; K is padded to
    whole steps.
    """
    if group.narrow:
        return _narrow(blocks)
    if group.kind is WeightKind.NVFP4:
        codes = _codes(np.ascontiguousarray(blocks[:, :, :SLOT_WEIGHTS]).view(np.uint32))
        return {"weight": codes, "block_scale": _block_scales(blocks[:, :, SLOT_WEIGHTS:])}
    if group.kind is WeightKind.FP8:
        pairs = blocks.view(np.uint16).reshape(-1, 2, 8, 4, 4, 2)  # [k16, half, g, t, strip, b]
        rows = np.ascontiguousarray(pairs.transpose(1, 4, 2, 0, 5, 3)).view(np.uint8)
        return {"weight": rows.reshape(TILE, -1).view(DType.FP8.numpy)}
    wide = blocks.view(np.uint32).reshape(-1, 4, 8, 4, 2, 2)  # [k16, quarter, g, t, strip, b]
    turned = np.ascontiguousarray(wide.transpose(1, 4, 2, 0, 5, 3)).view(np.uint16)
    return {"weight": turned.reshape(TILE, -1).view(DType.BF16.numpy)}


def _narrow(blocks: Array) -> dict[str, Array]:
    """The same for an n-tile stored as four narrow tiles, [steps, 2, 4 * (512 + 64)]."""
    cut = SLOT_WEIGHTS // NARROW_IN_TILE // 4
    words = blocks.view(np.uint32).reshape(-1, NARROW_IN_TILE, cut + 16)  # of half a step
    by_tile = words[..., :cut].reshape(-1, NARROW_IN_TILE, 4, 32).transpose(0, 2, 3, 1)
    scales = words[..., cut:].reshape(-1, NARROW_IN_TILE, 8, 2)
    # [tile, strip of the tile, g, half step, k16 / 2, k16 % 2], from bytes [k16 % 2, strip]
    e = _scale_bytes(scales).reshape(2, 2, *scales.shape).transpose(3, 1, 4, 2, 5, 0)
    return {
        "weight": _codes(np.ascontiguousarray(by_tile)),
        "block_scale": np.ascontiguousarray(e).reshape(TILE, -1).view(DType.FP8.numpy),
    }


def _codes(words: Array) -> Array:
    """uint32 [steps, 2, 512] -> codes [64, K/2]; the inverse of pack's `_words`."""
    turned = words.reshape(-1, 8, 4, 4)  # [k16, g, t, j]
    q = [_unpermute(np.ascontiguousarray(turned[:, :, t])) for t in range(4)]
    pack.transpose_bytes(q)
    quads = np.empty((4, 2, 8, len(turned), 2), np.uint32)
    for i, (p, b) in enumerate((p, b) for p in (0, 1) for b in (0, 1)):
        quads[:, p, :, :, b] = q[i].transpose(2, 1, 0)
    return quads.reshape(TILE, -1).view(np.uint8)


def _unpermute(x: Array) -> Array:
    """The inverse of `pack.permute`."""
    word = np.zeros_like(x)
    for to, place in enumerate(_PLACES):
        word |= ((x >> np.uint32(place)) & np.uint32(1)) << np.uint32(to)
    return word


_PLACES = [
    int(bit).bit_length() - 1
    for bit in pack.permute(np.uint32(1) << np.arange(32, dtype=np.uint32))
]
"""The bit position to which `pack.permute` moves each bit."""


def _block_scales(blocks: Array) -> Array:
    """[steps, 2, 256] -> fp8 [64, K/16]."""
    words = np.ascontiguousarray(blocks).view(np.uint32).reshape(-1, 2, 8, 4, 2)
    word = words.transpose(0, 1, 3, 2, 4).reshape(-1, 8, 2).transpose(2, 1, 0)  # [half, g, block]
    stored = np.ascontiguousarray(_scale_bytes(word).swapaxes(0, 1))
    return stored.reshape(TILE, -1).view(DType.FP8.numpy)


def _scale_bytes(word: Array) -> Array:
    """Words of four scales -> E4M3 bytes [4, ...]; the first axis is the position in the word."""
    e = [(word >> np.uint32(shift)) & np.uint32(0xFF) for shift in (4, 20, 12)]
    e.append((word >> np.uint32(28)) | ((word & np.uint32(15)) << np.uint32(4)))
    byte = np.zeros(256, np.uint8)
    known = np.arange(1, pack.LARGEST_SCALE + 1)
    byte[pack.SPREAD[0][known] >> 4] = known
    return byte[np.stack(e)]
