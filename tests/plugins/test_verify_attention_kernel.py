"""verify_attention's kernels on the emulator: a row's result must not depend on its block."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from attention_cases import case_of, rising
from emulation import COMPILER, Emulator
from gating import entering, gated_call
from kernels import Call, call_of, compare, launch, shaped, site_of

from thor_dflash.plugins.launch import H100, THOR, Device
from thor_dflash.plugins.op import Case
from thor_dflash.plugins.verify_attention import OP
from thor_dflash.plugins.verify_attention.launch import SPLIT_ROWS, launches, refuse, slots
from thor_dflash.tensors import Array, DType

BF16, FP8, F32 = DType.BF16, DType.FP8, DType.F32
CACHES = pytest.mark.parametrize("cache", [FP8, BF16], ids=lambda c: c.value)
emulated = pytest.mark.skipif(COMPILER is None, reason="needs g++ (Debian package g++)")
FEW = Device((9, 0), 3)
"""So few multiprocessors that every thread block takes several pieces of the cache."""


def later(case: Case, whole: dict[str, Array], start: int, stop: int) -> Case:
    """A call of rows start .. stop - 1 of a case, with the rows before them committed to the cache.
    `whole`: outputs of the case.
    """
    length = int(case.inputs["length"][0]) + start
    x = dict(case.inputs) | {name: case.inputs[name][start:stop] for name in "qkv"}
    x["length"] = np.array([length], np.int32)
    for name in ("cache_k", "cache_v"):
        x[name] = whole[f"next_{name}"].copy()
        x[name][:, length:] = np.nan
    return Case(case.name, x, case.attributes)


def bits(x: Array) -> Array:
    return np.ascontiguousarray(x).view(np.uint8)


def run(case: Case, seed: int = 0, device: Device = THOR) -> tuple[Call, dict[str, Array]]:
    call = call_of(OP, case)
    got = launch(call, Emulator(seed), device)
    compare(OP, got, call.want)
    return call, got


def same_rows(case: Case, parts: list[tuple[int, int]]) -> None:
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
@CACHES
@pytest.mark.parametrize("length", [0, 100, 120, 128, 4070, 4208])
def test_a_row_does_not_depend_on_where_its_block_began(length: int, cache: DType) -> None:
    case = case_of(32, length, cache, length // 128 * 128 + 256, heads=2)
    same_rows(case, [(0, 1), (0, 16), (3, 8), (10, 32), (27, 28), (31, 32)])


@emulated
@CACHES
def test_a_prompt_row_does_not_depend_on_its_chunk(cache: DType) -> None:
    case = case_of(100, 90, cache, 256)
    same_rows(case, [(0, SPLIT_ROWS + 1), (7, 60), (50, 100)])


@emulated
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
    _, got = run(Case("other rows", x, case.attributes))
    np.testing.assert_array_equal(bits(got["o"][:9]), bits(want["o"][:9]))


@emulated
def test_fp8_rows_saturate() -> None:
    case = case_of(16, 120, FP8, 256)
    x = dict(case.inputs) | {"v": (case.inputs["v"] * 1000).astype(BF16.numpy)}
    call, got = run(Case("large", x, case.attributes))
    fresh = got["next_cache_v"][:, 120:136].astype(np.float32)
    assert np.abs(fresh).max() == 448
    np.testing.assert_array_equal(fresh, call.want["next_cache_v"][:, 120:136].astype(np.float32))


@emulated
@pytest.mark.parametrize("rotary", [16, 32, 128, 256])
def test_every_rotation_width(rotary: int) -> None:
    run(case_of(16, 20, FP8, 128, rotary_dim=rotary))
    run(case_of(40, 20, BF16, 128, rotary_dim=rotary))


@emulated
def test_angles_hold_at_far_positions() -> None:
    call, got = run(case_of(2, 30_000, BF16, 30_080, heads=2))
    have, want = (x["next_cache_k"][:, 30_000:30_002] for x in (got, call.want))
    error = np.abs(have.astype(np.float64) - want.astype(np.float64))
    assert np.all(error <= np.abs(want.astype(np.float64)) * 2**-7 + 1e-6)


@emulated
@CACHES
@pytest.mark.parametrize(("rows", "length"), [(16, 4300), (SPLIT_ROWS + 1, 300)])
def test_scores_may_be_much_larger_in_a_later_tile(rows: int, length: int, cache: DType) -> None:
    run(rising(rows, length, cache), 0, FEW)


@emulated
@CACHES
def test_a_row_rescales_by_its_own_scores(cache: DType) -> None:
    """In most rows the largest softmax weight becomes 2^8 to 2^14 times larger, a little more than
    the slack of 2^8. In the last row it is made to grow by more than f16 can hold, so that all rows
    of the block are examined again. The other rows must not change.
    """
    case = rising(16, 4300, cache, 30.0)
    _, want = run(case)
    x = dict(case.inputs) | {"q": case.inputs["q"].copy()}
    key = x["cache_k"][0, 200 if cache is FP8 else 100].astype(np.float32)
    x["q"][15] = np.tile(key, 2).astype(BF16.numpy)
    _, got = run(Case("one far above", x, case.attributes))
    np.testing.assert_array_equal(bits(got["o"][:15]), bits(want["o"][:15]))


@emulated
@CACHES
@pytest.mark.parametrize("rows", [1, 16, 32])
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


def test_leaving_rows_of_a_prompt_in_slabs_is_refused() -> None:
    assert refuse(gated_call(case_of(SPLIT_ROWS, 0, FP8, 128)).site) == ""
    more = gated_call(case_of(SPLIT_ROWS + 1, 0, FP8, 128)).site
    assert refuse(more) == "verify_attention.y0_slabs must be of at most 32 rows (got 33)"


def test_there_is_memory_for_the_results_of_all_pieces() -> None:
    """Beyond 33 pieces of 128 positions, rows of a block may be cut in two different ways."""
    assert [slots(n) for n in (128, 384, 33 * 128, 33 * 128 + 128, 262_144)] == [1, 3, 33, 66, 66]


def test_partial_results_stay_small() -> None:
    """At 32k positions: bytes of the pieces' results against those of the cache that is read."""
    x = {n: shaped(np.zeros((16, h * 256), BF16.numpy)) for n, h in (("q", 24), ("k", 4), ("v", 4))}
    case = case_of(1, 0, FP8, 128)
    x |= {n: shaped(case.inputs[n]) for n in ("q_norm", "k_norm", "length", "scale_k", "scale_v")}
    x |= {f"cache_{n}": shaped(np.zeros((4, 32_768, 256), FP8.numpy)) for n in "kv"}
    site = site_of(OP, {"heads": 24, "kv_heads": 4}, x)
    split, combine = launches(site, H100)
    assert split.grid == (33, 4, 1)
    assert combine.grid == (384, 1, 1)
    assert 33 * 4 * 96 * (512 + 8) < 0.1 * 2 * 4 * 32_768 * 256


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


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"heads": 3}, "heads / kv_heads must be 2, 4 or 6 (got 3.0)"),
        ({"rotary_dim": 48}, "rotary_dim must be a power of two, 16 to 256 (got 48)"),
        ({"tile": 32}, "tile must be a multiple of 128 (got 32)"),
        ({"cache_v": BF16}, "cache_v must be float8_e4m3fn, as cache_k (got bfloat16)"),
        ({"q_norm": DType.F16}, "q_norm must be bfloat16 or float32 (got float16)"),
        ({"k_norm": BF16}, "k_norm must be float32, as q_norm (got bfloat16)"),
        ({"q": F32}, "q must be bfloat16 (got float32)"),
        ({"k": F32}, "k must be bfloat16 (got float32)"),
        ({"v": F32}, "v must be bfloat16 (got float32)"),
    ],
)
def test_refusals_name_the_port(change: dict[str, int | DType], why: str) -> None:
    heads = change.get("heads", 4)
    assert isinstance(heads, int)
    case = case_of(1, 0, FP8, 128, heads=heads)
    inputs = {n: shaped(x) for n, x in case.inputs.items()}
    attributes = dict(case.attributes)
    for name, value in change.items():
        if isinstance(value, DType):
            x = case.inputs[name].astype(np.float32).astype(value.numpy)
            inputs[name] = shaped(x)
        else:
            attributes[name] = value
    assert refuse(site_of(OP, attributes, inputs)) == f"verify_attention.{why}"
