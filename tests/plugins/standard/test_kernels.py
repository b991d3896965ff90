"""The kernels of plugins/standard on the emulator: standard nodes, unfused parts of a linear."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
from emulator.compiler import EmulatorFault, signatures
from support.closeness import hold_near, near_of
from support.kernel_runner import slabs
from support.one_launch import FOLDER, execute

from thor_dflash.core.tensors import Array, DType
from thor_dflash.plugins.contract import Attribute, Op
from thor_dflash.plugins.launch import (
    THOR,
    CallSite,
    Int,
    Launch,
    Pointer,
    PointerTable,
    Real,
    Shaped,
    Table,
)
from thor_dflash.plugins.standard import fill, unfused
from thor_dflash.plugins.standard.launch import (
    compose,
    concat,
    embed,
    refuse_concat,
    refuse_embed,
)
from thor_dflash.plugins.standard.nodes import ADD, ROWS, SILU_MUL

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


@pytest.mark.parametrize("count", [0, 1, 3, 4])
def test_rows_past_the_count_are_the_fillers_row(count: int) -> None:
    table = np.arange(5 * 16).reshape(5, 16).astype(BF16)
    ids = np.array([2, 0, 4, 1], np.int32)
    out = {"rows": np.empty((4, 16), BF16)}
    execute(embed(4, 5, 16, count=count, filler=3), {"table": table, "ids": ids}, out)
    wanted = [*ids[:count], *[3] * (4 - count)]
    np.testing.assert_array_equal(bits(out["rows"]), bits(table[wanted]))


def test_a_prompt_may_be_longer_than_a_grid_is_wide() -> None:
    assert embed(70_000, 5, 16).grid == (70_000, 1, 1)


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


def test_the_norm_of_the_first_product_is_requested_before_the_previous_kernel_has_ended() -> None:
    """It would be a fault if another kernel wrote it."""
    shapes = {"rows": (1, 64), "y0_slabs": (1, 1, 64)}
    out = {name: np.empty(shape, BF16) for name, shape in shapes.items()}
    out["y0_squares"] = np.empty((2, 32), np.float32)
    x = {"table": np.ones((1, 64), BF16), "ids": np.zeros(1, np.int32)}
    x["next_norm_weight"] = np.ones(64, BF16)
    launch = embed(1, 1, 64, norm=DType.BF16)
    execute(launch, x, out)
    with pytest.raises(EmulatorFault, match=r"embed: .* before wait_for_previous"):
        execute(launch, x, out, fixed=frozenset())


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


def test_what_the_kernels_do_not_take_is_refused() -> None:
    assert refuse_embed(DType.BF16, 320) == ""
    assert "multiple of 8 (got 12)" in refuse_embed(DType.BF16, 12)
    for dtype in (DType.F16, DType.F32):
        assert refuse_embed(dtype, 320) == f"embed.table must be bfloat16 (got {dtype.value})"
    assert refuse_concat((8, 16)) == ""
    assert "multiple of 8 (got 4)" in refuse_concat((8, 4))


# ---- the parts of a linear -----------------------------------------------------------------------
def part(op: Op, inputs: Mapping[str, Array], attributes: Mapping[str, Attribute]) -> CallSite:
    like = next(iter(inputs.values()))
    ports = {n: Shaped(DType.of(x), x.shape) for n, x in {**inputs, "y": like}.items()}
    return CallSite(op, op.complete(attributes), ports)


def close_to(got: Array, op: Op, inputs: Mapping[str, Array], site: CallSite) -> None:
    want = op.reference(inputs, site.attributes)["y"]
    hold_near(op.name, got, want, 2.0**-7, near_of("standard", "y"))


@pytest.mark.parametrize("norm", [BF16, np.float32])
@pytest.mark.parametrize(("head", "gate"), [(0, "none"), (0, "sigmoid"), (128, "silu")])
def test_rows_enter_a_product_as_a_linear_makes_them(head: int, gate: str, norm: type) -> None:
    rng = np.random.default_rng(head)
    inputs = {"x": rng.standard_normal((16, 640)).astype(BF16)}
    inputs["norm_weight"] = rng.standard_normal(head or 640).astype(norm)
    if gate != "none":
        inputs["gate"] = rng.standard_normal((16, 640)).astype(BF16)
    site = part(ROWS, inputs, {"head_dim": head, "gate": gate, "norm_offset": 1.0})
    assert unfused.refuse_rows(site) == ""
    out = {"y": np.empty((16, 640), BF16)}
    execute(unfused.rows(site), inputs, out, seed=2)
    close_to(out["y"], ROWS, inputs, site)


@pytest.mark.parametrize(
    ("head", "width", "types", "why"),
    [
        (8, 640, {}, ""),
        (256, 1280, {}, ""),
        (640, 640, {"norm_weight": DType.F32}, ""),
        (48, 480, {}, "rows.head_dim must be 0, the width or one of "),
        (512, 1024, {}, "rows.head_dim must be 0, the width or one of "),
        (0, 636, {}, "rows.width must be a multiple of 8 (got 636)"),
        (0, 640, {"x": DType.F16}, "rows.x must be bfloat16 (got float16)"),
        (0, 640, {"gate": DType.F32}, "rows.gate must be bfloat16 (got float32)"),
        (
            0,
            640,
            {"norm_weight": DType.F16},
            "rows.norm_weight must be bfloat16 or float32 (got float16)",
        ),
    ],
)
def test_rows_that_the_kernel_does_not_take_are_refused(
    head: int, width: int, types: Mapping[str, DType], why: str
) -> None:
    shapes = {"x": (2, width), "gate": (2, width), "norm_weight": (head or width,)}
    ports = {n: Shaped(types.get(n, DType.BF16), shape) for n, shape in shapes.items()}
    refused = unfused.refuse_rows(CallSite(ROWS, ROWS.complete({"head_dim": head}), ports))
    assert refused.startswith(why) if why else not refused


@pytest.mark.parametrize("op", [ADD, SILU_MUL], ids=lambda op: op.name)
def test_pairs_that_the_kernels_do_not_take_are_refused(op: Op) -> None:
    def refused(width: int, dtype: DType) -> str:
        ports = {n: Shaped(dtype, (1, width)) for n in "aby"}
        return unfused.refuse_pairs(CallSite(op, op.complete({}), ports))

    assert refused(8, DType.BF16) == ""
    assert refused(12, DType.BF16) == f"{op.name}.width must be a multiple of 8 (got 12)"
    assert refused(8, DType.F16) == f"{op.name}.a must be bfloat16 (got float16)"


@pytest.mark.parametrize("shape", [(1, 8), (16, 520), (70, 320)])
@pytest.mark.parametrize("op", [ADD, SILU_MUL], ids=lambda op: op.name)
def test_an_epilogue_in_a_launch_of_its_own_rounds_once(op: Op, shape: tuple[int, int]) -> None:
    rng = np.random.default_rng(shape[1])
    inputs = {name: (rng.standard_normal(shape) * 9).astype(BF16) for name in "ab"}
    inputs["a"][:, :4] = 88, 300, -88, -300
    site = part(op, inputs, {})
    out = {"y": np.empty(shape, BF16)}
    execute(unfused.pairs(site), inputs, out, seed=1)
    close_to(out["y"], op, inputs, site)


# ---- all of them ---------------------------------------------------------------------------------
LAUNCHES = (
    embed(16, 50, 320),
    concat(16, (320, 320)),
    compose(16),
    unfused.rows(part(ROWS, {"x": np.empty((16, 640), BF16)}, {"gate": "silu"})),
    *(unfused.pairs(part(op, {"a": np.empty((16, 640), BF16)}, {})) for op in (ADD, SILU_MUL)),
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


@pytest.mark.parametrize("arch", ["sm_90", "sm_110"])
def test_every_kernel_compiles_without_spills(arch: str) -> None:
    pytest.importorskip("cuda.bindings.nvrtc", reason="needs NVRTC (pip install cuda-bindings)")
    from thor_dflash.plugins.cuda.compile import compile_source

    for one in LAUNCHES:
        usage = compile_source(FOLDER / one.source, one.defines, arch).usage
        assert usage[one.kernel].spilled == 0
