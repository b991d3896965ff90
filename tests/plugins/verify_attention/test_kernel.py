"""verify_attention's kernels on the emulator: a row's result must not depend on its block."""

from __future__ import annotations

import numpy as np
import pytest
from emulator import runner
from emulator.compiler import COMPILER
from emulator.runner import Emulator
from support.coverings import pairwise, some
from support.gated_attention import entering, gated_call
from support.kernel_runner import Call, call_of, compare, launch
from support.op_cases import OpCase
from support.verify_attention_cases import alone, case_of, without_risers

from thor_dflash.core.tensors import Array, DType
from thor_dflash.plugins.launch import H100, THOR, Device
from thor_dflash.plugins.verify_attention import OP
from thor_dflash.plugins.verify_attention.launch import SPLIT_ROWS, slots

BF16, FP8, F32 = DType.BF16, DType.FP8, DType.F32
CACHES = pytest.mark.parametrize("cache", [FP8, BF16], ids=lambda c: c.value)
emulated = pytest.mark.skipif(COMPILER is None, reason="needs g++ (Debian package g++)")
FEW = Device((9, 0), 3)
"""So few multiprocessors that every thread block takes several pieces of the cache."""


def later(case: OpCase, whole: dict[str, Array], start: int, stop: int) -> OpCase:
    """A call of rows start .. stop - 1 of a case, with the rows before them committed to the cache.
    `whole`: outputs of the case.
    """
    length = int(case.inputs["length"][0]) + start
    x = dict(case.inputs) | {name: case.inputs[name][start:stop] for name in "qkv"}
    x["length"] = np.array([length], np.int32)
    for name in ("cache_k", "cache_v"):
        x[name] = whole[f"next_{name}"].copy()
        x[name][:, length:] = np.nan
    return OpCase(case.name, x, case.attributes)


def bits(x: Array) -> Array:
    return np.ascontiguousarray(x).view(np.uint8)


def run(
    case: OpCase, seed: int = 0, device: Device = THOR, nearest: bool = True
) -> tuple[Call, dict[str, Array]]:
    call = call_of(OP, case)
    got = launch(call, Emulator(seed), device)
    compare(OP, got, call.want, nearest)
    return call, got


def same_rows(case: OpCase, parts: list[tuple[int, int]]) -> None:
    """Check that rows have the same bits in calls of their own as in the case."""
    _, whole = run(case)
    length = int(case.inputs["length"][0])
    for seed, (start, stop) in enumerate(parts):
        _, got = run(later(case, whole, start, stop), seed, (FEW, H100)[seed % 2])
        np.testing.assert_array_equal(bits(got["o"]), bits(whole["o"][start:stop]))
        for name in ("next_cache_k", "next_cache_v"):
            rows = slice(length + start, length + stop)
            np.testing.assert_array_equal(bits(got[name][:, rows]), bits(whole[name][:, rows]))


