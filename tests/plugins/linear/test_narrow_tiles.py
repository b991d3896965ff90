"""linear with narrow tiles (n-tiles stored as four of 16 columns), in layouts that are small."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from emulator.compiler import COMPILER
from emulator.runner import Emulator
from hypothesis import given
from hypothesis import strategies as st
from support import kernel_runner
from support.coverings import pairwise, some
from support.kernel_usage import usage_of
from support.received_loads import tells

from thor_dflash.core.tensors import Array, DType
from thor_dflash.plugins import LINEAR
from thor_dflash.plugins.contract import OpCase
from thor_dflash.plugins.launch import H100, THOR, CallSite, Device, Int, Shaped
from thor_dflash.plugins.linear import decode_launch, layout
from thor_dflash.plugins.linear.launch import launches
from thor_dflash.plugins.linear.layout import (
    NarrowTile,
    PackedLayout,
    WeightKind,
    WeightTile,
    _layout,
    narrow_tiles,
)
from thor_dflash.plugins.linear.partition import Partition, WorkTile, partition
from thor_dflash.plugins.linear.reference import weight_case
from thor_dflash.plugins.linear.unpack import unpack
from thor_dflash.runtime.measure import random_weights

BF16 = DType.BF16.numpy
N4 = WeightKind.NVFP4
WIDTH = 17 * 64 // 2
"""Columns of gate and of up each: four n-tiles for each of 4 clusters, and one stored narrow."""

MANY = 29 * 64 // 2
"""The same with seven n-tiles for each cluster."""

emulated = pytest.mark.skipif(COMPILER is None, reason="needs g++ (Debian package g++)")


@pytest.fixture(autouse=True)
def _few_clusters(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Lay weights out for 4 clusters instead of an H100's 132: few enough for the emulator."""
    monkeypatch.setattr(layout, "CLUSTERS", 4)
    _forget()
    yield
    monkeypatch.undo()
    _forget()


def _forget() -> None:
    _layout.cache_clear()
    partition.cache_clear()


def device(multiprocessors: int) -> Device:
    return Device((9, 0), multiprocessors)


def gate_up(rows: int, k: int, width: int = WIDTH) -> OpCase:
    rng = np.random.default_rng(k)
    inputs: dict[str, Array] = {"x": rng.standard_normal((32, k))[:rows].astype(BF16)}
    if rows > 32:
        inputs["x"] = rng.standard_normal((rows, k)).astype(BF16)
    inputs |= weight_case(rng, "nvfp4", width, k, 0) | weight_case(rng, "nvfp4", width, k, 1)
    return OpCase(f"{rows}_of_{k}", inputs, {"segments": 2, "epilogue": "swiglu"})


def run(call: kernel_runner.Call, on: Device, seed: int = 0) -> dict[str, Array]:
    got = kernel_runner.launch(call, Emulator(seed), on)
    # Rows that come in slabs carry a norm's weight, but not yet its factor, when they are rounded.
    kernel_runner.compare(LINEAR, got, call.want, nearest="x_slabs" not in call.inputs)
    return got


def cut_of(k: int, on: Device, width: int = WIDTH) -> Partition:
    plan = _layout(k, (N4, N4), (width, width), True)
    return partition(plan, on.multiprocessors)


# ---- layout --------------------------------------------------------------------------------------
def test_sizes_decide_what_is_stored_narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "CLUSTERS", 132)
    assert narrow_tiles(544) == 16
    assert [narrow_tiles(528 + i) for i in (0, 1, 33, 34, 131)] == [0, 1, 33, 0, 0]
    assert [narrow_tiles(132 * i + 1) for i in (0, 3, 4, 7, 8, 29)] == [0, 0, 1, 1, 0, 0]


