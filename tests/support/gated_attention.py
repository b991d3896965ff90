"""Attention that multiplies its rows by the sigmoid of the output gate and leaves them in slabs for
the next linear, and the linear's own launch for this, which is then not needed.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from support.kernel_runner import (
    Backend,
    Call,
    Step,
    Value,
    buffer,
    call_of,
    shaped,
    slabs,
    source_of,
)
from support.op_cases import OpCase

from thor_dflash.core.tensors import Array, DType
from thor_dflash.plugins import LINEAR
from thor_dflash.plugins.launch import Argument, CallSite, Int, Pointer, Real, Scratch
from thor_dflash.plugins.linear.prologue_launch import prepared
from thor_dflash.plugins.verify_attention import OP

BF16 = DType.BF16.numpy


def gated_call(case: OpCase) -> Call:
    """Returns the call of a case with an added gate, from which the gated rows in slabs are wanted
    as well.
    """
    call = call_of(OP, case)
    o = call.want["o"]
    gate = (np.random.default_rng(o.shape).standard_normal(o.shape) * 4).astype(BF16)
    gate[0, :4] = 200, -200, np.inf, -np.inf  # the sigmoid rounds to 1 or to 0
    left = slabs((o / (1 + np.exp(-gate.astype(np.float64)))).astype(BF16))
    ports = {**call.site.ports, "next_gate": shaped(gate), "y0_slabs": shaped(left)}
    return replace(
        call,
        site=CallSite(OP, call.site.attributes, ports),
        inputs={**call.inputs, "next_gate": gate},
        want={**call.want, "y0_slabs": left},
    )


def entering(x: Array, gate: Array, backend: Backend) -> Array:
    """Returns the slabs that a linear's first launch makes of rows and their gate."""
    given = {"x": x, "gate": gate}
    ports = {name: shaped(value) for name, value in given.items()}
    rows, [one] = prepared(
        CallSite(LINEAR, LINEAR.complete({"gate": "sigmoid"}), ports), slabs=True
    )
    assert isinstance(rows, Scratch)
    made = {name: buffer(name, value, writable=False) for name, value in given.items()}
    out = buffer("rows", rows.nbytes)

    def value(argument: Argument) -> Value:
        if isinstance(argument, Int | Real):
            return argument
        return made.get(argument.port) if isinstance(argument, Pointer) else out

    step = Step(source_of(LINEAR, one), one, tuple(map(value, one.arguments)))
    backend([*made.values(), out], [step])
    return out.data.view(BF16).reshape(-1, len(x), 64)
