"""gdn that leaves its rows for the next product, and products that take rows without the factors of
their heads.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
from emulator.compiler import COMPILER
from emulator.runner import Emulator
from support.coverings import pairwise, some
from support.gdn_cases import case_of, poisoned
from support.gdn_epilogue_calls import HEAD, check_left, finishing, normed_case, taking
from support.kernel_runner import call_of, compare, launch, shaped
from support.linear_shapes import BF16, SHAPES
from support.row_law import same_bits

from thor_dflash.core.tensors import DType
from thor_dflash.plugins import GDN, LINEAR
from thor_dflash.plugins.contract import Attributes
from thor_dflash.plugins.gdn.launch import refuse
from thor_dflash.plugins.launch import H100, THOR, CallSite, Device, Shaped
from thor_dflash.plugins.linear import decode_launch
from thor_dflash.plugins.linear.launch import refuse as refuse_product
from thor_dflash.plugins.linear.layout import PackedLayout, _layout
from thor_dflash.plugins.linear.partition import Partition, _dealt, clusters, lanes, partition

emulated = pytest.mark.skipif(COMPILER is None, reason="needs g++ (Debian package g++)")
SEVERAL = Device((9, 0), 12)


@emulated
@pairwise(
    quick=3,
    wide=[False, True],
    shape=[
        (3, (3, 9), "records"), (8, (1, 3), "states"), (32, (1, 3), "records"),
        (1, (1, 2), "records"), (2, (1, 1), "records"), (7, (2, 6), "records"),
        (16, (1, 5), "records"), (16, (2, 6), "records"), (31, (1, 3), "records"),
    ],
)  # fmt: skip
def test_gdn_leaves_rows_for_the_next_product(
    wide: bool, shape: tuple[int, tuple[int, int], str]
) -> None:
    """And all its other results keep their bits, in any order of threads."""
    rows, heads, saves = shape
    offset = float(not wide)
    rng = np.random.default_rng(rows)
    weight = rng.normal(1 - offset, 0.2, HEAD).astype(np.float32 if wide else BF16)
    case = poisoned(case_of(rows, rows, 4, 3, heads, saves=saves))
    with np.errstate(invalid="ignore"):  # the reference of poisoned records
        plain = call_of(GDN, case)
    call = finishing(plain, weight, offset)
    alone = launch(plain, Emulator(0), H100)
    for seed, device in ((rows, THOR), (rows + 1, H100)):
        got = launch(call, Emulator(seed), device)
        same_bits(got, alone)
        check_left(call, got, offset)


@emulated
@pytest.mark.parametrize("late", [1 << 16, (1 << 16) + 5])
def test_a_late_warp_of_gdn_changes_nothing(late: int) -> None:
    call = finishing(call_of(GDN, case_of(5, 13, 4, 3, (1, 3))), np.ones(HEAD, BF16))
    same_bits(launch(call, Emulator(late), H100), launch(call, Emulator(0), H100))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mode": "prefill"}, "gdn.y0_slabs must be of a verify (got mode prefill)"),
        ({"next_gate": None}, "gdn.next_gate must be bfloat16 with y0_slabs (got none)"),
        ({"y0_squares": None}, "gdn.y0_squares must be (2, 32, 8) with y0_slabs (got none)"),
        ({"y0_squares": (2, 16, 8)},
         "gdn.y0_squares must be (2, 32, 8) with y0_slabs (got (2, 16, 8))"),
        ({"next_norm_weight": (256,)},
         "gdn.next_norm_weight must be (128,) with y0_slabs (got (256,))"),
        ({"next_norm_weight": DType.F16},
         "gdn.next_norm_weight must be bfloat16 or float32 with y0_slabs (got float16)"),
    ],
)  # fmt: skip
def test_rows_that_gdn_cannot_finish_are_refused(
    change: Mapping[str, str | DType | tuple[int, ...] | None], message: str
) -> None:
    site = finishing(call_of(GDN, case_of(1, 2, 2, 1)), np.ones(HEAD, BF16)).site
    assert refuse(site) == ""
    ports = dict(site.ports)
    mode = site.attributes.values | {n: x for n, x in change.items() if isinstance(x, str)}
    for name, dtype in change.items():
        if dtype is None:
            del ports[name]
        elif isinstance(dtype, DType):
            ports[name] = Shaped(dtype, ports[name].shape)
        elif isinstance(dtype, tuple):
            ports[name] = Shaped(ports[name].dtype, dtype)
    assert refuse(CallSite(GDN, type(site.attributes)(mode), ports)) == message


@emulated
@pairwise(
    quick=3,
    rows=[1, 16, 32, 5, 17],
    shape=[
        (1, 128, THOR),  # the first of two blocks has no head
        (9, 320, H100),
        (7, 2048, Device((9, 0), 1)),  # several items, one after the other
        (3, 320, SEVERAL),
        (10, 640, SEVERAL),
        (24, 5120, H100),
    ],
)
def test_a_product_applies_the_factors_of_heads(rows: int, shape: tuple[int, int, Device]) -> None:
    heads, columns, device = shape
    call = taking(normed_case(rows, heads, columns))
    got = launch(call, Emulator(rows), device)
    compare(LINEAR, got, call.want, nearest=False)


@emulated
@pairwise(quick=3, rows=[3, 16, 32], parts=[2, 4, 8], size=[(8, 2), (4, 3)])
def test_any_cut_applies_the_factors_of_heads(
    rows: int, parts: int, size: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Items of different numbers of n-tiles, and blocks of different numbers of heads."""
    warps, each = size

    def cut(plan: PackedLayout, multiprocessors: int, *, by_head: bool) -> Partition:
        assert by_head
        made = Partition(warps, each, parts, (), by_head)
        dealt = _dealt(plan, made, clusters(parts, multiprocessors, each), 1)
        assert len({item.piece.tiles for items in dealt.clusters for item in items}) > 1
        return dealt

    monkeypatch.setattr(decode_launch, "partition", cut)
    call = taking(normed_case(rows, 11, 1344))
    three = Device((9, 0), 3)
    [one] = decode_launch.decode_launches(
        call.site, three, decode_launch.FusedEpilogue(decode_launch.Epilogue.RESIDUAL, ("y0",))
    )
    assert (one.defines["HEAD_SCALE"], one.defines["ROW_SCALE"]) == (1, 0)
    got = launch(call, Emulator(rows), three)
    compare(LINEAR, got, call.want, nearest=False)


