"""Launch lists whose linears only multiply, to measure what fusion gains.

The norm and gate before a product, and the SwiGLU and residual after it, become steps of their own.
The values between them are rounded once more, so tokens may differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from thor_dflash.builders.lowering.op_call import OperatorCall, ValueType

ROUNDS = ("norm_eps", "norm_offset", "head_dim", "gate")
"""Attributes of a linear that belong to its prologue, before the product."""


def unfused(calls: Sequence[OperatorCall], known: dict[str, ValueType]) -> list[OperatorCall]:
    """Return the calls with every linear split up; the new values are added to `known`.

    The head keeps its norm: it is one call of hundreds, and it always includes a norm.
    """
    made: list[OperatorCall] = []
    for call in calls:
        made += _apart(call, known) if call.op == "linear" else [call]
    return made


def _apart(call: OperatorCall, known: dict[str, ValueType]) -> Iterator[OperatorCall]:
    product = replace(call, attributes=dict(call.attributes), inputs=dict(call.inputs))
    if "norm_weight" in call.inputs or call.attributes["gate"] != "none":
        yield _rows(product, known)
    epilogue = call.attributes["epilogue"]
    if epilogue == "none":
        yield product
        return
    product.attributes["epilogue"] = "none"
    y = call.outputs["y0"]
    parts = [f"{call.name}.product{i}" for i in range(2 if epilogue == "swiglu" else 1)]
    for part in parts:
        known[part] = known[y]
    product.outputs = {f"y{i}": part for i, part in enumerate(parts)}
    if epilogue == "residual":
        parts.append(product.inputs.pop("residual"))
    yield product
    op = "silu_mul" if epilogue == "swiglu" else "add"
    yield OperatorCall(f"{call.name}.{op}", op, {}, dict(zip("ab", parts, strict=True)), {"y": y})


def _rows(product: OperatorCall, known: dict[str, ValueType]) -> OperatorCall:
    """Remove the prologue from a product. Returns the call that does it instead."""
    x, made = product.inputs["x"], f"{product.name}.rows"
    known[made] = known[x]
    moved = [port for port in product.inputs if port in ("norm_weight", "gate")]
    ports = {port: product.inputs.pop(port) for port in moved}
    attributes = {name: product.attributes[name] for name in ROUNDS}
    product.inputs["x"] = made
    product.attributes |= {"gate": "none", "head_dim": 0}
    return OperatorCall(made, "rows", attributes, {"x": x, **ports}, {"y": made})
