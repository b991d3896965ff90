"""linear with slim blocks: four warps that multiply instead of eight, and three blocks instead of
two on a multiprocessor.
"""

from __future__ import annotations

import numpy as np
import pytest
from emulator.compiler import COMPILER
from emulator.runner import Emulator
from support import kernel_runner
from support.coverings import pairwise
from support.kernel_cases import CANCELLED, cases_of
from support.op_cases import OpCase, weight_case

from thor_dflash.core.tensors import DType
from thor_dflash.plugins import LINEAR
from thor_dflash.plugins.launch import Device
from thor_dflash.plugins.linear import decode_launch
from thor_dflash.plugins.linear.layout import PackedLayout
from thor_dflash.plugins.linear.partition import Partition, _dealt, clusters

emulated = pytest.mark.skipif(COMPILER is None, reason="needs g++ (Debian package g++)")


def residual(rows: int, n: int, k: int, kind: str = "nvfp4") -> OpCase:
    rng = np.random.default_rng(rows)
    x = {"x": rng.standard_normal((rows, k)).astype(DType.BF16.numpy)}
    x["residual"] = rng.standard_normal((rows, n)).astype(DType.BF16.numpy)
    return OpCase("slim", x | weight_case(rng, kind, n, k), {"epilogue": "residual"})


@emulated
@pairwise(
    quick=1,
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
    quick=1,
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