def test_two_warps_share_the_columns_of_an_n_tile_whatever_the_item() -> None:
    """A stage is then one step, hence one head (Item::phase_bits in pipeline.cuh)."""
    plan = _layout(*SHAPES["out_proj"])
    for multiprocessors in (*range(5, 33), 60, 132):
        cut = partition(plan, multiprocessors, by_head=True)
        shared = {lanes(plan, item.piece, cut) for items in cut.clusters for item in items}
        assert shared == {cut.warps // 2}


@emulated
@pytest.mark.parametrize("device", [SEVERAL, H100])
def test_heads_may_have_values_of_any_size(device: Device) -> None:
    """From all zero to 1e15 times as large as others: each has a norm of its own."""
    sizes = np.array([1, 0, 1e-12, 1e3, 1e-2, 1e15, 0, 1, 1e-30, 5])
    call = taking(normed_case(16, len(sizes), 320, sizes))
    got = launch(call, Emulator(1), device)
    compare(LINEAR, got, call.want, nearest=False)


@emulated
@pytest.mark.parametrize("large", some(range(7), [0, 6]))
def test_squares_of_a_head_may_overflow(large: int) -> None:
    """The true norm is not known then, but the row is finite, as it is from the separate launch.
    Blocks have up to two heads, of which either may be the large one.
    """
    sizes = np.ones(7)
    sizes[large] = 1e20
    with np.errstate(over="ignore"):
        call = taking(normed_case(16, 7, 320, sizes))
    assert np.isinf(call.inputs["x_squares"][large, :16]).all()
    for device in (SEVERAL, Device((9, 0), 1)):
        assert np.isfinite(launch(call, Emulator(1), device)["y0"].astype(np.float32)).all()


@emulated
@pairwise(quick=2, bad=[np.nan, np.inf], place=[(16, 3), (20, 17), (32, 15)])
def test_a_row_that_is_not_finite_spoils_no_other(bad: float, place: tuple[int, int]) -> None:
    rows, one = place
    case = normed_case(rows, 5, 320)
    want = launch(taking(case), Emulator(0), SEVERAL)["y0"]
    x = case.inputs["x"].copy()
    x[one, 200] = bad
    with np.errstate(invalid="ignore"):
        call = taking(type(case)(case.name, {**case.inputs, "x": x}, case.attributes))
    got = launch(call, Emulator(0), SEVERAL)["y0"]
    assert not np.isfinite(got[one].astype(np.float32)).any()
    others = np.arange(rows) != one
    np.testing.assert_array_equal(got[others].view(np.uint16), want[others].view(np.uint16))


@emulated
@pytest.mark.parametrize("most", [16, 32])
def test_a_row_by_head_does_not_depend_on_how_many_there_are(most: int) -> None:
    whole = taking(normed_case(most, 5, 320))
    want = launch(whole, Emulator(0), SEVERAL)["y0"]
    for rows in (most - 15, most - 7, most - 1):
        case = normed_case(most, 5, 320)
        by_row = {n: case.inputs[n][:rows] for n in ("x", "gate", "residual")}
        short = taking(type(case)(case.name, {**case.inputs, **by_row}, case.attributes))
        got = launch(short, Emulator(rows), SEVERAL)["y0"]
        np.testing.assert_array_equal(got.view(np.uint16), want[:rows].view(np.uint16))


def test_rows_without_the_factors_of_other_heads_are_refused() -> None:
    site = taking(normed_case(2, 2, 128)).site
    assert refuse_product(site) == ""
    rule = "must be of an NVFP4 product without swiglu, normed by heads of 128"
    other = Attributes({**site.attributes.values, "head_dim": 64})
    why = refuse_product(CallSite(LINEAR, other, site.ports))
    assert why == f"linear.x_squares {rule} (got head_dim 64)"
    fp8 = {**site.ports, "kinds": Shaped(DType.U8, (0, 2))}
    why = refuse_product(CallSite(LINEAR, site.attributes, fp8))
    assert why == f"linear.x_squares {rule} (got head_dim 128)"
    short = {**site.ports, "x_squares": Shaped(DType.F32, (2, 16, 8))}
    why = refuse_product(CallSite(LINEAR, site.attributes, short))
    assert why == "linear.x_squares must be (2, 32, 8) (got (2, 16, 8))"


@pytest.mark.parametrize(
    ("change", "takes"),
    [({}, True), ({"head_dim": 256}, False), ({"epilogue": "swiglu"}, False)],
)
def test_products_of_other_heads_do_not_take_unscaled_rows(
    change: Mapping[str, str | int], takes: bool
) -> None:
    case = normed_case(2, 2, 128)
    attributes = LINEAR.complete({**case.attributes, **change})
    ports = {name: shaped(x) for name, x in case.inputs.items()}
    assert decode_launch.takes_heads(CallSite(LINEAR, attributes, ports)) == takes
    for kind in (DType.FP8, DType.BF16, DType.F16):
        other = {**ports, "weight0": Shaped(kind, (128, 256))}
        assert not decode_launch.takes_heads(CallSite(LINEAR, attributes, other))
