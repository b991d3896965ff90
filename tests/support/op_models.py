"""Runs an operator's ONNX function by ONNX Runtime."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import numpy as np
import onnx
from onnx import helper
from support.op_cases import OpCase

from thor_dflash.core.tensors import Array, DType
from thor_dflash.plugins.contract import DOMAIN, VERSION, Op
from thor_dflash.plugins.onnx_builder import IR_VERSION, ONNX_TYPE, OPSET, call, function
from thor_dflash.plugins.onnx_registry import BODIES
from thor_dflash.runtime.engines.onnxruntime_import import ort


def model(op: Op, case: OpCase, want: Mapping[str, Array]) -> onnx.ModelProto:
    """A model whose graph is one call of the operator, with outputs like those of `want`. Sizes are
    symbols, so that cases of different sizes share a model.
    """
    a = op.complete(case.attributes)
    dtypes = {name: DType.of(value) for name, value in case.inputs.items()}
    outputs = {p.name: p.name for p in op.outputs_of(a)}
    node = call(op, {n: n for n in case.inputs}, outputs, dtypes, a)
    graph = helper.make_graph(
        [node],
        op.name,
        [_value(name, value) for name, value in case.inputs.items()],
        [_value(name, value) for name, value in want.items()],
    )
    proto = helper.make_model(
        graph,
        functions=[function(op, BODIES[op.name], dtypes, a)],
        ir_version=IR_VERSION,
        opset_imports=[helper.make_opsetid("", OPSET), helper.make_opsetid(DOMAIN, VERSION)],
    )
    onnx.checker.check_model(proto)
    return proto


def _value(name: str, like: Array) -> onnx.ValueInfoProto:
    sizes = [f"{name}.{axis}" for axis in range(like.ndim)]
    return helper.make_tensor_value_info(name, ONNX_TYPE[DType.of(like)], sizes)


def run(
    proto: onnx.ModelProto, inputs: Mapping[str, Array], want: Mapping[str, Array]
) -> dict[str, Array]:
    """Run a model. Outputs go to arrays filled with 77, so that an unwritten element shows."""
    session = _session(proto.SerializeToString())
    binding = session.io_binding()
    outputs = {name: np.full_like(value, 77) for name, value in want.items()}
    inputs = {name: np.ascontiguousarray(value) for name, value in inputs.items()}
    for name, value in inputs.items():
        binding.bind_ortvalue_input(name, _shared(value))
    for name, value in outputs.items():
        binding.bind_ortvalue_output(name, _shared(value))
    session.run_with_iobinding(binding)
    return outputs


@lru_cache(maxsize=16)
def _session(model: bytes) -> ort.InferenceSession:
    """Kept, as many cases differ in values alone."""
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 1  # waiting for more threads would take longer than a case
    return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def _shared(value: Array) -> ort.OrtValue:
    return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(value, ONNX_TYPE[DType.of(value)])