@pytest.mark.parametrize(
    ("kinds", "swiglu"),
    [
        ((N4, N4), False),
        ((WeightKind.FP8, WeightKind.FP8), True),
        ((WeightKind.BF16, WeightKind.BF16), True),
    ],
)
def test_only_gate_and_up_in_nvfp4_are_stored_narrow(
    kinds: tuple[WeightKind], swiglu: bool
) -> None:
    assert not _layout(128, kinds, (WIDTH, WIDTH), swiglu).narrow
    assert len(_layout(128, (N4, N4), (WIDTH, WIDTH), True).narrow) == 4


@given(st.integers(1, 40), st.integers(1, 400))
def test_groups_share_the_packed_weight_without_a_gap(k: int, strips: int) -> None:
    plan = _layout(16 * k, (N4, N4), (8 * strips,) * 2, True)
    at = column = 0
    for group in plan.groups:
        assert (group.offset, group.column) == (at, column)
        at += plan.steps * group.step_bytes
        column += group.tiles * 64
    assert (plan.nbytes, plan.columns) == (at, column)
    assert plan.narrow == tuple(
        NarrowTile(g, i) for g in plan.groups if g.narrow for i in range(4 * g.tiles)
    )


@given(st.integers(1, 40), st.integers(1, 400), st.integers(1, 150))
def test_every_narrow_tile_is_given_to_one_item(k: int, strips: int, count: int) -> None:
    plan = _layout(16 * k, (N4, N4), (8 * strips,) * 2, True)
    cut = partition(plan, count)
    given_tiles = [i.narrow for items in cut.clusters for i in items if i.narrow]
    assert sorted(t.column for t in given_tiles) == [t.column for t in plan.narrow]
    assert cut.parts == 2 or not plan.narrow


