"""How a product of more than 32 rows is cut into items, and that any cut gives right results."""

from __future__ import annotations

import numpy as np
import pytest
from emulator.compiler import COMPILER
from emulator.runner import Emulator
from hypothesis import given
from hypothesis import strategies as st
from support import kernel_runner
from support.coverings import pairwise
from support.linear_shapes import BF16, nvfp4
from support.op_cases import OpCase

from thor_dflash.plugins import LINEAR
from thor_dflash.plugins.launch import Device, Int
from thor_dflash.plugins.linear import launch
from thor_dflash.plugins.linear.layout import TILE, WeightKind, _layout, layout
from thor_dflash.plugins.linear.prefill_launch import HIGH, LOW, Tiling, _cuts, cut


def items(found: Tiling) -> list[tuple[int, int, int, int]]:
    """Every item: first row, rows, first packed column, columns; as item_of in prefill.cu."""
    row_tiles = found.tiles // len(found.pieces)
    made: list[tuple[int, int, int, int]] = []
    for i in range(found.items):
        half = i - found.whole
        tile = i if half < 0 else found.whole + half // 2
        piece, row = found.pieces[tile // row_tiles], tile % row_tiles * found.height
        if half >= 0:
            row += half % 2 * LOW
        made.append((row, found.height if half < 0 else LOW, piece.column, piece.tiles * TILE))
    return made


@given(
    st.lists(st.tuples(st.sampled_from(WeightKind), st.integers(1, 90)), min_size=1, max_size=4),
    st.integers(33, 700),
    st.integers(1, 50),
)
def test_every_cut_makes_every_row_and_column_once(
    segments: list[tuple[WeightKind, int]], rows: int, blocks: int
) -> None:
    kinds, widths = zip(*segments, strict=True)
    plan = _layout(128, tuple(kinds), tuple(8 * w for w in widths), False)
    columns = sum(group.tiles for group in plan.groups) * TILE
    for found in (cut(plan, rows, blocks), *_cuts(plan, rows, blocks)):
        times = np.zeros((-(-rows // HIGH) * HIGH, columns), np.int8)
        for row, height, column, width in items(found):
            times[row : row + height, column : column + width] += 1
        assert (times[:rows] == 1).all(), found


needs_emulator = pytest.mark.skipif(COMPILER is None, reason="needs g++ (Debian package g++)")
ROWS, BLOCKS = (40, 64, 70, 130, 200, 300), (1, 2, 5, 6, 12, 132)


@needs_emulator
@pairwise(quick=3, rows=ROWS, blocks=BLOCKS)
def test_any_cut_gives_the_product(rows: int, blocks: int) -> None:
    """Nine n-tiles, so that in the last piece, of one n-tile, most of a block's warps are idle."""
    rng = np.random.default_rng(rows)
    inputs = {
        "x": rng.normal(0, 1, (rows, 192)).astype(BF16),
        "residual": rng.normal(0, 1, (rows, 576)).astype(BF16),
        **{f"{name}0": value for name, value in nvfp4(rng, 576, 192).items()},
    }
    call = kernel_runner.call_of(LINEAR, OpCase("cut", inputs, {"epilogue": "residual"}))
    device = Device((9, 0), blocks)
    kernel_runner.compare(LINEAR, kernel_runner.launch(call, Emulator(0), device), call.want)
    found, product = cut(layout(call.site), rows, blocks), launch.launches(call.site, device)[-1]
    assert product.grid == (min(found.items, blocks), 1, 1)
    assert product.arguments[-2:] == (Int(len(found.pieces)), Int(found.whole))


@needs_emulator
def test_every_cut_gives_the_same_bits() -> None:
    rng = np.random.default_rng(3)
    inputs = {
        "x": rng.normal(0, 1, (150, 384)).astype(BF16),
        **{f"{name}0": value for name, value in nvfp4(rng, 576, 384).items()},
    }
    call = kernel_runner.call_of(LINEAR, OpCase("bits", inputs, {}))
    made = [
        kernel_runner.launch(call, Emulator(0), Device((9, 0), n))["y0"] for n in (1, 4, 6, 132)
    ]
    for other in made[1:]:
        np.testing.assert_array_equal(other.view(np.uint16), made[0].view(np.uint16))
