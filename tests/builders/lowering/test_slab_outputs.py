"""Which calls leave their rows as the next product reads them."""

from __future__ import annotations

from dataclasses import replace

from onnx import helper

from thor_dflash.builders.lowering.graph_calls import read_calls
from thor_dflash.builders.lowering.lower import _Lowering
from thor_dflash.builders.lowering.op_call import OperatorCall, ValueType
from thor_dflash.builders.lowering.packed_weights import WeightPacker
from thor_dflash.builders.output.weight_files import WeightFiles
from thor_dflash.core.tensors import DType
from thor_dflash.plugins.contract import Attribute


def walked(**more: Attribute) -> tuple[list[OperatorCall], dict[str, ValueType]]:
    """Returns gdn and the product that reads its rows, and what is known. `more` changes attributes
    of the product.
    """
    attributes = {"gate": "silu", "head_dim": 128, "norm_offset": 0.0, "epilogue": "residual"}
    taken = {"x": "o", "gate": "z", "norm_weight": "n", "residual": "r", "weight0": "w"}
    calls = [
        OperatorCall("in_proj", "linear", {}, {"x": "h"}, {"y1": "z"}),
        OperatorCall("gdn", "gdn", {"mode": "verify"}, {"qkv": "q"}, {"o": "o"}),
        OperatorCall(
            "out_proj", "linear", {**attributes, "segments": 1, **more}, taken, {"y0": "y"}
        ),
    ]
    known = {name: ValueType(DType.BF16, (16, 512)) for name in ("o", "z", "r", "y")}
    return calls, {
        **known,
        "n": ValueType(DType.BF16, (128,)),
        "w": ValueType(DType.U8, (512, 256)),
    }


def finishes(calls: list[OperatorCall], known: dict[str, ValueType]) -> bool:
    """Whether gdn applies norm and gate and leaves its rows in slabs for the last linear."""
    model = helper.make_model(helper.make_graph([], "part", [], []))
    graph = replace(read_calls(model), types=known, calls=calls)
    _Lowering(graph, WeightPacker(WeightFiles())).write_slabs()
    [maker] = [call for call in calls if call.op == "gdn"]
    added = (maker.inputs, maker.outputs, calls[-1].inputs, known)
    names = (
        {"next_gate", "next_norm_weight"}, {"y0_slabs", "y0_squares"}, {"x_slabs", "x_squares"},
        {"o.slabs", "o.squares"},
    )  # fmt: skip
    there = {name in where for where, some in zip(added, names, strict=True) for name in some}
    [ours] = there  # all of it or nothing
    assert not ours or known["o.squares"] == ValueType(DType.F32, (4, 32, 8))
    return ours


def test_gdn_finishes_rows_of_nvfp4_products_alone() -> None:
    assert finishes(*walked())
    assert not finishes(*walked(gate="sigmoid"))
    assert not finishes(*walked(head_dim=256))
    assert not finishes(*walked(epilogue="swiglu"))
    for change in (
        {"w": ValueType(DType.FP8, (512, 512))},
        {"w": ValueType(DType.BF16, (512, 512))},
        {"o": ValueType(DType.BF16, (33, 512))},
    ):
        calls, known = walked()
        assert not finishes(calls, {**known, **change})
    calls, known = walked()
    calls[1].attributes["mode"] = "prefill"
    assert not finishes(calls, known)
    calls, known = walked()
    del calls[-1].inputs["norm_weight"]
    assert not finishes(calls, known)
    (gate, rows, product), known = walked()
    assert not finishes([rows, gate, product], known), "the gate is not there yet"
