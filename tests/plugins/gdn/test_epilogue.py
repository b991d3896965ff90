"""gdn that leaves its rows for the next product, and products that take rows without the factors of
their heads.
"""

from __future__ import annotations

import numpy as np
import pytest
from emulator.compiler import COMPILER
from emulator.runner import Emulator
from support.coverings import pairwise, some
from support.gdn_cases import case_of, poisoned
from support.gdn_epilogue_calls import HEAD, check_left, finishing, normed_case, taking
from support.kernel_runner import call_of, compare, launch
from support.linear_shapes import BF16
from support.row_law import same_bits

from thor_dflash.plugins import GDN, LINEAR
from thor_dflash.plugins.launch import H100, THOR, Device
from thor_dflash.plugins.linear import decode_launch
from thor_dflash.plugins.linear.layout import PackedLayout
from thor_dflash.plugins.linear.partition import Partition, _dealt, clusters

emulated = pytest.mark.skipif(COMPILER is None, reason="needs g++ (Debian package g++)")
SEVERAL = Device((9, 0), 12)


@emulated
@pairwise(
    quick=1,
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
@pairwise(
    quick=1,
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
@pairwise(quick=1, rows=[3, 16, 32], parts=[2, 4, 8], size=[(8, 2), (4, 3)])
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


@emulated
@pytest.mark.parametrize("device", some([SEVERAL, H100], [SEVERAL]))
def test_heads_may_have_values_of_any_size(device: Device) -> None:
    """From all zero to 1e15 times as large as others: each has a norm of its own."""
    sizes = np.array([1, 0, 1e-12, 1e3, 1e-2, 1e15, 0, 1, 1e-30, 5])
    call = taking(normed_case(16, len(sizes), 320, sizes))
    got = launch(call, Emulator(1), device)
    compare(LINEAR, got, call.want, nearest=False)


@emulated
@pytest.mark.parametrize("most", some([16, 32], [32]))
def test_a_row_by_head_does_not_depend_on_how_many_there_are(most: int) -> None:
    whole = taking(normed_case(most, 5, 320))
    want = launch(whole, Emulator(0), SEVERAL)["y0"]
    for rows in (most - 15, most - 7, most - 1):
        case = normed_case(most, 5, 320)
        by_row = {n: case.inputs[n][:rows] for n in ("x", "gate", "residual")}
        short = taking(type(case)(case.name, {**case.inputs, **by_row}, case.attributes))
        got = launch(short, Emulator(rows), SEVERAL)["y0"]
        np.testing.assert_array_equal(got.view(np.uint16), want[:rows].view(np.uint16))
