"""verify_attention's kernels on the emulator: a row's result must not depend on its block."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from emulator import runner
from emulator.compiler import COMPILER, EmulatorFault
from emulator.runner import EARLY, Emulator
from support.coverings import pairwise, some
from support.gated_attention import entering, gated_call
from support.kernel_runner import Call, call_of, compare, launch, shaped, site_of
from support.prefetch_calls import of_few_rows
from support.verify_attention_cases import alone, case_of, rising, without_risers

from thor_dflash.core.tensors import Array, DType
from thor_dflash.plugins.contract import OpCase
from thor_dflash.plugins.launch import H100, THOR, CallSite, Device, Shaped
from thor_dflash.plugins.numpy_math import rounded
from thor_dflash.plugins.verify_attention import OP
from thor_dflash.plugins.verify_attention.launch import SPLIT_ROWS, launches, refuse, slots

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
@pairwise(quick=2, length=[120, 0, 100, 128, 4070, 4208], cache=[FP8, BF16])
def test_a_row_does_not_depend_on_where_its_block_began(length: int, cache: DType) -> None:
    case = case_of(32, length, cache, length // 128 * 128 + 256, heads=2)
    same_rows(case, [(0, 1), (0, 16), (3, 8), (10, 32), (27, 28), (31, 32)])


@emulated
@CACHES
def test_a_prompt_row_does_not_depend_on_its_chunk(cache: DType) -> None:
    case = case_of(100, 90, cache, 256)
    same_rows(case, [(0, SPLIT_ROWS + 1), (7, 60), (50, 100)])


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
@pytest.mark.parametrize("rotary", some([16, 32, 128, 256], [32]))
def test_every_rotation_width(rotary: int) -> None:
    run(case_of(16, 20, FP8, 128, rotary_dim=rotary))
    run(case_of(40, 20, BF16, 128, rotary_dim=rotary))


@emulated
@CACHES
@pytest.mark.parametrize(
    ("rows", "length"), some([(16, 4300), (SPLIT_ROWS + 1, 300)], [(SPLIT_ROWS + 1, 300)])
)
def test_scores_may_be_much_larger_in_a_later_tile(rows: int, length: int, cache: DType) -> None:
    run(rising(rows, length, cache), 0, FEW)


@emulated
@pairwise(quick=2, rows=[16, SPLIT_ROWS + 1], cache=[FP8, BF16])
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
@pairwise(quick=3, rows=[1, 16, 32], cache=[FP8, BF16])
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


@emulated
@pytest.mark.parametrize("port", ["length", "cache_k", "cache_v"])
def test_the_cache_is_requested_before_the_previous_kernel_ends(
    port: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = next(iter(of_few_rows(OP).values()))
    monkeypatch.setitem(EARLY, "attend_split", EARLY["attend_split"] - {port})
    with pytest.raises(EmulatorFault, match="before wait_for_previous"):
        launch(call, Emulator())


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
@pytest.mark.parametrize("fp8", [1, 0])
def test_parts_of_the_cache_are_free_only_when_all_of_them_has_been_loaded(fp8: int) -> None:
    """`last_of` depends on every load of a turn: 16 of keys, 16 of values."""
    found = np.zeros(2, np.int32)
    defines = {"GROUP": 6, "FP8": fp8, "NORM_F32": 0, "HALF": 32}
    runner.probe("attend_probes.cu", "turn_loads", found, shared=220_000, **defines)
    assert found.tolist() == [32, 0]


@emulated
def test_angles_are_accurate_up_to_the_farthest_position() -> None:
    near, far = np.linspace(0, 20, 2000), np.random.default_rng(1).uniform(0, 2**18, 2000)
    turns = np.arange(96) * np.pi / 4
    x = np.concatenate([near, far, turns]).astype(np.float32)
    got = np.zeros((len(x), 2), np.float32)
    probe("angles_of", x, got)
    want = np.stack([np.cos(x.astype(np.float64)), np.sin(x.astype(np.float64))], axis=1)
    assert np.abs(got - want).max() < 2**-22


@emulated
@pytest.mark.parametrize("scale", [7, 0.3, 0.07, 3, 1 / 448])
def test_what_the_cache_stores_is_the_rounded_quotient(scale: float) -> None:
    """Of each bf16 number. With scale 7, 10.9375 is a tie."""
    every = np.arange(0, 0x7F81, dtype=np.uint16).view(BF16.numpy).astype(np.float32)
    x = np.concatenate([every[:-1][::3][: len(every) // 96 * 32], every[-32:]])
    by, got = np.array([scale], np.float32), np.zeros_like(x)
    probe("quotients", x, by, got)
    want = x.astype(np.float64) / by.astype(np.float64)
    np.testing.assert_array_equal(rounded(got, FP8), rounded(want, FP8))


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
def test_thread_blocks_share_the_pieces_of_all_heads() -> None:
    """Each half of the heads of each piece has one thread block. Two share a piece if there are
    enough, or all but one that are needed. Block 0 has the last piece.
    """
    counts = [1, 2, 3, 4, 5, 8, 13, 16, 17, 20, 32, 33]
    ends = [128 * n - cut for n in counts for cut in (0, 111)] + [4230, 8440]
    calls = [
        (max(0, end - 16), end, n) for end in ends for n in (1, 2, 3, 4, 5, 16, 33, 34, 65, 66)
    ]
    calls = calls[: len(calls) // 32 * 32]
    got = np.zeros((len(calls), 66, 4), np.int32)
    cuts = np.full((len(calls), 1 + 3 * 99), -1, np.int32)
    probe("shares", np.array(calls, np.int32), got)
    probe("cuts", np.array([call[:2] for call in calls], np.int32), cuts)
    for call, blocks, (count, *_) in zip(calls, got.tolist(), cuts.tolist(), strict=True):
        taken = [
            (piece, half)
            for item, stride, first, halves in blocks[: call[2]]
            if item >= 0
            for piece in range(item, count, stride)
            for half in range(first, first + halves)
        ]
        assert sorted(taken) == [(p, h) for p in range(count) for h in (0, 1)], call
        shared = [b[3] for b in blocks[: call[2]] if b[0] >= 0]
        if 2 * count <= call[2]:
            want = [1] * (2 * count)
        elif 2 * count - 1 == call[2]:
            want = [2] + [1] * (2 * count - 2)
        else:
            want = [2] * min(count, call[2])
        item, stride = blocks[0][:2]
        assert (shared, (count - 1 - item) % stride) == (want, 0), call


@emulated
@pairwise(quick=2, length=[115, 250, 20, 130, 180, 230], cache=[FP8, BF16])
def test_bits_do_not_depend_on_whether_blocks_share_a_piece(length: int, cache: DType) -> None:
    """One to six thread blocks, of up to three pieces."""
    case = case_of(16, length, cache, 384, heads=2)
    _, want = run(case, 0, Device((9, 0), 1))
    for blocks in range(2, 7):
        _, got = run(case, blocks, Device((9, 0), blocks))
        for name in ("o", "next_cache_k", "next_cache_v"):
            np.testing.assert_array_equal(bits(got[name]), bits(want[name]))


def test_leaving_rows_of_a_prompt_in_slabs_is_refused() -> None:
    assert refuse(gated_call(case_of(SPLIT_ROWS, 0, FP8, 128)).site) == ""
    more = gated_call(case_of(SPLIT_ROWS + 1, 0, FP8, 128)).site
    assert refuse(more) == "verify_attention.y0_slabs must be of at most 32 rows (got 33)"


def test_leaving_rows_in_slabs_without_a_gate_is_refused() -> None:
    gated = gated_call(case_of(16, 0, FP8, 128)).site
    site = CallSite(
        OP, gated.attributes, {n: x for n, x in gated.ports.items() if n != "next_gate"}
    )
    assert refuse(site) == "verify_attention.y0_slabs must be of gated rows (got no next_gate)"


def test_there_is_memory_for_the_results_of_all_pieces() -> None:
    """Beyond 33 pieces of 128 positions, rows of a block may be cut in two different ways."""
    assert [slots(n) for n in (128, 384, 33 * 128, 33 * 128 + 128, 262_144)] == [1, 3, 33, 66, 66]


def shapes(rows: int, kv: int, dim: int = 256, capacity: int = 32_768) -> dict[str, Shaped]:
    """Types and shapes of the inputs of a call with six heads per key/value head."""
    wide, one = Shaped(BF16, (rows, kv * dim)), Shaped(F32, (1,))
    x = {"q": Shaped(BF16, (rows, 6 * kv * dim)), "k": wide, "v": wide}
    x |= dict.fromkeys(("q_norm", "k_norm"), Shaped(F32, (dim,)))
    x |= dict.fromkeys(("cache_k", "cache_v"), Shaped(FP8, (kv, capacity, dim)))
    return {**x, "length": Shaped(DType.I32, (1,)), "scale_k": one, "scale_v": one}


def test_partial_results_stay_small() -> None:
    """At 32k positions: bytes of the pieces' results against those of the cache that is read."""
    site = site_of(OP, {"heads": 24, "kv_heads": 4}, shapes(16, 4))
    split, combine = launches(site, H100)
    assert split.grid == (4, 33, 1)
    assert combine.grid == (384, 1, 1)
    assert 33 * 4 * 96 * (512 + 8) < 0.1 * 2 * 4 * 32_768 * 256


