"""linear with slim blocks: four warps that multiply instead of eight, and three blocks instead of
two on a multiprocessor.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from emulator.compiler import COMPILER
from emulator.runner import Emulator
from support import kernel_runner
from support.coverings import pairwise
from support.kernel_cases import CANCELLED, cases_of
from support.linear_shapes import SHAPES

from thor_dflash.core.tensors import DType
from thor_dflash.plugins import LINEAR
from thor_dflash.plugins.contract import OpCase
from thor_dflash.plugins.launch import H100, THOR, Device
from thor_dflash.plugins.linear import decode_launch
from thor_dflash.plugins.linear.layout import PackedLayout, WeightKind, _layout
from thor_dflash.plugins.linear.partition import Partition, _dealt, clusters, partition
from thor_dflash.plugins.linear.reference import weight_case

emulated = pytest.mark.skipif(COMPILER is None, reason="needs g++ (Debian package g++)")


def residual(rows: int, n: int, k: int, kind: str = "nvfp4") -> OpCase:
    rng = np.random.default_rng(rows)
    x = {"x": rng.standard_normal((rows, k)).astype(DType.BF16.numpy)}
    x["residual"] = rng.standard_normal((rows, n)).astype(DType.BF16.numpy)
    return OpCase("slim", x | weight_case(rng, kind, n, k), {"epilogue": "residual"})


@emulated
@pairwise(
    quick=4,
    rows=[1, 16, 19, 32],
    shape=[
        (200, 1088, "nvfp4", 7, 8),
        (640, 640, "nvfp4", 8, 4),
        (320, 64, "fp8", 4, 2),
        (320, 64, "bfloat16", 7, 2),
        (640, 640, "nvfp4", 4, 2),
        (640, 1024, "nvfp4", 16, 8),
        (320, 64, "nvfp4", 2, 2),
    ],
)
def test_slim_blocks_equal_the_reference(rows: int, shape: tuple[int, int, str, int, int]) -> None:
    n, k, kind, multiprocessors, parts = shape
    call = kernel_runner.call_of(LINEAR, residual(rows, n, k, kind))
    on = Device((9, 0), multiprocessors)
    defines = decode_launch.decode_launches(
        call.site, on, decode_launch.FusedEpilogue(decode_launch.Epilogue.RESIDUAL, ("y0",))
    )[-1].defines  # fmt: skip
    assert (defines["WARPS"], defines["PARTS"]) == (4, parts)
    kernel_runner.compare(LINEAR, kernel_runner.launch(call, Emulator(rows), on), call.want)


@emulated
@pairwise(
    quick=4,
    name=[
        *("more_mixed_16_of_640", "more_swiglu_32_of_640", "more_cancelled", "more_norm_5_of_640"),
        *("more_swiglu_16_of_640", "more_mixed_32_of_640", "more_norm_31_of_640"),
    ],
    parts=[2, 4, 8],
    seed=[0, 1, 2],
)
def test_any_product_may_be_made_by_slim_blocks(
    name: str, seed: int, parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several items per cluster, of one n-tile, of two, and of half a bf16 n-tile."""

    def slim(plan: PackedLayout, multiprocessors: int, *, by_head: bool) -> Partition:
        cut = Partition(4, 3, parts, (), by_head)
        return _dealt(plan, cut, clusters(parts, multiprocessors, 3), 1 + seed % 2)

    monkeypatch.setattr(decode_launch, "partition", slim)
    call = kernel_runner.call_of(LINEAR, cases_of(LINEAR)[name])
    got = kernel_runner.launch(call, Emulator(seed), Device((9, 0), 3))
    kernel_runner.compare(LINEAR, got, call.want, nearest=name not in CANCELLED)


@pytest.mark.parametrize("k", [6144, 17408])
def test_few_columns_get_slim_blocks_on_an_h100_and_not_on_a_thor(k: int) -> None:
    plan = _layout(k, (WeightKind.NVFP4,), (5120,), False)
    cut = partition(plan, H100.multiprocessors)
    assert (cut.warps, cut.parts) == (4, 8)
    assert [len(items) for items in cut.clusters] == [1] * 40
    assert partition(plan, THOR.multiprocessors).warps == 8


@pytest.mark.parametrize("parts", [2, 4, 8])
@pytest.mark.parametrize(("warps", "each"), [(8, 2), (4, 3)])
def test_blocks_fit_on_a_multiprocessor(warps: int, each: int, parts: int) -> None:
    """A multiprocessor has 228 KB, and a block takes 1 KB more than it asks for. Source: CUDA
    programming guide.
    """
    gate_and_up, out = _layout(*SHAPES["gate_up"]), _layout(*SHAPES["out_proj"])
    assert gate_and_up.narrow
    cuts = [(out, by_head) for by_head in (False, True)]
    cuts += [(gate_and_up, False)] if warps == 8 else []
    for (plan, by_head), tiles in itertools.product(cuts, (1, 2)):
        shared = decode_launch._shared(tiles, plan, Partition(warps, each, parts, (), by_head))
        assert each * (shared + 1024) <= 228 * 1024
