"""Kernels that leave memory idle prefetch the weight of the next product into the L2 cache."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter

import numpy as np
import pytest
from emulator.compiler import COMPILER
from emulator.runner import Emulator
from support.coverings import some
from support.kernel_cases import cases_of
from support.kernel_runner import Buffer, Call, Step, call_of, launch, rule_of
from support.prefetch_calls import PACKED, fetching, of_few_rows
from support.row_law import same_bits

from thor_dflash.core.tensors import Array, DType
from thor_dflash.plugins import GDN, LINEAR, VERIFY_ATTENTION, Op
from thor_dflash.plugins.launch import (
    H100,
    MOST_PREFETCHED,
    PREFETCHED,
    THOR,
    CallSite,
    Device,
    Int,
    Pointer,
    Shaped,
    Table,
    prefetch_next,
)
from thor_dflash.plugins.linear import decode_launch, layout, pack
from thor_dflash.plugins.linear.launch import launches
from thor_dflash.plugins.linear.layout import WeightKind
from thor_dflash.plugins.linear.partition import halves, partition

emulated = pytest.mark.skipif(COMPILER is None, reason="needs g++ (Debian package g++)")
OP = attrgetter("name")
operators = pytest.mark.parametrize("op", [GDN, VERIFY_ATTENTION], ids=OP)


@emulated
@pytest.mark.parametrize("op", some([GDN, VERIFY_ATTENTION], [VERIFY_ATTENTION]), ids=OP)
def test_prefetching_changes_no_result(op: Op) -> None:
    call = next(iter(of_few_rows(op).values()))
    same_bits(launch(fetching(call), Emulator(1), THOR), launch(call, Emulator(1), THOR))


@emulated
@pytest.mark.parametrize(
    ("op", "name"),
    [
        (GDN, "more_verify_16_rows_fold_2_of_16_records_bfloat16"),
        pytest.param(
            VERIFY_ATTENTION,
            "more_16_rows_at_1_4x2x256_float8_e4m3fn",
            marks=pytest.mark.emulator,
        ),
        (VERIFY_ATTENTION, "more_31_rows_at_120_4x2x256_float8_e4m3fn"),
    ],
    ids=["gdn", "blocks_without_work", "blocks_of_the_later_rows"],
)
def test_every_byte_is_fetched_once(op: Op, name: str) -> None:
    """Except for the rest, of less than 16 bytes for each block. Blocks of gdn, all of which have
    work, fetch only after the previous kernel has ended.
    """
    call = fetching(of_few_rows(op)[name])
    counts: list[Array] = []

    def backend(buffers: Sequence[Buffer], steps: Sequence[Step]) -> None:
        (weight,) = (b for b in buffers if b.name == PREFETCHED)
        weight.from_kernels = op is GDN  # then it is a fault to fetch before wait_for_previous
        Emulator(1, PREFETCHED)(buffers, steps)
        counts.append(weight.data.copy())

    launch(call, backend, THOR)
    [found] = counts
    (split,) = (
        one for one in rule_of(op).launches(call.site, THOR) if Pointer(PREFETCHED) in one.arguments
    )
    all_but_rest = int(found.sum())
    assert PACKED - all_but_rest < 16 * math.prod(split.grid)
    np.testing.assert_array_equal(found, np.arange(PACKED) < all_but_rest)


@operators
def test_blocks_share_the_weight(op: Op) -> None:
    call = next(iter(of_few_rows(op).values()))
    assert prefetch_next(call.site, 128) == (Pointer(PREFETCHED), Int(0))
    for nbytes, share in ((100, 0), (128 * 31, 16), (MOST_PREFETCHED + 1, 196_608)):
        site = fetching(call, nbytes).site
        assert prefetch_next(site, 128) == (Pointer(PREFETCHED), Int(share))
    assert MOST_PREFETCHED == 128 * 196_608


def followed(name: str, product: str) -> Call:
    """The call of one case of linear that prefetches the weight of another, which comes next."""
    call, after = (call_of(LINEAR, cases_of(LINEAR)[case]) for case in (name, product))
    sized = pack.packed(after.site)
    ports = {**{p: x for p, x in after.site.ports.items() if "0" not in p or p == "y0"}, **sized}
    call = fetching(call, sized["packed"].nbytes)
    return replace(call, site=replace(call.site, following=replace(after.site, ports=ports)))


# Cases of linear that follow.
PRODUCTS = ("more_swiglu_16_of_640", "more_mixed_16_of_640", "more_residual_fp8_16_of_640")


@emulated
@pytest.mark.parametrize("product", PRODUCTS)
def test_a_product_fetches_what_the_next_reads_first(product: str) -> None:
    name = "more_norm_5_of_640"
    alone = launch(call_of(LINEAR, cases_of(LINEAR)[name]), Emulator(1), THOR)
    call = followed(name, product)
    *_, pieces, count = launches(call.site, THOR)[-1].arguments
    first = decode_launch.first_read(call.site.following, THOR)
    assert isinstance(pieces, Table)
    np.testing.assert_array_equal(pieces.values, first)
    assert count == Int(len(first)) != Int(0)
    same_bits(launch(call, Emulator(1), THOR), alone)


@pytest.mark.parametrize("device", [THOR, H100], ids=["thor", "h100"])
@pytest.mark.parametrize("swiglu", [False, True])
@pytest.mark.parametrize("k", [5120, 128])
def test_a_product_fetches_what_every_block_asks_for_first(
    device: Device, swiglu: bool, k: int
) -> None:
    """Gate and up of the 27B, and two plain segments of the same size; and with
    one step of K, for one block of a cluster.
    """
    plan = layout._layout(k, (WeightKind.NVFP4,) * 2, (17408, 17408), swiglu)
    ports = {"x": Shaped(DType.BF16, (16, k)), "kinds": Shaped(DType.U8, (1, 1))}
    for i in range(1 if swiglu else 2):
        ports[f"y{i}"] = Shaped(DType.BF16, (16, 17408))
    epilogue = {"epilogue": "swiglu" if swiglu else "none", "segments": 2}
    found = decode_launch.first_read(CallSite(LINEAR, LINEAR.complete(epilogue), ports), device)
    fetched = np.zeros(plan.nbytes // 512, np.int8)
    for at, size in found.tolist():
        fetched[at : at + size] += 1
    assert fetched.max() == 1
    cut = partition(plan, device.multiprocessors)
    for items in cut.clusters:
        for run in filter(None, halves(plan, cut.parts)):
            piece = items[0].piece
            at = piece.offset + run.start // 2 * piece.group.step_bytes
            assert fetched[at // 512 : (at + piece.tiles * 4608) // 512].all()
            if (tile := items[0].narrow) is not None:
                at = tile.offset + run.start // 2 * tile.group.step_bytes
                assert fetched[at // 512 : -(-(at + 2304 + 576) // 512)].all()
    assert any(items[0].narrow for items in cut.clusters) == swiglu
