"""Rows between gdn and the next product: gdn applies the weight of the product's norm by head and
the silu of its gate, and leaves sums of squares, from which the product computes 1 / rms.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from support.closeness import Near, hold_near
from support.kernel_runner import POISON, Call, call_of, shaped, slabs
from support.linear_shapes import BF16, nvfp4
from support.op_cases import OpCase

from thor_dflash.core.tensors import Array
from thor_dflash.plugins import LINEAR
from thor_dflash.plugins.contract import Attributes
from thor_dflash.plugins.launch import CallSite

HEAD, PIECES, PLACES = 128, 8, 32
"""Columns of a head, its sums of squares, and rows for which these have a place."""


def head_squares(x: Array) -> Array:
    """float32 [heads, 32, 8]: sums of squares of each 16 columns of rows [T, heads * 128]; NaN for
    rows >= T, which nothing may depend on.
    """
    sums = (x.astype(np.float64) ** 2).reshape(len(x), -1, PIECES, HEAD // PIECES).sum(axis=3)
    found = np.full((sums.shape[1], PLACES, PIECES), np.nan, np.float32)
    found[:, : len(x)] = sums.transpose(1, 0, 2)
    return found


def unscaled(x: Array, weight: Array, offset: float, gate: Array) -> Array:
    """bf16 [T, heads * 128]: rows normed and gated, but for the factors 1 / rms."""
    wide = gate.astype(np.float64)
    factors = np.tile(offset + weight.astype(np.float64), x.shape[1] // HEAD)
    return (x.astype(np.float64) * factors * wide / (1 + np.exp(-wide))).astype(BF16)


def finishing(call: Call, weight: Array, offset: float = 0.0) -> Call:
    """The call of gdn with a next product's gate and norm weight, for which it leaves its rows."""
    o = call.want["o"]
    gate = (np.random.default_rng(o.shape).standard_normal(o.shape) * 4).astype(BF16)
    gate[0, :4] = 200, -200, 0, 1e-3  # the sigmoid rounds to 1 or to 0
    left = {
        "y0_slabs": slabs(unscaled(o, weight, offset, gate)),
        "y0_squares": np.zeros((o.shape[1] // HEAD, PLACES, PIECES), np.float32),
    }
    given = {"next_gate": gate, "next_norm_weight": weight}
    ports = {**call.site.ports, **{n: shaped(x) for n, x in {**given, **left}.items()}}
    attributes = Attributes({**call.site.attributes.values, "next_norm_offset": offset})
    return replace(
        call,
        site=CallSite(call.site.op, attributes, ports),
        inputs={**call.inputs, **given},
        want={**call.want, **left},
    )


def normed_case(rows: int, heads: int, columns: int, sizes: Array | None = None) -> OpCase:
    """A product whose rows are normed by head and gated; `sizes`: of each head's values."""
    rng = np.random.default_rng((rows, heads, columns))
    k = heads * HEAD
    wide = np.repeat(np.ones(heads) if sizes is None else sizes, HEAD)
    inputs = {
        "x": (rng.normal(0, 1, (rows, k)) * wide).astype(BF16),
        "gate": rng.normal(0, 2, (rows, k)).astype(BF16),
        "norm_weight": rng.normal(1, 0.2, HEAD).astype(BF16),
        "residual": rng.normal(0, 1, (rows, columns)).astype(BF16),
        **{f"{name}0": value for name, value in nvfp4(rng, columns, k).items()},
    }
    return OpCase("by head", inputs, {"gate": "silu", "head_dim": HEAD, "epilogue": "residual"})


def taking(case: OpCase) -> Call:
    """The call of such a product that takes prepared rows; `x` and the gate must not be read."""
    call = call_of(LINEAR, case)
    x, gate, weight = (call.inputs[name] for name in ("x", "gate", "norm_weight"))
    given = {
        "x_slabs": slabs(unscaled(x, weight, 0.0, gate)),
        "x_squares": head_squares(x),
        "x": np.full_like(x, np.nan),
        "gate": np.full_like(gate, np.nan),
    }
    ports = {**call.site.ports, **{n: shaped(y) for n, y in given.items()}}
    site = CallSite(LINEAR, call.site.attributes, ports)
    return replace(call, site=site, inputs={**call.inputs, **given})


def check_left(call: Call, got: Mapping[str, Array], offset: float) -> None:
    """What is left, against the rows that the call itself stored."""
    o, rows = got["o"], len(got["o"])
    given = call.inputs["next_norm_weight"], offset, call.inputs["next_gate"]
    want = slabs(unscaled(o, *given))
    hold_near("gdn.y0_slabs", got["y0_slabs"], want, 2.0**-8, Near(apart=0.01))
    squares = got["y0_squares"]
    np.testing.assert_allclose(squares[:, :rows], head_squares(o)[:, :rows], rtol=1e-6, atol=1e-30)
    assert (np.ascontiguousarray(squares[:, rows:]).view(np.uint8) == POISON).all()
