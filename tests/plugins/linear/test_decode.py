"""linear with at most 32 rows, beyond its operator's cases: how work is cut, how norms are shared
between calls, segments of few columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from emulator.runner import LATE, Emulator
from hypothesis import example, given
from hypothesis import strategies as st
from support import kernel_runner
from support.coverings import pairwise, some
from support.linear_shapes import BF16, N4, SHAPES, bf16, nvfp4
from support.op_cases import NEAR_ZERO, OpCase, near_zero, weight_case

from thor_dflash.core.tensors import Array, DType
from thor_dflash.plugins import LINEAR
from thor_dflash.plugins.contract import Attributes
from thor_dflash.plugins.launch import H100, THOR, CallSite, Device, Shaped
from thor_dflash.plugins.linear import launch
from thor_dflash.plugins.linear.layout import (
    NARROW,
    TILE,
    PackedLayout,
    WeightKind,
    _layout,
    layout,
)
from thor_dflash.plugins.linear.pack import pack, packed
from thor_dflash.plugins.linear.partition import Partition, halves, partition

SMALL = Device((9, 0), 12)
Sixteen = tuple[int, WeightKind, bool]
"""16 packed columns: the first one, their kind, and whether they are a narrow tile."""


def made(plan: PackedLayout, cut: Partition) -> list[Sixteen]:
    """All columns that the items compute, in order, without padding."""
    found = []
    for item in (item for items in cut.clusters for item in items):
        piece = item.piece
        columns = range(piece.column, piece.column + piece.columns, NARROW)
        found += [(c, piece.group.kind, False) for c in columns]
        if item.narrow is not None:
            found.append((item.narrow.column, item.narrow.group.kind, True))
    return sorted(s for s in found if there(plan, s))


def wanted(plan: PackedLayout) -> list[Sixteen]:
    """All columns of a layout, in order, without padding."""
    return [
        sixteen
        for g in plan.groups
        for column in range(g.column, g.column + g.tiles * TILE, NARROW)
        if there(plan, sixteen := (column, g.kind, g.narrow))
    ]


def there(plan: PackedLayout, sixteen: Sixteen) -> bool:
    """Whether these columns are not just padding."""
    return any(plan.strips[sixteen[0] // 8 :][:2])


def streamed(plan: PackedLayout, cut: Partition) -> list[float]:
    """Bytes of weight that are read by the block of each cluster with the longest range of K."""
    longest = max(map(len, halves(plan, cut.parts)))
    return [
        sum(i.piece.step_bytes + (1152 if i.narrow else 0) for i in items) / 2 * longest
        for items in cut.clusters
    ]


@pytest.mark.parametrize("device", [THOR, H100], ids=["thor", "h100"])
@pytest.mark.parametrize("shape", [s for s in SHAPES if s != "nano"])
def test_blocks_read_about_equally_many_bytes(shape: str, device: Device) -> None:
    """Shares cannot be equal, since clusters do not fill a device and most n-tiles are not divided.
    But no block reads a quarter more than its share, nor 5% more of the largest weights.
    """
    plan = _layout(*SHAPES[shape])
    cut = partition(plan, device.multiprocessors)
    most = 1.05 if shape in ("gate_up", "in_proj", "head") else 1.25
    assert max(streamed(plan, cut)) <= plan.nbytes / (2 * device.multiprocessors) * most


@given(
    st.integers(1, 40),
    st.lists(st.tuples(st.sampled_from(WeightKind), st.integers(1, 90)), min_size=1, max_size=4),
    st.integers(1, 50),
)
# Here the rest is cut anew from the second half of a bf16 n-tile on.
@example(1, [(N4, 1), (N4, 1), (N4, 31), (WeightKind.BF16, 17)], 2)
def test_any_layout_is_cut_whole(
    k: int, segments: list[tuple[WeightKind, int]], count: int
) -> None:
    kinds, widths = zip(*segments, strict=True)
    plan = _layout(16 * k, tuple(kinds), tuple(8 * w for w in widths), False)
    assert made(plan, partition(plan, count)) == wanted(plan)


@pytest.mark.parametrize("rows", some([16, 40, 64, 130], [16]))
def test_segments_may_end_inside_a_strip(rows: int) -> None:
    rng = np.random.default_rng(rows)
    inputs: dict[str, Array] = {
        "x": rng.normal(0, 1, (rows, 320)).astype(BF16),
        "norm_weight": rng.normal(0, 0.1, 320).astype(BF16),
    }
    for i, (n, make) in enumerate(((128, nvfp4), (64, nvfp4), (4, bf16), (6, bf16))):
        inputs |= {f"{name}{i}": value for name, value in make(rng, n, 320).items()}
    case = OpCase("thin", inputs, {"segments": 4, "norm_offset": 1.0})
    kernel_runner.run(LINEAR, case, Emulator(0))


@pytest.mark.parametrize(
    ("rows", "seed", "n", "items"),
    some(
        [(3, 0, 1664, 7), (16, 1, 1664, 7), (20, 5, 1664, 7), (3, 1, 4416, 18)], [(20, 5, 1664, 7)]
    ),
)
def test_a_block_may_have_any_number_of_items(rows: int, seed: int, n: int, items: int) -> None:
    """One cluster has them all: of four n-tiles each, except the last."""
    rng = np.random.default_rng(seed)
    inputs = {
        "x": rng.normal(0, 1, (rows, 384)).astype(BF16),
        "residual": rng.normal(0, 1, (rows, n)).astype(BF16),
        **{f"{name}0": value for name, value in nvfp4(rng, n, 384).items()},
    }
    case = OpCase("many", inputs, {"epilogue": "residual"})
    call = kernel_runner.call_of(LINEAR, case, y_squares=True)
    device = Device((9, 0), 1)
    assert partition(_layout(384, (N4,), (n,), False), 1).most_items == items
    kernel_runner.compare(LINEAR, kernel_runner.launch(call, Emulator(seed), device), call.want)


@pytest.mark.parametrize(
    ("kind", "rows", "n", "k", "parts", "tiles"),
    [
        ("fp8", 16, 192, 320, 2, [2, 1]),
        pytest.param("bfloat16", 32, 192, 320, 2, [1, 1, 1], marks=pytest.mark.emulator),
        ("nvfp4", 16, 320, 1024, 8, [4, 1]),
    ],
)
def test_an_item_of_any_kind_may_follow_another(
    kind: str, rows: int, n: int, k: int, parts: int, tiles: list[int]
) -> None:
    """In FP8 and bf16, the last stage of an item has no slot for some of the warps. In NVFP4, the
    blocks of the largest cluster send sums, which pairs of warps have added up.
    """
    rng = np.random.default_rng(n)
    inputs = {"x": rng.normal(0, 1, (rows, k)).astype(BF16), **weight_case(rng, kind, n, k)}
    call = kernel_runner.call_of(LINEAR, OpCase("following", inputs, {}))
    cut = partition(layout(call.site), 1)
    [items] = cut.clusters
    assert (cut.warps, cut.parts, [item.piece.tiles for item in items]) == (8, parts, tiles)
    for seed in range(3):
        got = kernel_runner.launch(call, Emulator(seed), Device((9, 0), 1))
        kernel_runner.compare(LINEAR, got, call.want)


@pytest.mark.parametrize(
    "seed", some([0, 5, *(LATE + warp for warp in range(9))], [5, LATE, LATE + 7])
)
def test_warps_without_an_n_tile_keep_step_with_the_others(seed: int) -> None:
    """Short items, the later ones of one n-tile. Warps with nothing to finish would soon be two
    items ahead if they did not wait until the space for the sums is free. And the others would soon
    be two items ahead of such a warp if they did not wait for it.
    """
    rng = np.random.default_rng(seed)
    inputs: dict[str, Array] = {"x": rng.normal(0, 1, (16, 128)).astype(BF16)}
    for i, (n, make) in enumerate(((448, nvfp4), (128, bf16))):
        inputs |= {f"{name}{i}": value for name, value in make(rng, n, 128).items()}
    call = kernel_runner.call_of(LINEAR, OpCase("narrowing", inputs, {"segments": 2}))
    [items] = partition(_layout(128, (N4, WeightKind.BF16), (448, 128), False), 1).clusters
    assert [item.piece.tiles for item in items] == [4, 3, 1, 1]
    kernel_runner.compare(
        LINEAR, kernel_runner.launch(call, Emulator(seed), Device((9, 0), 1)), call.want
    )


def site(
    ports: Mapping[str, Array], outputs: Mapping[str, Shaped], **attributes: object
) -> CallSite:
    shaped = {name: Shaped(DType.of(value), value.shape) for name, value in ports.items()}
    return CallSite(LINEAR, LINEAR.complete(attributes), {**shaped, **outputs})  # type: ignore[arg-type]


@pytest.mark.parametrize("rows", some([1, 16, 32], [16]))
def test_rows_that_come_normed_give_what_the_norm_gives(rows: int) -> None:
    """Rows x * (offset + w), and 1 / rms as a factor at the end, give the normed product, up to the
    rounding of the rows.
    """
    rng = np.random.default_rng(rows)
    x = near_zero(rng.normal(0, 1, (rows, 656))).astype(BF16)
    weight = rng.normal(0, 0.2, 656).astype(BF16)
    inputs = {"x": x, "norm_weight": weight}
    inputs |= {f"{name}0": value for name, value in nvfp4(rng, 320, 656).items()}
    case = OpCase("normed", inputs, {"norm_offset": 1.0, "norm_eps": NEAR_ZERO**2})
    call = kernel_runner.call_of(LINEAR, case, x_squares=True)
    normed = (x.astype(np.float32) * (1 + weight.astype(np.float32))).astype(BF16)
    given = kernel_runner.slabs(normed)
    ports = {**call.site.ports, "x_slabs": kernel_runner.shaped(given)}
    given_site = CallSite(call.site.op, call.site.attributes, ports)
    [one] = launch.launches(given_site, H100)
    assert one.defines["ROW_SCALE"] == 1
    call = replace(call, site=given_site, inputs={**call.inputs, "x_slabs": given})
    kernel_runner.compare(
        LINEAR, kernel_runner.launch(call, Emulator(0), SMALL), call.want, nearest=False
    )


@pairwise(quick=1, rows=[1, 16, 32], wide=[False, True])
def test_rows_can_be_left_normed_for_the_next_product(rows: int, wide: bool) -> None:
    rng = np.random.default_rng(rows)
    inputs = {
        "x": rng.normal(0, 1, (rows, 384)).astype(BF16),
        "residual": rng.normal(0, 1, (rows, 640)).astype(BF16),
        **{f"{name}0": value for name, value in nvfp4(rng, 640, 384).items()},
    }
    call = kernel_runner.call_of(
        LINEAR, OpCase("next", inputs, {"epilogue": "residual"}), y_squares=True
    )
    weight = rng.normal(0, 0.2, 640).astype(np.float32 if wide else BF16)
    left = kernel_runner.slabs((call.want["y0"] * (1 + weight.astype(np.float64))).astype(BF16))
    ports = {
        **call.site.ports,
        "next_norm_weight": Shaped(DType.of(weight), (640,)),
        "y0_slabs": kernel_runner.shaped(left),
    }
    attributes = Attributes({**call.site.attributes.values, "next_norm_offset": 1.0})
    call = replace(
        call,
        site=CallSite(LINEAR, attributes, ports),
        inputs={**call.inputs, "next_norm_weight": weight},
        want={**call.want, "y0_slabs": left},
    )
    factor = 1 + weight.astype(np.float32)
    for device in (Device((9, 0), 2), SMALL):
        got = kernel_runner.launch(call, Emulator(0), device)
        kernel_runner.compare(LINEAR, got, call.want)
        made = got["y0"].astype(np.float32) * factor
        np.testing.assert_array_equal(got["y0_slabs"], kernel_runner.slabs(made.astype(BF16)))


def test_packing_refuses_scales_that_are_nan_or_negative() -> None:
    rng = np.random.default_rng(0)
    weights = {f"{name}0": value for name, value in nvfp4(rng, 64, 128).items()}
    call = site({"x": np.zeros((1, 128), BF16), **weights}, {"y0": Shaped(DType.BF16, (1, 64))})
    assert set(packed(call)) == {"packed", "scales", "kinds"}
    pack(call, weights)
    for bad in (np.nan, -1.0):
        broken = dict(weights)
        scales = broken["block_scale0"].copy()
        scales[3, 2] = bad
        broken["block_scale0"] = scales
        with pytest.raises(ValueError, match="block_scale must be a positive E4M3 number"):
            pack(call, broken)
