"""How the warps and blocks of a cluster add up their sums of the same columns."""

from __future__ import annotations

import numpy as np
import pytest
from emulator.compiler import COMPILER
from emulator.runner import Emulator
from support import kernel_runner
from support.coverings import some
from support.op_cases import OpCase, weight_case

from thor_dflash.core.tensors import Array, DType
from thor_dflash.plugins import HEAD, LINEAR
from thor_dflash.plugins.head import launch
from thor_dflash.plugins.launch import Device
from thor_dflash.plugins.linear.layout import layout
from thor_dflash.plugins.linear.partition import partition

BF16 = DType.BF16.numpy


@pytest.mark.skipif(COMPILER is None, reason="needs g++ (Debian package g++)")
@pytest.mark.parametrize("rows", some([1, 16, 32], [16]))
@pytest.mark.parametrize(
    ("kind", "columns", "lanes"),
    some(
        [("nvfp4", 256, 4), ("nvfp4", 128, 2), ("bfloat16", 64, 1), ("fp8", 64, 1)],
        [("nvfp4", 256, 4), ("bfloat16", 64, 1)],
    ),
)
def test_equal_columns_have_equal_sums(kind: str, columns: int, lanes: int, rows: int) -> None:
    """Two, four and eight warps have sums of the same columns, and each adds up those of other
    columns. Were it done in another order, the first of two equal logits would not be the best.
    """
    rng = np.random.default_rng(rows)
    inputs: dict[str, Array] = {
        "x": rng.standard_normal((rows, 384)).astype(BF16),
        "norm_weight": np.zeros(384, BF16),
    }
    for name, value in weight_case(rng, kind, columns, 384).items():
        inputs[name] = np.repeat(value[:1], columns, axis=0)
    call = kernel_runner.call_of(HEAD, OpCase("equal", inputs, {"norm_offset": 1.0}))
    on = Device((9, 0), 1)
    [product] = [step for step in launch.launches(call.site, on) if "LANES" in step.defines]
    assert (product.defines["LANES"], product.defines["WARPS"]) == (lanes, 8)
    logits = kernel_runner.launch(call, Emulator(rows), on)["logits"]
    np.testing.assert_array_equal(logits, np.repeat(logits[:, :1], columns, axis=1))
    assert len(np.unique(logits[:, 0])) == rows


@pytest.mark.skipif(COMPILER is None, reason="needs g++ (Debian package g++)")
@pytest.mark.parametrize("rows", some([3, 16, 32], [16]))
def test_every_cluster_counts_its_own_items(rows: int) -> None:
    """Each has three. If the second one counted on from the first, it would wait for sums that came
    before its first item, which nobody has sent.
    """
    rng = np.random.default_rng(rows)
    x = {"x": rng.standard_normal((rows, 256)).astype(BF16)}
    call = kernel_runner.call_of(
        LINEAR, OpCase("counted", x | weight_case(rng, "nvfp4", 1536, 256), {})
    )
    cut = partition(layout(call.site), 2)
    assert [len(items) for items in cut.clusters] == [3, 3]
    for seed in range(3):
        got = kernel_runner.launch(call, Emulator(seed), Device((9, 0), 2))
        kernel_runner.compare(LINEAR, got, call.want)
