"""Norms as ONNX Runtime computes them: a row's result does not depend on the row's place.

Its sums do, as far as they depend on where in memory a row begins: `builders/engine_limits.py`
refuses widths with which rows begin differently.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import numpy as np
import onnx
import pytest
from onnx import helper

from thor_dflash.builders.engine_limits import LANES
from thor_dflash.core.tensors import DType
from thor_dflash.plugins import onnx_math
from thor_dflash.plugins.gdn.onnx_body import _unit
from thor_dflash.plugins.onnx_builder import IR_VERSION, ONNX_TYPE, OPSET, FunctionBuilder
from thor_dflash.runtime.engines.onnxruntime_import import ort

ROWS = 16
Norm = Callable[[FunctionBuilder, str], str]
NORMS: dict[str, Norm] = {
    "rms_norm": lambda b, x: onnx_math.rms_norm(b, x, b.f32(1.0), 1e-6, 0.0),
    "unit": _unit,
}
WIDTHS = [(heads, dim) for heads, dim in product((1, 2, 3, 4, 8), (5, 16, 17, 18, 30, 50, 60, 64))
          if heads * dim % LANES == 0]  # fmt: skip


def session(norm: Norm) -> ort.InferenceSession:
    """A session that norms x [rows, heads, dim] by head."""
    b = FunctionBuilder()
    made = norm(b, "x")
    kind = ONNX_TYPE[DType.F32]
    ends = [helper.make_tensor_value_info(name, kind, (None,) * 3) for name in ("x", made)]
    graph = helper.make_graph(b.nodes, "norm", ends[:1], ends[1:])
    proto: onnx.ModelProto = helper.make_model(
        graph, ir_version=IR_VERSION, opset_imports=[helper.make_opsetid("", OPSET)]
    )
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    return ort.InferenceSession(proto.SerializeToString(), options, ["CPUExecutionProvider"])


@pytest.mark.parametrize("name", NORMS)
def test_a_row_is_normed_alike_wherever_it_is(name: str) -> None:
    rng = np.random.default_rng(3)
    runs = session(NORMS[name])
    for heads, dim in WIDTHS:
        for _ in range(8):  # not every row shows another order of its sum
            row = rng.standard_normal((1, heads, dim), np.float32)
            [out] = runs.run(None, {"x": np.tile(row, (ROWS, 1, 1))})
            assert len({one.tobytes() for one in out}) == 1, (heads, dim)
