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
from support.op_cases import OpCase, weight_case
from support.received_loads import tells

from thor_dflash.core.tensors import Array, DType
from thor_dflash.plugins import LINEAR
from thor_dflash.plugins.launch import H100, CallSite, Device
from thor_dflash.plugins.linear import decode_launch, layout
from thor_dflash.plugins.linear.launch import launches
from thor_dflash.plugins.linear.layout import (
    PackedLayout,
    WeightKind,
    WeightTile,
    _layout,
)
from thor_dflash.plugins.linear.partition import Partition, WorkTile, partition
from thor_dflash.plugins.linear.unpack import unpack

BF16 = DType.BF16.numpy
N4 = WeightKind.NVFP4
WIDTH = 17 * 64 // 2
"""Columns of gate and of up each: four n-tiles for each of 4 clusters, and one stored narrow."""


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


@given(st.integers(1, 40), st.integers(1, 400), st.integers(1, 150))
def test_every_narrow_tile_is_given_to_one_item(k: int, strips: int, count: int) -> None:
    plan = _layout(16 * k, (N4, N4), (8 * strips,) * 2, True)
    cut = partition(plan, count)
    given_tiles = [i.narrow for items in cut.clusters for i in items if i.narrow]
    assert sorted(t.column for t in given_tiles) == [t.column for t in plan.narrow]
    assert cut.parts == 2 or not plan.narrow


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
    quick=2,
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
@pairwise(quick=1, rows=[3, 16, 32], seed=[0, 1, 2], k=[64, 256, 704], narrow=[False, True])
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
@pairwise(quick=1, rows=[5, 16, 30], width=[WIDTH - 8, WIDTH - 24])
def test_segments_may_end_inside_narrow_tiles(rows: int, width: int) -> None:
    for on in (1, 3):
        run(kernel_runner.call_of(LINEAR, gate_up(rows, 192, width)), device(on), on)


@emulated
@pairwise(quick=1, rows=[1, 16, 32], multiprocessors=[1, 4])
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


# ---- many rows -----------------------------------------------------------------------------------
@emulated
@pairwise(quick=1, rows=[33, 64, 130], k=[16, 64, 208, 640])
def test_prefill_reads_narrow_tiles(rows: int, k: int) -> None:
    call = kernel_runner.call_of(LINEAR, gate_up(rows, k))
    assert launches(call.site, H100)[-1].defines["KINDS"] == 1 << N4 | 1 << 3
    run(call, device(3), rows)
