"""Launches that create a random model in device memory: packed weights, without a file.

Every launch writes the port `to`; element i depends only on the seed and i, so that two devices
get the same model. Values are nearly normal (the sum of four uniform bytes) and within 3.5 standard
deviations; NVFP4 codes are uniform.
"""

from __future__ import annotations

from thor_dflash.plugins.launch import Device, Int, Launch, Pointer, Real
from thor_dflash.plugins.linear.layout import NARROW_IN_TILE, WeightKind

NVFP4_SLOT = WeightKind.NVFP4.slot_bytes
"""Bytes of the unit that `nvfp4` writes."""
NARROW_SLOT = NVFP4_SLOT // NARROW_IN_TILE
"""The same for narrow tiles."""

NVFP4_DEVIATION = 2.1445
"""Standard deviation of the weights that `nvfp4` writes, before the column's float32 scale: uniform
E2M1 codes (root mean square 2.9262) times block scales of (8 .. 15) / 16 (0.7329)."""

THREADS = 256
BLOCKS_PER_MULTIPROCESSOR = 8
LARGEST = 2**31 - 1
"""Most elements of one launch."""


def _launch(kernel: str, device: Device, count: int, seed: int, *more: Int | Real) -> Launch:
    assert 0 < count <= LARGEST, count
    return Launch(
        kernel,
        (device.multiprocessors * BLOCKS_PER_MULTIPROCESSOR, 1, 1),
        THREADS,
        (Pointer("to"), Int(count), Int(seed), *more),
        source="fill.cu",
    )


def nvfp4(device: Device, nbytes: int, seed: int, slot: int = NVFP4_SLOT) -> Launch:
    """Fills `nbytes`, a multiple of `slot`, with packed NVFP4 weights and their block scales."""
    assert nbytes % slot == 0, nbytes
    return _launch("fill_nvfp4", device, nbytes // slot, seed, Int(slot))


def fp8(device: Device, nbytes: int, seed: int) -> Launch:
    """Fills `nbytes`, a multiple of 4, with E4M3 weights."""
    assert nbytes % 4 == 0, nbytes
    return _launch("fill_fp8", device, nbytes // 4, seed)


def bf16(device: Device, count: int, seed: int, mean: float, deviation: float) -> Launch:
    """Writes `count` bfloat16 values; `deviation` 0 gives a constant. `to` is 16-byte aligned."""
    return _launch("fill_bf16", device, count, seed, Real(mean), Real(deviation))


def f32(device: Device, count: int, seed: int, mean: float, deviation: float) -> Launch:
    """Writes `count` float32 values; `deviation` 0 gives a constant."""
    return _launch("fill_f32", device, count, seed, Real(mean), Real(deviation))
