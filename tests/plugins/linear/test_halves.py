"""linear where a bf16 n-tile is dealt in halves: a few bf16 columns beside many NVFP4 ones."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from emulator.compiler import COMPILER
from emulator.runner import Emulator
from support import kernel_runner
from support.coverings import pairwise, some
from support.op_cases import OpCase, weight_case

from thor_dflash.core.tensors import Array, DType
from thor_dflash.plugins import LINEAR
from thor_dflash.plugins.launch import Device

BF16 = DType.BF16.numpy

emulated = pytest.mark.skipif(COMPILER is None, reason="needs g++ (Debian package g++)")


def check(call: kernel_runner.Call, on: Device, seed: int = 0) -> None:
    kernel_runner.compare(LINEAR, kernel_runner.launch(call, Emulator(seed), on), call.want)


THIN = (("nvfp4", 256), ("bfloat16", 48), ("bfloat16", 44))
"""Kind and columns of each segment. The bf16 columns are three halves of an n-tile, the last not
full."""


def thin(rows: int, k: int, segments: Sequence[tuple[str, int]] = THIN) -> OpCase:
    rng = np.random.default_rng(rows)
    inputs: dict[str, Array] = {"x": rng.standard_normal((rows, k)).astype(BF16)}
    for i, (kind, n) in enumerate(segments):
        inputs |= weight_case(rng, kind, n, k, i)
    return OpCase("thin", inputs, {"segments": len(segments)})


@emulated
@pairwise(quick=1, rows=[1, 16, 32], k=[16, 128, 320, 1152], multiprocessors=[3, 5, 40])
def test_halves_of_bf16_tiles_equal_the_reference(rows: int, k: int, multiprocessors: int) -> None:
    check(kernel_runner.call_of(LINEAR, thin(rows, k)), Device((9, 0), multiprocessors), rows)


@emulated
@pytest.mark.parametrize("k", some([128, 384], [384]))
def test_no_half_is_read_beyond_its_end(k: int) -> None:
    """The last half n-tile lies at the end of the packed weight, where only half of each slot is
    its own.
    """
    check(
        kernel_runner.call_of(LINEAR, thin(16, k, [("nvfp4", 256), ("bfloat16", 120)])),
        Device((9, 0), 8),
    )
