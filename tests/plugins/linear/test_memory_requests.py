"""What linear's few-row kernel requests of memory, and where it puts results, at any size: its own
functions, with requests counted instead of made.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from emulator import runner
from emulator.compiler import COMPILER, EmulatorFault
from emulator.runner import Emulator
from support import kernel_runner
from support.coverings import some
from support.kernel_cases import cases_of
from support.linear_shapes import N4

from thor_dflash.core.tensors import Array
from thor_dflash.plugins import LINEAR
from thor_dflash.plugins.launch import THOR
from thor_dflash.plugins.linear import decode_launch
from thor_dflash.plugins.linear.layout import PackedLayout, WeightKind, _layout
from thor_dflash.plugins.linear.partition import Partition, WorkTile, partition

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++ (Debian package g++)")
PROBES = "linear_probes.cu"
UNIT = 64
"""Bytes whose requests are counted together, as in the probes."""
COMMON = {"WARPS": 8, "PARTS": 2, "MANY": 1, "TILES": 0, "LANES": 4, "EPILOGUE": 0, "ROW_SCALE": 0}
COMMON |= {"LOADED": 2, "HEAD_SCALE": 0, "K_SIZE": 128}
FP8, BF16 = WeightKind.FP8, WeightKind.BF16


def probe(
    kernel: str,
    grid: int,
    threads: int,
    *arguments: Array | int,
    parts: int = 2,
    narrow: int = 0,
    full: int = 1,
    k: int = 128,
) -> None:
    """Run a kernel of the probes: eight multiplying warps, 16 rows if `full`, else up to 15."""
    kinds = 1 << N4 if narrow else 7
    defines = {"ROW_TILES": 1, "FULL": full, "NEXT": 0, "KINDS": kinds, "NARROW": narrow}
    known = {**COMMON, **defines, "PARTS": parts, "K_SIZE": k}
    runner.probe(PROBES, kernel, *arguments, blocks=grid, threads=threads, **known)


def requested(plan: PackedLayout, cut: Partition, rows: int, first: int = 0) -> tuple[Array, Array]:
    """How often each UNIT of a packed weight, from byte `first` on, is requested by the clusters
    whose pieces lie there, as data read once and as data that others read too; and of the rows, by
    each cluster.
    """
    table = np.ascontiguousarray(cut.item_table())
    counts = np.zeros(plan.nbytes - first, np.uint8)
    slabs = np.zeros((len(table), *decode_launch.slabs(rows, plan.k)), np.uint16).view(np.uint8)
    probe(
        "requested", len(table) * cut.parts, 32,
        counts, slabs, table, cut.most_items, rows, first // 512,
        parts=cut.parts, narrow=int(bool(plan.narrow)), full=int(rows == 16), k=plan.k,
    )  # fmt: skip
    weights, given = (x.reshape(-1, UNIT)[:, :2] for x in (counts, slabs))
    return weights, given.reshape(len(table), -1, 2)


MIXED = 1152, (N4, FP8, BF16), (320, 192, 64), False
GATE_UP = 128, (N4, N4), (17_408, 17_408), True
Product = tuple[int, tuple[WeightKind, ...], tuple[int, ...], bool]


@pytest.mark.parametrize(
    ("shape", "multiprocessors", "rows"),
    some([(MIXED, 2, 16), (MIXED, 20, 5), (GATE_UP, 20, 16)], [(MIXED, 20, 5), (GATE_UP, 20, 16)]),
)
def test_weights_are_requested_once_and_rows_kept_for_every_item(
    shape: Product, multiprocessors: int, rows: int
) -> None:
    """Of n-tiles of every kind, of halves of bf16 ones, of narrow tiles."""
    plan = _layout(*shape)
    cut = partition(plan, multiprocessors)
    weights, given = requested(plan, cut, rows)
    assert (weights == (1, 0)).all()
    assert all((x == (0, len(items))).all() for x, items in zip(given, cut.clusters, strict=True))


@pytest.mark.parametrize("kind", WeightKind)
def test_a_weight_may_have_more_bytes_than_an_int32_can_count(kind: WeightKind) -> None:
    plan = _layout(5120, (kind,), (7 * 248_320 >> kind,), False)
    last = plan.groups[-1]
    assert 2**32 < last.offset < plan.nbytes
    items = tuple(WorkTile(piece) for piece in last.pieces(1))
    weights, _ = requested(plan, Partition(8, 2, 2, (items,)), 16, last.offset)
    assert (weights == (1, 0)).all()


@pytest.mark.parametrize(
    "name", some(["more_residual_nvfp4_16_of_640", "more_norm_5_of_640"], ["more_norm_5_of_640"])
)
def test_weights_are_requested_before_the_previous_kernel_has_ended(name: str) -> None:
    """So there is a fault if weights are something that the previous kernel may have written."""

    def written(
        buffers: Sequence[kernel_runner.Buffer], steps: Sequence[kernel_runner.Step]
    ) -> None:
        for buffer in buffers:
            buffer.from_kernels |= buffer.name == "packed"
        Emulator(0)(buffers, steps)

    call = kernel_runner.call_of(LINEAR, cases_of(LINEAR)[name])
    kernel_runner.launch(call, Emulator(0), THOR)
    with pytest.raises(EmulatorFault, match=r"copy_bulk: .* before wait_for_previous"):
        kernel_runner.launch(call, written, THOR)
