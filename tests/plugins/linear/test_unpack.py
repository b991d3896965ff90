"""Unpacking a packed weight gives back the weight as it was before packing."""

from __future__ import annotations

import numpy as np
import pytest
from support.kernel_runner import call_of, in_kernel_types
from support.op_cases import OpCase, weight_case

from thor_dflash.core.tensors import Array
from thor_dflash.plugins import HEAD, LINEAR, Op
from thor_dflash.plugins.linear.unpack import unpack


def stored(name: str, inputs: dict[str, Array]) -> bool:
    """Whether an input is part of a weight."""
    return name.rstrip("0123456789") in ("weight", "block_scale", "row_scale")


def case(op: Op, kinds: tuple[str, ...], widths: tuple[int, ...], k: int, epilogue: str) -> OpCase:
    rng = np.random.default_rng(len(kinds) + k)
    inputs: dict[str, Array] = {"x": rng.standard_normal((16, k)).astype(np.float32)}
    for i, (kind, width) in enumerate(zip(kinds, widths, strict=True)):
        made = weight_case(rng, kind, width, k)
        inputs |= {name.replace("0", str(i)): value for name, value in made.items()}
    attributes: dict[str, int | float | str] = {"segments": len(kinds), "epilogue": epilogue}
    if op is HEAD:
        attributes, inputs["norm_weight"] = {}, np.ones(k, np.float32)
    return OpCase("x", inputs, attributes)


@pytest.mark.parametrize(
    ("op", "kinds", "widths", "k", "epilogue"),
    [
        (LINEAR, ("nvfp4",), (64,), 128, "none"),
        (LINEAR, ("nvfp4",), (200,), 320, "none"),
        (LINEAR, ("fp8",), (72,), 192, "none"),
        (LINEAR, ("bfloat16",), (264,), 128, "none"),
        (LINEAR, ("bfloat16",) * 16, (8,) * 16, 128, "none"),
        (LINEAR, ("nvfp4", "nvfp4", "bfloat16", "fp8"), (520, 48, 8, 16), 256, "none"),
        (LINEAR, ("nvfp4", "nvfp4"), (96, 96), 128, "swiglu"),
        (HEAD, ("nvfp4",), (304,), 128, "none"),
    ],
)
def test_unpacking_gives_back_what_was_packed(
    op: Op, kinds: tuple[str, ...], widths: tuple[int, ...], k: int, epilogue: str
) -> None:
    given = in_kernel_types(op, case(op, kinds, widths, k, epilogue))
    call = call_of(op, given)
    assert call.inputs["kinds"].nbytes == 0, "it tells a launch rule by its shape alone"
    got = unpack(call.site, call.inputs["packed"], call.inputs["scales"])
    want = {n: x for n, x in given.inputs.items() if stored(n, dict(given.inputs))}
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert got[name].dtype == value.dtype
        np.testing.assert_array_equal(got[name].view(np.uint8), value.view(np.uint8), name)


def test_an_fp8_weight_that_is_no_number_is_refused() -> None:
    given = in_kernel_types(LINEAR, case(LINEAR, ("fp8",), (64,), 128, "none"))
    weight = given.inputs["weight0"].copy()
    weight.view(np.uint8)[5, 7] = 0xFF
    with pytest.raises(ValueError, match="weight must be numbers"):
        call_of(LINEAR, OpCase("nan", {**given.inputs, "weight0": weight}, given.attributes))