@pytest.mark.parametrize("times", [1, 2])
def test_the_item_table_says_where_a_narrow_tile_lies(
    times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout, "CLUSTERS", 4 * times)
    plan = _layout(320, (N4, N4), (times * WIDTH,) * 2, True)
    table = partition(plan, 3).item_table()
    narrow = [row for row in table[:, :, 1].reshape(-1, 4).tolist() if row[2] > 0]
    first = 16 * times * 3 * 2 * 2304  # bytes before: 16 n-tiles, three steps
    at = [first + 2 * 2304 * (i // 4) + 576 * (i % 4) for i in range(4 * times)]
    assert sorted(narrow) == [
        [a // 64, times * 2 * 2304 // 512, times * 1024 + 16 * i, 0] for i, a in enumerate(at)
    ]


# ---- packing -------------------------------------------------------------------------------------
@pytest.mark.parametrize("k", [16, 64, 320, 384])
@pytest.mark.parametrize("width", [WIDTH, WIDTH - 24])
def test_unpacking_gives_back_narrow_tiles(k: int, width: int) -> None:
    given_case = kernel_runner.in_kernel_types(LINEAR, gate_up(1, k, width))
    call = kernel_runner.call_of(LINEAR, given_case)
    got = unpack(call.site, call.inputs["packed"], call.inputs["scales"])
    for name, value in got.items():
        want = given_case.inputs[name]
        np.testing.assert_array_equal(value.view(np.uint8), want.view(np.uint8), name)


def test_a_narrow_slot_holds_what_a_slot_of_its_columns_would() -> None:
    """A narrow slot holds a quarter of the codes and scales of a whole slot, in the order described
    in packed_weight.cuh.
    """
    case = gate_up(1, 128)
    narrow = _tile(case, 16, 2 * 2304)
    layout.CLUSTERS = 5  # whole n-tiles
    _forget()
    whole = _tile(case, 16, 2 * 2304)
    codes = whole[:, :2048].view(np.uint32).reshape(2, 4, 32, 4)  # [half, k16, lane, j]
    quarters = narrow.reshape(2, 4, 576)
    got = np.ascontiguousarray(quarters[:, :, :512]).view(np.uint32).reshape(2, 4, 4, 32)
    np.testing.assert_array_equal(got, codes.transpose(0, 3, 1, 2))
    # [half, g, k16, h], of a word bytes [strip of the n-tile's half]
    words = np.ascontiguousarray(whole[:, 2048:]).view(np.uint32).reshape(2, 8, 4, 2)
    stored = np.ascontiguousarray(quarters[:, :, 512:]).view(np.uint32).reshape(2, 4, 8, 2)
    for half, j, g, k16 in np.ndindex(2, 4, 8, 4):
        want = _scales(words[half, g, k16, j // 2])[j % 2 * 2 :][:2]
        assert _scales(stored[half, j, g, k16 // 2])[k16 % 2 * 2 :][:2] == want


def _tile(case: OpCase, tile: int, nbytes: int) -> Array:
    """One step of an n-tile, uint8 [half step, bytes]."""
    call = kernel_runner.call_of(LINEAR, kernel_runner.in_kernel_types(LINEAR, case))
    plan = layout.layout(call.site)
    group = next(g for g in reversed(plan.groups) if g.column <= 64 * tile)
    at = group.offset + (tile - group.column // 64) * nbytes
    return call.inputs["packed"][at : at + nbytes].reshape(2, -1)


def _scales(word: int) -> list[int]:
    """The scales in a word, in the order in which nvfp4_scales extracts them."""
    word = int(word)
    turned = (word >> 8 | word << 24) & 0xFFFFFFFF
    return [w >> shift & 0xFF for w in (word, turned) for shift in (4, 20)]


# ---- few rows ------------------------------------------------------------------------------------
@emulated
@pytest.mark.parametrize("rows", some([1, 32], [1]))
def test_memory_is_free_only_when_whole_and_narrow_tiles_have_been_loaded(rows: int) -> None:
    """The last codes of a stage that a warp loads of each; scales and sums of an item."""
    call = kernel_runner.call_of(LINEAR, gate_up(rows, 256))
    groups = layout.layout(call.site).groups
    for group in groups:
        assert tells(call, device(4), "packed", group.offset + (2304 if group.narrow else 3840))
    for column in (0, groups[-1].column, groups[-1].column + 8):
        assert tells(call, device(2), "scales", 4 * column)
    assert tells(call, device(2), "packed", 4)  # not of the codes that are loaded last


@emulated
@pairwise(
    quick=5,
    rows=[1, 7, 16, 17, 32],
    k_on=[(704, 40), (16, 2), (64, 1), (128, 3), (192, 4), (384, 2), (704, 4)],
)
def test_narrow_tiles_equal_the_reference(rows: int, k_on: tuple[int, int]) -> None:
    """All four narrow tiles in one cluster or in several; items of four and of two n-tiles; a block
    without any slot; stages that are full and stages that are not.
    """
    k, multiprocessors = k_on
    call = kernel_runner.call_of(LINEAR, gate_up(rows, k))
    assert launches(call.site, H100)[-1].defines["NARROW"] == 1
    got = run(call, device(multiprocessors))
    again = kernel_runner.launch(call, Emulator(rows), device(multiprocessors), poison=0x5A)
    np.testing.assert_array_equal(got["y0"], again["y0"])


def test_the_cuts_of_these_tests_are_the_intended_ones() -> None:
    with_narrow = [i for items in cut_of(64, device(1)).clusters for i in items if i.narrow]
    assert len(with_narrow) == 4
    assert len(cut_of(64, device(1)).clusters) == 1
    spread = cut_of(704, device(40))
    assert {(i.piece.tiles, i.narrow is None) for items in spread.clusters for i in items} == {
        (2, True),
        (2, False),
    }
    some = cut_of(704, device(4)).clusters
    assert {(len(items), items[0].piece.tiles) for items in some} == {(1, 4)}
    [items] = cut_of(128, device(1), width=MANY).clusters
    assert [i.narrow is not None for i in items] == [True] * 4 + [False] * 3


@emulated
@pairwise(quick=3, rows=[3, 16, 20], seed=[0, 1, 5])
def test_items_with_a_narrow_tile_precede_items_without_one(rows: int, seed: int) -> None:
    run(kernel_runner.call_of(LINEAR, gate_up(rows, 128, MANY)), device(1), seed)


def odd_cut(plan: PackedLayout, multiprocessors: int, *, by_head: bool = False) -> Partition:
    """A cut that `partition` would not make: two clusters, items of 1 to 4 n-tiles in any order,
    some of them with a narrow tile.
    """
    first, second, *_ = plan.groups
    narrow = plan.narrow or (None,) * 4
    one = (
        WorkTile(WeightTile(first, 0, 1)),
        WorkTile(WeightTile(first, 1, 3), narrow[2]),
        WorkTile(WeightTile(first, 4, 1), narrow[0]),
        WorkTile(WeightTile(first, 5, 4)),
    )
    other = [
        WorkTile(WeightTile(first, 9, 2), narrow[3]),
        WorkTile(WeightTile(second, 0, 4)),
        WorkTile(WeightTile(first, 11, 1), narrow[1]),
    ]
    if not plan.narrow:
        other.append(WorkTile(WeightTile(second, 4, 1)))
    return Partition(8, 2, 2, (one, tuple(other)), by_head)


@emulated
@pairwise(quick=4, rows=[3, 16, 32], seed=[0, 1, 2], k=[64, 256, 704], narrow=[False, True])
def test_items_may_come_in_any_order(
    rows: int, seed: int, k: int, narrow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not narrow:
        monkeypatch.setattr(layout, "CLUSTERS", 132)
    case = gate_up(rows, k)
    want = kernel_runner.launch(kernel_runner.call_of(LINEAR, case), Emulator(0), device(4))["y0"]
    monkeypatch.setattr(decode_launch, "partition", odd_cut)
    got = run(kernel_runner.call_of(LINEAR, case), device(4), seed)["y0"]
    if narrow:  # then every n-tile is shared by two warps, whatever the item
        np.testing.assert_array_equal(got, want)


@emulated
@pairwise(quick=2, rows=[5, 16, 30], width=[WIDTH - 8, WIDTH - 24])
def test_segments_may_end_inside_narrow_tiles(rows: int, width: int) -> None:
    for on in (1, 3):
        run(kernel_runner.call_of(LINEAR, gate_up(rows, 192, width)), device(on), on)


@emulated
@pytest.mark.parametrize("most", some([16, 32], [16]))
def test_a_row_does_not_depend_on_how_many_there_are(most: int) -> None:
    want = run(kernel_runner.call_of(LINEAR, gate_up(most, 320)), device(4))["y0"]
    for rows in (most - 15, most - 14, most - 7, most - 1):
        got = run(kernel_runner.call_of(LINEAR, gate_up(rows, 320)), device(4), rows)["y0"]
        np.testing.assert_array_equal(got, want[:rows])


@emulated
@pairwise(quick=2, rows=[1, 16, 32], multiprocessors=[1, 4])
def test_normed_rows_come_in_and_rows_are_left(
    rows: int, multiprocessors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a verify calls gate and up: 1 / rms is applied last, slabs are left for down_proj."""
    monkeypatch.setattr(layout, "CLUSTERS", 8)
    rng = np.random.default_rng(rows)
    case = gate_up(rows, 320, 2 * WIDTH)  # whole slabs
    x, weight = case.inputs["x"], rng.normal(0, 0.2, 320).astype(BF16)
    inputs = {**case.inputs, "norm_weight": weight}
    case = OpCase("normed", inputs, {**case.attributes, "norm_offset": 1.0})
    call = kernel_runner.call_of(LINEAR, case, x_squares=True)
    normed = (x.astype(np.float32) * (1 + weight.astype(np.float32))).astype(BF16)
    given_rows, left = kernel_runner.slabs(normed), kernel_runner.slabs(call.want["y0"])
    ports = {**call.site.ports, "x_slabs": kernel_runner.shaped(given_rows)}
    ports["y0_slabs"] = kernel_runner.shaped(left)
    call = replace(
        call,
        site=CallSite(LINEAR, call.site.attributes, ports),
        inputs={**call.inputs, "x_slabs": given_rows},
        want={**call.want, "y0_slabs": left},
    )
    [one] = launches(call.site, device(multiprocessors))
    assert (one.defines["ROW_SCALE"], one.defines["NEXT"], one.defines["NARROW"]) == (1, 3, 1)
    got = run(call, device(multiprocessors), rows)
    np.testing.assert_array_equal(got["y0_slabs"], kernel_runner.slabs(got["y0"]))


@emulated
@pairwise(quick=2, rows=[16, 32], k=[64, 384])
def test_every_item_applies_the_rows_norm_factor(
    rows: int, k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = gate_up(rows, k)
    inputs = {**case.inputs, "norm_weight": np.zeros(k, BF16)}
    case = OpCase("normed", inputs, {**case.attributes, "norm_offset": 1.0})
    call = kernel_runner.call_of(LINEAR, case, x_squares=True)
    given_rows = kernel_runner.slabs(inputs["x"])
    ports = {**call.site.ports, "x_slabs": kernel_runner.shaped(given_rows)}
    call = replace(
        call,
        site=CallSite(LINEAR, call.site.attributes, ports),
        inputs={**call.inputs, "x_slabs": given_rows},
    )
    monkeypatch.setattr(decode_launch, "partition", odd_cut)
    for seed in range(4):
        run(call, device(4), seed)


def test_random_weights_know_which_tiles_are_narrow() -> None:
    call = kernel_runner.call_of(LINEAR, gate_up(1, 128))
    slots = {at: one.arguments[-1] for at, one in random_weights._packed(THOR, call.site, 0, 0)}
    plan = layout.layout(call.site)
    assert slots == {g.offset: Int(576 if g.narrow else 2304) for g in plan.groups}
    assert [g.narrow for g in plan.groups] == [False, False, True]


# ---- many rows -----------------------------------------------------------------------------------
@emulated
@pairwise(quick=3, rows=[33, 64, 130], k=[16, 64, 208, 640])
def test_prefill_reads_narrow_tiles(rows: int, k: int) -> None:
    call = kernel_runner.call_of(LINEAR, gate_up(rows, k))
    assert launches(call.site, H100)[-1].defines["KINDS"] == 1 << N4 | 1 << 3
    run(call, device(3), rows)


# ---- as built ------------------------------------------------------------------------------------
@pytest.mark.slow
@pairwise(rows=[16, 32], arch=["sm_90", "sm_110"])
def test_the_kernel_of_a_verify_does_not_spill(arch: str, rows: int) -> None:
    """As a verify calls it: normed rows come in slabs, and rows are left in slabs."""
    pytest.importorskip("cuda.bindings.nvrtc", reason="needs NVRTC (the extra [cuda])")
    site = kernel_runner.call_of(LINEAR, gate_up(rows, 320)).site
    ports = {
        **site.ports,
        "x_slabs": Shaped(DType.BF16, decode_launch.slabs(rows, 320)),
        "x_squares": Shaped(DType.F32, (10, 32)),
        "y0_slabs": Shaped(DType.BF16, decode_launch.slabs(rows, WIDTH)),
    }
    [one] = launches(CallSite(LINEAR, site.attributes, ports), H100)
    usage = usage_of(kernel_runner.source_of(LINEAR, one), one.defines, arch)["linear"]
    assert usage.spilled == 0
    # Two blocks share a multiprocessor. Each of its four parts has registers for 512 per lane.
    warps = -(-2 * one.threads // 32 // 4)
    assert usage.registers * warps <= 512