@pytest.mark.parametrize(
    ("rows", "kv", "multiprocessors", "grid"),
    [
        (17, 4, 132, (4, 16, 2)),
        (16, 1, 132, (1, 66, 1)),
        (32, 2, 20, (2, 5, 2)),
        (32, 2, 3, (2, 1, 2)),
        (32, 16, 20, (16, 1, 2)),
        (1, 4, 3, (4, 1, 1)),
    ],
)
def test_one_wave_of_blocks_takes_all_pieces(
    rows: int, kv: int, multiprocessors: int, grid: tuple[int, int, int]
) -> None:
    """As far as there are as many multiprocessors as heads and blocks of 16 tokens."""
    site = site_of(OP, {"heads": 6 * kv, "kv_heads": kv}, shapes(rows, kv))
    assert launches(site, Device((9, 0), multiprocessors))[0].grid == grid


def test_no_call_is_taken_whose_block_has_not_enough_memory() -> None:
    """Of the calls that the other rules allow, only this needs too much: 32 rows with the widest
    rotation, the largest group of heads and a bf16 cache.
    """
    refused: list[tuple[int, int, int, DType, str]] = []
    for rows in (1, 16, 31, 32, 33):
        for heads, rotary in itertools.product((2, 4, 6), (16, 64, 128, 256)):
            for cache in (BF16, FP8):
                case = case_of(rows, 0, cache, 128, heads=heads, rotary_dim=rotary)
                inputs = {n: shaped(x) for n, x in case.inputs.items()}
                site = site_of(OP, case.attributes, inputs)
                if why := refuse(site):
                    refused.append((rows, heads, rotary, cache, why))
                else:
                    assert all(one.shared <= THOR.shared for one in launches(site, THOR))
    why = "verify_attention.shared memory must be at most 232448 bytes (got 232704)"
    assert refused == [(32, 6, 256, BF16, why)]
