"""The launches that fill memory with a random model, on the emulator."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import pytest
from support.one_launch import execute

from thor_dflash.core.tensors import Array, DType
from thor_dflash.plugins import LINEAR
from thor_dflash.plugins.launch import H100, THOR, CallSite, Device, Launch, Shaped
from thor_dflash.plugins.linear.pack import pack
from thor_dflash.plugins.standard import fill

BF16 = DType.BF16.numpy


def filled(one: Launch, size: int, seed: int = 0) -> Array:
    """uint8 [size]: what the launch writes."""
    out = {"to": np.empty(size, np.uint8)}
    execute(one, {}, out, seed)
    return out["to"]


def scale_bytes(slots: Array) -> Array:
    """uint8 [n * 256]: the scales of slots [n, 2304], in the order in which they are stored."""
    words = np.ascontiguousarray(slots[:, 2048:]).view(np.uint32)
    return (words << np.uint32(28) | words >> np.uint32(4)).view(np.uint8).reshape(-1)


def test_filled_scales_are_those_that_packing_stores() -> None:
    known: set[int] = set()
    for eighth in range(8, 16):
        scale = np.full((64, 8), eighth / 16, np.float32).astype(DType.FP8.numpy)
        arrays = {
            "weight0": np.full((64, 64), 0x11, np.uint8),
            "block_scale0": scale,
            "row_scale0": np.ones(64, np.float32),
        }
        ports = {n: Shaped(DType.of(x), x.shape) for n, x in arrays.items()}
        ports["x"] = Shaped(DType.BF16, (1, 128))
        stored = pack(CallSite(LINEAR, LINEAR.complete({}), ports), arrays)["packed"]
        known.update(scale_bytes(stored.reshape(-1, fill.NVFP4_SLOT)).tolist())
    got = filled(fill.nvfp4(THOR, 40 * fill.NVFP4_SLOT, 5), 40 * fill.NVFP4_SLOT)
    assert set(scale_bytes(got.reshape(-1, fill.NVFP4_SLOT)).tolist()) == known
    assert len(known) == 8


@pytest.mark.parametrize("count", [1, 7, 8, 9, 300_011])
def test_filled_numbers_have_the_mean_and_deviation_asked_for(count: int) -> None:
    bf16 = filled(fill.bf16(THOR, count, 3, 2.0, 0.5), 2 * count).view(BF16).astype(np.float64)
    f32 = filled(fill.f32(THOR, count, 3, 2.0, 0.5), 4 * count).view(np.float32)
    constant = filled(fill.bf16(THOR, count, 3, 1.5, 0.0), 2 * count).view(BF16)
    np.testing.assert_allclose(bf16, f32, rtol=2.0**-8)
    assert (constant == 1.5).all()
    assert (abs(f32 - 2) < 1.75).all()
    if count > 1000:
        error = 5 * 0.5 / np.sqrt(count)
        assert abs(f32.mean() - 2) < error
        assert abs(f32.std() - 0.5) < error
        assert abs(np.corrcoef(f32[:-1], f32[1:])[0, 1]) < 5 / np.sqrt(count)


SLOT = fill.NVFP4_SLOT
FILLS: Mapping[str, tuple[Callable[[Device, int], Launch], int]] = {
    "nvfp4": (lambda on, seed: fill.nvfp4(on, 20 * SLOT, seed), 20 * SLOT),
    "fp8": (lambda on, seed: fill.fp8(on, 20_004, seed), 20_004),
    "bf16": (lambda on, seed: fill.bf16(on, 40_001, seed, 0.0, 1.0), 80_002),
    "f32": (lambda on, seed: fill.f32(on, 5_001, seed, 0.0, 1.0), 20_004),
}
"""Kind -> launch for a device and a seed, and the bytes that it writes. One multiprocessor needs
several passes for these.
"""
ONE = Device((9, 0), 1)


@pytest.mark.parametrize("kind", FILLS)
def test_what_is_filled_depends_on_the_seed_alone(kind: str) -> None:
    launch, size = FILLS[kind]
    first = filled(launch(H100, 1), size)
    np.testing.assert_array_equal(first, filled(launch(ONE, 1), size, seed=4))
    assert np.mean(first == filled(launch(H100, 2), size)) < 0.2
