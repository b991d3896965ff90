"""draft_conv's kernel beyond its contract: rows for the next product, and which rows it mixes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from emulator.compiler import COMPILER
from emulator.runner import Emulator
from support.dflash2_cases import conv_case
from support.kernel_runner import Call, call_of, compare, launch, shaped, slabs, squares
from support.op_cases import OpCase
from support.row_law import same_bits

from thor_dflash.core.tensors import DType
from thor_dflash.plugins import DRAFT_CONV
from thor_dflash.plugins.contract import Attributes
from thor_dflash.plugins.launch import THOR, CallSite, Shaped

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")

BF16 = DType.BF16.numpy


def conv(rows: int, hidden: int = 2112) -> Call:
    rng = np.random.default_rng(rows)
    made = conv_case(rng, "next", rows, hidden, side=1, residual=True, dtype=DType.BF16)
    return call_of(DRAFT_CONV, OpCase(*made))


@pytest.mark.parametrize(
    ("rows", "wide"),
    [(8, True), *(pytest.param(n, False, marks=pytest.mark.slow) for n in (16, 1))],
)
def test_rows_can_be_left_normed_for_the_next_product(rows: int, wide: bool) -> None:
    call = conv(rows)
    weight = np.random.default_rng(0).normal(0, 0.2, 2112).astype(np.float32 if wide else BF16)
    factor = 1 + weight.astype(np.float32)
    left = slabs((call.want["y"].astype(np.float32) * factor).astype(BF16))
    want = {**call.want, "y0_slabs": left, "y0_squares": squares(call.want["y"])}
    ports = {**call.site.ports, **{name: shaped(x) for name, x in want.items()}}
    ports["next_norm_weight"] = Shaped(DType.of(weight), weight.shape)
    attributes = Attributes({**call.site.attributes.values, "next_norm_offset": 1.0})
    site = CallSite(DRAFT_CONV, attributes, ports)
    inputs = {**call.inputs, "next_norm_weight": weight}
    got = launch(replace(call, site=site, inputs=inputs, want=want), Emulator(0), THOR)
    compare(DRAFT_CONV, {"y": got["y"]}, {"y": call.want["y"]})
    made = (got["y"].astype(np.float32) * factor).astype(BF16)
    np.testing.assert_array_equal(got["y0_slabs"], slabs(made))
    np.testing.assert_allclose(got["y0_squares"], squares(got["y"]), rtol=1e-6)


def test_rows_can_be_left_as_they_are_for_the_next_product() -> None:
    call = conv(8)
    want = {**call.want, "y0_slabs": slabs(call.want["y"])}
    ports = {**call.site.ports, "y0_slabs": shaped(want["y0_slabs"])}
    site = CallSite(DRAFT_CONV, call.site.attributes, ports)
    got = launch(replace(call, site=site, want=want), Emulator(0), THOR)
    np.testing.assert_array_equal(got["y0_slabs"], slabs(got["y"]))


def test_a_row_sees_itself_and_the_row_before_it() -> None:
    call = conv(8, 192)
    got = launch(call, Emulator(0), THOR)["y"]
    x = call.inputs["x"].copy()
    x[3] += 1
    other = launch(replace(call, inputs={**call.inputs, "x": x}), Emulator(0), THOR)["y"]
    changed = (got.view(np.uint16) != other.view(np.uint16)).any(axis=1)
    assert np.flatnonzero(changed).tolist() == [3, 4]
    rows = {n: call.inputs[n][:5] for n in ("x", "dynamic", "residual")}
    part = call_of(DRAFT_CONV, OpCase("part", {**call.inputs, **rows}, call.site.attributes.values))
    same_bits(launch(part, Emulator(0), THOR), {"y": got[:5]})
