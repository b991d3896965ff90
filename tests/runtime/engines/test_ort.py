"""The ort engine behaves as the interface of an engine says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper

from thor_dflash.core.errors import EngineError
from thor_dflash.core.tensors import DType, TensorSpec
from thor_dflash.plugins.contract import IN_PLACE
from thor_dflash.runtime.engines.ort import OrtEngine
from thor_dflash.runtime.engines.protocol import Call

FLOAT, INT64 = onnx.TensorProto.FLOAT, onnx.TensorProto.INT64


def write_graph(directory: Path, *, in_place: bool) -> None:
    """Write a graph `step` with the state x [N]: next.x is x plus 1 at index `at`, total the sum of
    the old x. `in_place`: next.x may overwrite x.
    """
    nodes = [
        helper.make_node("ScatterElements", ["x", "at", "one"], ["next.x"], reduction="add"),
        helper.make_node("ReduceSum", ["x"], ["total"], keepdims=1),
    ]
    inputs = [
        helper.make_tensor_value_info("x", FLOAT, ["N"]),
        helper.make_tensor_value_info("at", INT64, [1]),
        helper.make_tensor_value_info("one", FLOAT, [1]),
    ]
    outputs = [
        helper.make_tensor_value_info("next.x", FLOAT, ["N"]),
        helper.make_tensor_value_info("total", FLOAT, [1]),
    ]
    model = helper.make_model(
        helper.make_graph(nodes, "step", inputs, outputs),
        opset_imports=[helper.make_opsetid("", 21)],
        ir_version=10,
    )
    if in_place:
        model.metadata_props.add(key=IN_PLACE, value="next.x")
    (directory / "step.onnx").write_bytes(model.SerializeToString())


def bound(engine: OrtEngine, rows: int = 4) -> tuple[Call, dict[str, object]]:
    """A call of `step` on new tensors, and these by name."""
    graph = engine.load("step")
    tensors = {
        name: engine.empty(spec, {"N": rows})
        for name, spec in {**graph.inputs, "total": graph.outputs["total"]}.items()
    }
    outputs = {"next.x": tensors["x"], "total": tensors["total"]}
    call = Call(graph, {n: tensors[n] for n in graph.inputs}, outputs)
    engine.write(tensors["one"], np.ones(1, np.float32))
    return call, dict(tensors)


@pytest.mark.parametrize("in_place", [True, False])
def test_state_moves_from_call_to_call(tmp_path: Path, in_place: bool) -> None:
    write_graph(tmp_path, in_place=in_place)
    engine = OrtEngine(tmp_path, 1)
    call, tensors = bound(engine)
    for row in (0, 2, 2):
        engine.write(tensors["at"], np.array([row]))  # type: ignore[arg-type]
        engine.run([call])
    assert engine.read(tensors["x"]).tolist() == [1, 0, 2, 0]  # type: ignore[arg-type]
    if not in_place:
        assert engine.read(tensors["total"]).tolist() == [2]  # type: ignore[arg-type]


def test_a_call_that_fails_half_way_leaves_the_old_value(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The new state is computed, then a later node fails: the state must keep its old value."""
    nodes = [
        helper.make_node("Add", ["x", "one"], ["next.x"]),
        helper.make_node("Gather", ["next.x", "at"], ["total"], axis=0),
    ]
    values = {"x": (FLOAT, ["N"]), "at": (INT64, [1]), "one": (FLOAT, [1])}
    outputs = {"next.x": (FLOAT, ["N"]), "total": (FLOAT, [1])}
    graph = helper.make_graph(
        nodes,
        "step",
        [helper.make_tensor_value_info(n, *v) for n, v in values.items()],
        [helper.make_tensor_value_info(n, *v) for n, v in outputs.items()],
    )
    opset = [helper.make_opsetid("", 21)]
    model = helper.make_model(graph, opset_imports=opset, ir_version=10)
    (tmp_path / "step.onnx").write_bytes(model.SerializeToString())
    engine = OrtEngine(tmp_path, 1)
    call, tensors = bound(engine)
    engine.run([call])
    engine.write(tensors["at"], np.array([99]))  # type: ignore[arg-type]
    with pytest.raises(EngineError, match="step must run"):
        engine.run([call])
    assert engine.read(tensors["x"]).tolist() == [1, 1, 1, 1]  # type: ignore[arg-type]
    assert capfd.readouterr().err == ""


def test_tensors_start_as_zeros_and_corners_can_be_copied(tmp_path: Path) -> None:
    engine = OrtEngine(tmp_path, 1)
    tensor = engine.empty(TensorSpec("t", DType.BF16, (3, "N")), {"N": 4})
    engine.write(tensor, np.ones((2, 3), DType.BF16.numpy))
    whole = engine.read(tensor).astype(np.float32)
    assert whole.tolist() == [[1, 1, 1, 0], [1, 1, 1, 0], [0, 0, 0, 0]]
    part = engine.read(tensor, (1, 4))
    part[:] = 7
    assert engine.read(tensor, (1, 4)).astype(np.float32).tolist() == [[1, 1, 1, 0]]


RUN = """
import sys
from pathlib import Path
from test_ort import bound, write_graph
from thor_dflash.runtime.engines.ort import OrtEngine

write_graph(Path(sys.argv[1]), in_place=True)
engine = OrtEngine(Path(sys.argv[1]), 1)
engine.run([bound(engine)[0]])
"""


def test_onnx_runtime_keeps_and_sends_no_telemetry(tmp_path: Path) -> None:
    """It would note what it runs in the user's cache, and send it to its vendor from there."""
    home = tmp_path / "home"
    home.mkdir()
    paths = [str(Path(__file__).parent), *sys.path]
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(tmp_path)],
        env={"HOME": str(home), "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True, text=True,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert not list(home.rglob("*"))