@emulated
@pairwise(quick=1, length=[120, 0, 100, 128, 4070, 4208], cache=[FP8, BF16])
def test_a_row_does_not_depend_on_where_its_block_began(length: int, cache: DType) -> None:
    case = case_of(32, length, cache, length // 128 * 128 + 256, heads=2)
    same_rows(case, [(0, 1), (0, 16), (3, 8), (10, 32), (27, 28), (31, 32)])


@emulated
@pytest.mark.parametrize("cache", some([FP8, BF16], [FP8]), ids=lambda c: c.value)
def test_a_prompt_row_does_not_depend_on_its_chunk(cache: DType) -> None:
    case = case_of(100, 90, cache, 256)
    same_rows(case, [(0, SPLIT_ROWS + 1), (7, 60), (50, 100)])


@emulated
def test_a_prompt_is_written_behind_three_tiles() -> None:
    """Both kernels of a prompt, against the reference."""
    run(case_of(SPLIT_ROWS + 1, 370, FP8, 512, heads=2))


@emulated
@pytest.mark.emulator
@pytest.mark.parametrize("device", [FEW, THOR, H100], ids=lambda d: str(d.multiprocessors))
def test_bits_do_not_depend_on_which_block_takes_a_piece(device: Device) -> None:
    case = case_of(16, 4600, FP8, 4864, heads=2)
    _, want = run(case, 0, H100)
    for seed in (1, 2):
        _, got = run(case, seed, device)
        np.testing.assert_array_equal(bits(got["o"]), bits(want["o"]))


@emulated
@CACHES
def test_a_row_does_not_depend_on_the_content_of_later_rows(cache: DType) -> None:
    case = case_of(16, 118, cache, 256)
    _, want = run(case)
    x = dict(case.inputs) | {n: case.inputs[n].copy() for n in "qkv"}
    for name in "qkv":
        x[name][9:] = np.asarray(100 * x[name][9:], BF16.numpy)
    _, got = run(OpCase("other rows", x, case.attributes))
    np.testing.assert_array_equal(bits(got["o"][:9]), bits(want["o"][:9]))


@emulated
def test_fp8_rows_saturate() -> None:
    case = case_of(16, 120, FP8, 256)
    x = dict(case.inputs) | {"v": (case.inputs["v"] * 1000).astype(BF16.numpy)}
    x["v"][0, :2] = np.inf, -np.inf
    call, got = run(OpCase("large", x, case.attributes))
    fresh = got["next_cache_v"][:, 120:136].astype(np.float32)
    assert np.abs(fresh).max() == 448
    np.testing.assert_array_equal(fresh, call.want["next_cache_v"][:, 120:136].astype(np.float32))


@emulated
@pairwise(quick=1, rows=[16, SPLIT_ROWS + 1], cache=[FP8, BF16])
def test_a_row_rescales_by_its_own_scores(rows: int, cache: DType) -> None:
    """Whether any row moves its base is asked for all rows of a half of the heads at once. Rows
    that do not move theirs, or would move it alone, must not change if another row moves.
    """
    case = alone(rows, cache)
    quiet, others = without_risers(case)
    (_, got), (_, want) = (run(x, 0, FEW, nearest=False) for x in (case, quiet))
    by_row = [bits(x["o"].reshape(rows, 6, 256))[others] for x in (got, want)]
    np.testing.assert_array_equal(*by_row)


@emulated
@pairwise(quick=1, rows=[1, 16, 32], cache=[FP8, BF16])
def test_rows_can_be_left_gated_for_the_next_product(rows: int, cache: DType) -> None:
    """The slabs equal those of a separate launch that gates the rows."""
    case = case_of(rows, 120, cache, 256, heads=4, kv=2)
    call = gated_call(case)
    got = launch(call, Emulator(rows), THOR)
    compare(OP, got, call.want)
    made = entering(got["o"], call.inputs["next_gate"], Emulator())
    np.testing.assert_array_equal(bits(got["y0_slabs"]), bits(made))
    _, alone = run(case)
    np.testing.assert_array_equal(bits(got["o"]), bits(alone["o"]))


# ---- parts by themselves -------------------------------------------------------------------------
def probe(kernel: str, *arrays: Array) -> None:
    """Run a kernel of attention_probes.cu, with a thread for each element of the last array's first
    axis.
    """
    blocks, rest = divmod(len(arrays[-1]), 32)
    assert rest == 0
    defines = {"FP8": 1, "NORM_F32": 0, "HALF": 32}
    runner.probe("attention_probes.cu", kernel, *arrays, blocks=blocks, **defines)


@emulated
def test_angles_are_accurate_up_to_the_farthest_position() -> None:
    near, far = np.linspace(0, 20, 2000), np.random.default_rng(1).uniform(0, 2**18, 2000)
    turns = np.arange(96) * np.pi / 4
    x = np.concatenate([near, far, turns]).astype(np.float32)
    got = np.zeros((len(x), 2), np.float32)
    probe("angles_of", x, got)
    want = np.stack([np.cos(x.astype(np.float64)), np.sin(x.astype(np.float64))], axis=1)
    assert np.abs(got - want).max() < 2**-22


def blocks_near_borders() -> Array:
    """First position and end of blocks of rows: at the cache's begin, and before, across, at and
    after each position where pieces become longer.
    """
    borders = np.arange(0, 262_144, 4224)[:, None, None]
    before, rows = np.array([0, 1, 7, 15, 16])[:, None], np.array([1, 2, 15, 16])
    first, end = borders - before + 0 * rows, borders - before + rows
    found = np.stack([first.ravel(), end.ravel()], axis=1)
    return found[found[:, 0] >= 0].astype(np.int32)


@emulated
def test_pieces_hold_each_position_that_a_row_sees_once() -> None:
    """A block of rows makes the pieces of each of its rows, no others, and all in different slots,
    of which there are as many as `slots` says for a cache that ends with the block.
    """
    rows = blocks_near_borders()
    rows = rows[: len(rows) // 32 * 32]
    got = np.full((len(rows), 1 + 3 * 99), -1, np.int32)
    probe("cuts", rows, got)
    for (first, end), (count, *spans) in zip(rows.tolist(), got.tolist(), strict=True):
        have = {tuple(spans[3 * i : 3 * i + 3]) for i in range(count)}
        want = set()
        for length in {128 * (at // 4224 + 1) for at in (first, end - 1)}:
            last = min(end, 33 * length)  # end of what the last row with pieces of this length sees
            for n in range(-(-last // length)):
                slot = n + 33 * (length // 128 % 2 == 0)
                want.add((n * length, min((n + 1) * length, end), slot))
        assert (have, count) == (want, len(want)), (first, end)
        assert max(slot for _, _, slot in have) < slots(-(-end // 128) * 128)


@emulated
@pairwise(quick=1, length=[115, 250, 20, 130, 180, 230], cache=[FP8, BF16])
def test_bits_do_not_depend_on_whether_blocks_share_a_piece(length: int, cache: DType) -> None:
    """One to six thread blocks, of up to three pieces."""
    case = case_of(16, length, cache, 384, heads=2)
    _, want = run(case, 0, Device((9, 0), 1))
    for blocks in range(2, 7):
        _, got = run(case, blocks, Device((9, 0), blocks))
        for name in ("o", "next_cache_k", "next_cache_v"):
            np.testing.assert_array_equal(bits(got[name]), bits(want[name]))
