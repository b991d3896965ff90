"""The kernels of plugins/standard on the emulator: standard nodes, unfused parts of a linear, and
random fills.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
from emulation import Emulator, signatures
from kernels import CANARY, GUARD, IMMUTABLE, Buffer, Pointers, Step, Value, buffer, slabs
from nearness import hold_near, near_of

from thor_dflash.plugins import LINEAR
from thor_dflash.plugins import standard as room
from thor_dflash.plugins.launch import (
    H100,
    THOR,
    Addresses,
    Argument,
    At,
    Device,
    Int,
    Launch,
    Real,
    Scratch,
    Shaped,
    Site,
    Table,
)
from thor_dflash.plugins.linear.pack import pack
from thor_dflash.plugins.op import Attribute, Op
from thor_dflash.plugins.standard import fill, unfused
from thor_dflash.plugins.standard.launch import (
    compose,
    concat,
    embed,
    refuse_concat,
    refuse_embed,
)
from thor_dflash.plugins.standard.nodes import ADD, ROWS, SILU_MUL
from thor_dflash.tensors import Array, DType

FOLDER = Path(room.__file__).parent
BF16 = DType.BF16.numpy


def value(argument: Argument, ports: Mapping[str, Buffer]) -> Value:
    """An argument as a backend gets it."""
    match argument:
        case At(port):
            return ports.get(port)
        case Addresses(names):
            return Pointers(tuple(ports[name] for name in names))
        case Table(values):
            return buffer("table", values, writable=False, kernels=False)
        case Scratch():
            raise AssertionError("these launches have no scratch")
        case _:
            return argument


def execute(
    one: Launch, inputs: Mapping[str, Array], outputs: Mapping[str, Array], seed: int = 0
) -> None:
    """Run a launch and put its results into `outputs`, whose memory is poisoned before."""
    ports = {n: buffer(n, x, writable=False, kernels=n not in IMMUTABLE) for n, x in inputs.items()}
    ports |= {n: buffer(n, x.nbytes) for n, x in outputs.items()}
    arguments = tuple(value(x, ports) for x in one.arguments)
    tables = [x for x in arguments if isinstance(x, Buffer) and x.name == "table"]
    Emulator(seed=seed)([*ports.values(), *tables], [Step(FOLDER / one.source, one, arguments)])
    for name, x in outputs.items():
        memory = ports[name].memory
        assert np.all(memory[:GUARD] == CANARY), name
        assert np.all(memory[-GUARD:] == CANARY), name
        x.reshape(-1).view(np.uint8)[:] = ports[name].data


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
def part(op: Op, inputs: Mapping[str, Array], attributes: Mapping[str, Attribute]) -> Site:
    like = next(iter(inputs.values()))
    ports = {n: Shaped(DType.of(x), x.shape) for n, x in {**inputs, "y": like}.items()}
    return Site(op, op.complete(attributes), ports)


def close_to(got: Array, op: Op, inputs: Mapping[str, Array], site: Site) -> None:
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
    refused = unfused.refuse_rows(Site(ROWS, ROWS.complete({"head_dim": head}), ports))
    assert refused.startswith(why) if why else not refused


@pytest.mark.parametrize("op", [ADD, SILU_MUL], ids=lambda op: op.name)
def test_pairs_that_the_kernels_do_not_take_are_refused(op: Op) -> None:
    def refused(width: int, dtype: DType) -> str:
        ports = {n: Shaped(dtype, (1, width)) for n in "aby"}
        return unfused.refuse_pairs(Site(op, op.complete({}), ports))

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


# ---- fill --------------------------------------------------------------------------------------
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
        stored = pack(Site(LINEAR, LINEAR.complete({}), ports), arrays)["packed"]
        known.update(scale_bytes(stored.reshape(-1, fill.NVFP4_SLOT)).tolist())
    got = filled(fill.nvfp4(THOR, 40 * fill.NVFP4_SLOT, 5), 40 * fill.NVFP4_SLOT)
    assert set(scale_bytes(got.reshape(-1, fill.NVFP4_SLOT)).tolist()) == known
    assert len(known) == 8


def test_filled_narrow_tiles_have_the_same_scales() -> None:
    size = 40 * fill.NVFP4_SLOT
    slots = filled(fill.nvfp4(THOR, size, 5, fill.NARROW_SLOT), size).reshape(-1, fill.NARROW_SLOT)
    words = np.ascontiguousarray(slots[:, 512:]).view(np.uint32)
    scales = (words << np.uint32(28) | words >> np.uint32(4)).view(np.uint8)
    assert set((scales >> 3).reshape(-1).tolist()) == {0x78 >> 3}
    assert len(np.unique(slots[:, :512])) == 256


def test_filled_codes_have_the_declared_deviation() -> None:
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    scales = np.arange(8, 16) / 16
    promised = np.sqrt(np.mean(values**2) * np.mean(scales**2))
    assert abs(promised - fill.NVFP4_DEVIATION) < 1e-3
    slots = filled(fill.nvfp4(THOR, 40 * fill.NVFP4_SLOT, 5), 40 * fill.NVFP4_SLOT)
    codes = slots.reshape(-1, fill.NVFP4_SLOT)[:, :2048]
    seen = np.bincount(codes.reshape(-1), minlength=256)
    assert abs(seen / seen.mean() - 1).max() < 5 / np.sqrt(seen.mean())


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


def test_filled_fp8_are_numbers_of_deviation_one() -> None:
    assert fill.FP8_DEVIATION == 1
    f32 = filled(fill.f32(THOR, 30_000, 9, 0.0, 1.0), 120_000).view(np.float32)
    got = filled(fill.fp8(THOR, 30_000, 9), 30_000)
    np.testing.assert_array_equal(got, f32.astype(DType.FP8.numpy).view(np.uint8))


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
    At: "pointer",
    Addresses: "pointer",
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
