"""Packs weights into the form that the kernels read; done once, when a package is built.

The words of a slot are in the order in which the lanes of a warp load them, as fragments of
16 x 8 matrix products: packed_weight.cuh describes the bits, layout.py the offsets.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from thor_dflash.core.tensors import Array, DType
from thor_dflash.plugins.launch import CallSite, Shaped
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

NVFP4_FACTOR = np.float32(2.0**45)
"""NVFP4: the true weight divided by the value that the kernel decodes from code and scale byte."""

LARGEST_SCALE = 0x7E
_BLOCK = 16


def packed(site: CallSite) -> dict[str, Shaped]:
    """Returns the ports that replace a call's weights.

    `packed` uint8 [bytes]; `scales` float32 [packed columns]; `kinds`, an array without bytes whose
    shape tells a launch rule the kinds: an axis of 0, then for each segment an axis of length
    1 + its Kind.
    """
    plan = layout(site)
    return {
        "packed": Shaped(DType.U8, (plan.nbytes,)),
        "scales": Shaped(DType.F32, (plan.columns,)),
        "kinds": Shaped(DType.U8, (0, *(kind + 1 for kind in plan.kinds))),
    }


def pack(site: CallSite, arrays: Mapping[str, Array]) -> dict[str, Array]:
    """Returns the ports of `packed`, made from the contract's weight# [N#, C#],
    block_scale# [N#, K/16] and row_scale# [N#].

    Raises:
        ValueError: a block scale is NaN or negative, or an FP8 weight is NaN.
    """
    plan = layout(site)
    out = np.empty(plan.nbytes, np.uint8)
    for group in plan.groups:
        size = plan.steps * group.step_bytes
        shape = (plan.steps, group.tiles, 2, group.kind.slots * group.kind.slot_bytes)
        blocks = out[group.offset : group.offset + size].reshape(shape)
        for tile in range(group.tiles):
            _pack_tile(plan, group, tile, arrays, blocks[:, tile])
    return {
        "packed": out,
        "scales": _scales(plan, arrays),
        "kinds": np.zeros((0, *(kind + 1 for kind in plan.kinds)), np.uint8),
    }


def _pack_tile(
    plan: PackedLayout, group: TileGroup, tile: int, arrays: Mapping[str, Array], out: Array
) -> None:
    """Writes 64 packed columns to out[step, half of the step, bytes]."""
    first = group.column + tile * TILE
    k = plan.steps * 128
    if group.kind is WeightKind.NVFP4:
        scales = _rows(plan, first, "block_scale", k // _BLOCK, arrays)
        if (scales > LARGEST_SCALE).any():
            bad = int(scales[scales > LARGEST_SCALE][0])
            raise ValueError(f"block_scale must be a positive E4M3 number (got byte {bad:#x})")
        codes = _rows(plan, first, "weight", k // 2, arrays)
        (_narrow if group.narrow else _nvfp4)(codes, scales, out)
    elif group.kind is WeightKind.FP8:
        rows = _rows(plan, first, "weight", k, arrays)
        if ((rows & 0x7F) == 0x7F).any():
            raise ValueError("weight must be numbers (got an E4M3 NaN)")
        _fp8(rows, out)
    else:
        _bf16(_rows(plan, first, "weight", 2 * k, arrays), out)


def _rows(
    plan: PackedLayout, first: int, port: str, width: int, arrays: Mapping[str, Array]
) -> Array:
    """Returns 64 packed columns of a stored port as uint8 [64, width], padded with zeros."""
    rows = np.zeros((TILE, width), np.uint8)
    for i in range(TILE // STRIP):
        strip = plan.strips[first // STRIP + i]
        if strip is not None:
            stored = arrays[f"{port}{strip.segment}"][strip.column : strip.column + STRIP]
            flat = np.ascontiguousarray(stored).view(np.uint8).reshape(len(stored), -1)
            rows[i * STRIP : i * STRIP + len(flat), : flat.shape[1]] = flat
    return rows


def _scales(plan: PackedLayout, arrays: Mapping[str, Array]) -> Array:
    """Returns the factor by which each column's sum is multiplied, float32 [packed columns]."""
    scales = np.ones((len(plan.strips), STRIP), np.float32)
    for i, strip in enumerate(plan.strips):
        if strip is not None and (rows := arrays.get(f"row_scale{strip.segment}")) is not None:
            part = rows[strip.column : strip.column + STRIP]
            scales[i, : len(part)] = part
    for group in plan.groups:
        if group.kind is WeightKind.NVFP4:
            at = group.column // STRIP
            scales[at : at + group.tiles * TILE // STRIP] *= NVFP4_FACTOR
    return scales.reshape(-1)


# ---- NVFP4 -----------------------------------------------------------------------------------


def _scale_tables() -> Array:
    """uint32 [4, 256]: entry [i, b] is the E4M3 byte b as E5M3, shifted to the bits of position i
    in a word of scales.
    """
    byte = np.arange(256, dtype=np.uint8)
    value = byte.view(DType.FP8.numpy).astype(np.float32)
    usable = (byte > 0) & (byte <= LARGEST_SCALE)
    mantissa, exponent = np.frexp(np.where(usable, value, 1))
    code = ((exponent + 15) << 3) | (np.round(mantissa * 16).astype(np.int64) - 8)
    e = np.where(usable, code, 0).astype(np.uint32)
    spread = [e << 4, e << 20, ((e << 12) & 0xF000) | (e >> 4) << 16, (e << 28) | (e >> 4)]
    return np.stack(spread).astype(np.uint32)


SPREAD = _scale_tables()


def _nvfp4(codes: Array, scales: Array, out: Array) -> None:
    """codes [64, K/2], scales [64, K/16] -> out [steps, 2, 2304]."""
    _clear(codes, scales)
    out[:, :, :SLOT_WEIGHTS] = _words(codes).view(np.uint8).reshape(*out.shape[:2], SLOT_WEIGHTS)
    word = _scale_words(scales.reshape(2, 4, 8, -1).swapaxes(0, 1))  # [half, g, block]
    ordered = word.transpose(2, 1, 0).reshape(-1, 2, 4, 8, 2).transpose(0, 1, 3, 2, 4)
    out[:, :, SLOT_WEIGHTS:] = (
        np.ascontiguousarray(ordered).view(np.uint8).reshape(*out.shape[:2], 256)
    )


def _narrow(codes: Array, scales: Array, out: Array) -> None:
    """The same for an n-tile stored as four narrow tiles: out [steps, 2, 4 * (512 + 64)]."""
    _clear(codes, scales)
    quarters = out.reshape(*out.shape[:2], NARROW_IN_TILE, -1)
    words = _words(codes).reshape(-1, 2, 4, 32, NARROW_IN_TILE)  # [step, half, k16, lane, j]
    cut = SLOT_WEIGHTS // NARROW_IN_TILE
    quarters[..., :cut] = (
        np.ascontiguousarray(words.transpose(0, 1, 4, 2, 3))
        .view(np.uint8)
        .reshape(*quarters.shape[:3], cut)
    )
    # [k16 % 2, strip of the tile, tile, g, k16 / 2]
    turned = scales.reshape(NARROW_IN_TILE, 2, 8, -1, 2).transpose(4, 1, 0, 2, 3)
    word = _scale_words(turned.reshape(4, *turned.shape[2:]))
    ordered = word.reshape(NARROW_IN_TILE, 8, -1, 2, 2).transpose(2, 3, 0, 1, 4)
    quarters[..., cut:] = (
        np.ascontiguousarray(ordered).view(np.uint8).reshape(*quarters.shape[:3], -1)
    )


def _clear(codes: Array, scales: Array) -> None:
    """Zeroes the codes of blocks whose scale is zero, in place."""
    if (scales == 0).any():
        codes.reshape(*scales.shape, 8)[scales == 0] = 0


def _scale_words(scales: Array) -> Array:
    """E4M3 scales [4, ...], the first axis being the position in a word -> words [...]."""
    word: Array = np.take(SPREAD[0], scales[0])
    for i in range(1, 4):
        word |= np.take(SPREAD[i], scales[i])
    return word


def _words(codes: Array) -> Array:
    """codes [64, K/2] -> uint32 [k16, g, t, j], bits as in packed_weight.cuh."""
    # [j, p, g, k16, b], each of four bytes t: strip 2j + p, column g, k = 16 k16 + 8 b + 2 t
    quads = codes.view(np.uint32).reshape(4, 2, 8, -1, 2)
    k16 = quads.shape[3]
    turned = np.empty((k16, 8, 4, 4), np.uint32)
    parts = [(p, b) for p in (0, 1) for b in (0, 1)]
    q = [np.ascontiguousarray(quads[:, p, :, :, b].transpose(2, 1, 0)) for p, b in parts]
    transpose_bytes(q)
    for t in range(4):
        turned[:, :, t] = permute(q[t])
    return turned


def transpose_bytes(q: list[Array]) -> None:
    """Transposes four words of four bytes in place: byte j of word i <-> byte i of word j."""
    for a, b, shift, mask in (
        (0, 1, 8, 0x00FF00FF),
        (2, 3, 8, 0x00FF00FF),
        (0, 2, 16, 0x0000FFFF),
        (1, 3, 16, 0x0000FFFF),
    ):
        swap = q[a] >> np.uint32(shift)
        swap ^= q[b]
        swap &= np.uint32(mask)
        q[b] ^= swap
        swap <<= np.uint32(shift)
        q[a] ^= swap


def permute(x: Array) -> Array:
    """Permutes the bits of words into the stored order.

    A word has four bytes: strip 2j at low k, at high k, then strip 2j + 1 likewise. First the four
    nibbles of even k go to the low half and those of odd k to the high half; then the bits of both
    halves move alike, except for one sign bit that changes halves.
    """
    swap = x >> np.uint32(12)
    swap ^= x
    swap &= np.uint32(0x0000F0F0)
    x ^= swap
    swap <<= np.uint32(12)
    x ^= swap
    word: Array = x & np.uint32(_BITS[0][1])
    for shift, mask in _BITS[1:]:
        if shift > 0:
            np.left_shift(x, np.uint32(shift), out=swap)
        else:
            np.right_shift(x, np.uint32(-shift), out=swap)
        swap &= np.uint32(mask)
        word |= swap
    return word


_BITS = (
    (0, 0x80778077),  # fraction and exponent of b0 of both strips, sign of the last
    (6, 0x22002200),  # signs of b0
    (2, 0x5C005C00),
    (-6, 0x01800180),
    (8, 0x00080000),  # the sign that changes halves
    (-24, 0x00000008),
)
"""Pairs of a left shift and the mask of the result bits that it provides."""


# ---- FP8 and BF16 ----------------------------------------------------------------------------


def _fp8(rows: Array, out: Array) -> None:
    """rows [64, K] -> out [steps, 2, 4096]: [k32][k16][half the strips][g][t][strip][b] pairs."""
    pairs = rows.view(np.uint16).reshape(2, 4, 8, -1, 2, 4)  # [half, strip, g, k16, b, t]
    out[...] = (
        np.ascontiguousarray(pairs.transpose(3, 0, 2, 5, 1, 4)).view(np.uint8).reshape(out.shape)
    )


def _bf16(rows: Array, out: Array) -> None:
    """rows [64, 2 K] -> out [steps, 2, 4 * 2048]: [k16][quarter of the strips][g][t][strip][b]."""
    pairs = rows.view(np.uint32).reshape(4, 2, 8, -1, 2, 4)  # [quarter, strip, g, k16, b, t]
    out[...] = (
        np.ascontiguousarray(pairs.transpose(3, 0, 2, 5, 1, 4)).view(np.uint8).reshape(out.shape)
    )
