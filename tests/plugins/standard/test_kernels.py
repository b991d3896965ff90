"""The kernels of plugins/standard on the emulator."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
from emulator.compiler import signatures
from support.kernel_runner import slabs
from support.one_launch import FOLDER, execute

from thor_dflash.core.tensors import Array, DType
from thor_dflash.plugins.launch import (
    THOR,
    Int,
    Launch,
    Pointer,
    PointerTable,
    Real,
    Table,
)
from thor_dflash.plugins.standard import fill
from thor_dflash.plugins.standard.launch import (
    compose,
    concat,
    embed,
)

BF16 = DType.BF16.numpy


def bits(x: Array) -> Array:
    return x.view(np.uint16)


# ---- embed -------------------------------------------------------------------------------------
@pytest.mark.parametrize("hidden", [8, 256, 264, 320, 2560])
@pytest.mark.parametrize("rows", [1, 16, 100])
def test_embedding_rows_are_copied(rows: int, hidden: int) -> None:
    rng = np.random.default_rng(hidden)
    table = rng.standard_normal((50, hidden)).astype(BF16)
    ids = rng.integers(0, 50, rows).astype(np.int32)
    out = {"rows": np.empty((rows, hidden), BF16)}
    execute(embed(rows, 50, hidden), {"table": table, "ids": ids}, out, seed=rows)
    np.testing.assert_array_equal(bits(out["rows"]), bits(table[ids]))


def test_an_id_outside_the_table_makes_its_row_nan_and_no_other() -> None:
    table = np.ones((5, 264), BF16)
    ids = np.array([0, -1, 4, 5, 2**31 - 1, -(2**31), 1], np.int32)
    out = {"rows": np.empty((7, 264), BF16)}
    execute(embed(7, 5, 264), {"table": table, "ids": ids}, out)
    bad = (ids < 0) | (ids >= 5)
    assert np.isnan(out["rows"][bad].astype(np.float32)).all()
    assert (out["rows"][~bad] == 1).all()


@pytest.mark.parametrize("norm", [DType.BF16, DType.F32])
@pytest.mark.parametrize(("rows", "hidden"), [(1, 64), (5, 320), (16, 2560), (32, 256)])
def test_rows_are_left_as_the_first_product_reads_them(rows: int, hidden: int, norm: DType) -> None:
    rng = np.random.default_rng(rows)
    table = rng.standard_normal((50, hidden)).astype(BF16)
    ids = rng.integers(0, 50, rows).astype(np.int32)
    ids[-1] = 50
    weight = rng.standard_normal(hidden).astype(norm.numpy)
    out = {
        "rows": np.empty((rows, hidden), BF16),
        "y0_slabs": np.empty((hidden // 64, rows, 64), BF16),
        "y0_squares": np.empty((hidden // 32, 32), np.float32),
    }
    launch = embed(rows, 50, hidden, norm=norm, offset=1.0)
    execute(launch, {"table": table, "ids": ids, "next_norm_weight": weight}, out, seed=rows)
    want = np.vstack([table, np.full((1, hidden), np.nan, BF16)])[ids]
    x, w = want.astype(np.float32), np.float32(1) + weight.astype(np.float32)
    np.testing.assert_array_equal(out["rows"].astype(np.float32), x)
    left = slabs((x * w).astype(BF16)).astype(np.float32)
    np.testing.assert_array_equal(out["y0_slabs"].astype(np.float32), left)
    squares = (x.astype(np.float64) ** 2).reshape(rows, -1, 32).sum(axis=2).T
    np.testing.assert_allclose(out["y0_squares"][:, :rows], squares, rtol=1e-6)
    assert not out["y0_squares"][:, rows:].any()


# ---- concat, compose ---------------------------------------------------------------------------
@pytest.mark.parametrize("widths", [(8,), (320, 320, 320), (8, 2560, 16)])
@pytest.mark.parametrize("rows", [1, 16, 67])
def test_rows_stand_side_by_side(rows: int, widths: tuple[int, ...]) -> None:
    rng = np.random.default_rng(rows)
    sources = {f"x{i}": rng.standard_normal((rows, w)).astype(BF16) for i, w in enumerate(widths)}
    out = {"y": np.empty((rows, sum(widths)), BF16)}
    execute(concat(rows, widths), sources, out, seed=1)
    np.testing.assert_array_equal(bits(out["y"]), bits(np.concatenate([*sources.values()], axis=1)))


@pytest.mark.parametrize("rows", [1, 2, 16, 33])
def test_a_forced_id_takes_the_place_of_a_draft(rows: int) -> None:
    rng = np.random.default_rng(rows)
    last = np.array([17], np.int32)
    forced = rng.integers(-2, 4, rows).astype(np.int32)
    best = rng.integers(100, 200, rows).astype(np.int32)
    best[::4] = -1  # as for rows with NaN
    out = {"tokens": np.empty(rows, np.int32)}
    execute(compose(rows), {"last": last, "forced": forced, "best": best}, out)
    want = [17, *(f if f >= 0 else max(b, 0) for f, b in zip(forced[:-1], best[1:], strict=True))]
    np.testing.assert_array_equal(out["tokens"], want)


# ---- all of them ---------------------------------------------------------------------------------
LAUNCHES = (
    embed(16, 50, 320),
    concat(16, (320, 320)),
    compose(16),
    fill.nvfp4(THOR, fill.NVFP4_SLOT, 1),
    fill.fp8(THOR, 4, 1),
    fill.bf16(THOR, 1, 1, 0.0, 1.0),
    fill.f32(THOR, 1, 1, 0.0, 1.0),
)
KINDS: Mapping[type, str] = {
    Pointer: "pointer",
    PointerTable: "pointer",
    Table: "pointer",
    Int: "int",
    Real: "real",
}


@pytest.mark.parametrize("one", LAUNCHES, ids=lambda one: one.kernel)
def test_arguments_are_those_of_the_kernel(one: Launch) -> None:
    kinds = tuple(KINDS[type(argument)] for argument in one.arguments)
    assert kinds == signatures(FOLDER / one.source, one.defines)[one.kernel]
