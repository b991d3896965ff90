"""Linears of prefill that are standard nodes instead of plugins, so that TensorRT multiplies by
itself: what these nodes compute.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun
from support.checkpoints import write_target
from support.trt_builds import HYBRID, options

from thor_dflash.builders.build import make_plan, material
from thor_dflash.builders.checkpoint.target import read_target
from thor_dflash.builders.tensorrt.dense_linears import DenseLinears
from thor_dflash.builders.tensorrt.deployment_graph import DeploymentBuilder
from thor_dflash.builders.tensorrt.weight_constants import EngineConstants
from thor_dflash.core.tensors import Array, DType
from thor_dflash.plugins import LINEAR
from thor_dflash.plugins.contract import Attributes
from thor_dflash.plugins.linear.reference import reference

BF16 = DType.BF16.numpy
FP4 = ml_dtypes.float4_e2m1fn
ROWS = ("x", "gate", "residual")


class TRT_FP4DynamicQuantize(OpRun):  # noqa: N801
    """The operator as TensorRT documents it: E2M1 codes, and an E4M3 scale for each 16 columns."""

    op_domain = "trt"

    def _run(
        self, x: Array, scale: Array, axis: int, block_size: int, scale_type: int
    ) -> tuple[Array, Array]:
        assert (axis, block_size, scale_type) == (-1, 16, TensorProto.FLOAT8E4M3FN)
        return quantise(x, float(scale))


def quantise(x: Array, scale: float) -> tuple[Array, Array]:
    """Returns NVFP4 codes of `x` and block scales, given the scale of the whole tensor."""
    groups = x.astype(np.float64).reshape(*x.shape[:-1], -1, 16)
    wanted = np.abs(groups).max(-1) / 6 / scale
    blocks = wanted.clip(max=448).astype(ml_dtypes.float8_e4m3fn)
    step = blocks.astype(np.float64) * scale
    codes = (groups / np.where(step == 0, 1, step)[..., None]).clip(-6, 6)
    return codes.astype(np.float32).astype(FP4).reshape(x.shape), blocks


def evaluate(model: onnx.ModelProto, inputs: Mapping[str, Array]) -> dict[str, Array]:
    run = ReferenceEvaluator(model, new_ops=[TRT_FP4DynamicQuantize])
    names = [o.name for o in model.graph.output]
    return dict(zip(names, run.run(None, dict(inputs)), strict=True))


@dataclass(frozen=True)
class Linear:
    """One linear of prefill: its inputs by the contract, and the nodes that it became."""

    attributes: Attributes
    ports: dict[str, str]
    outputs: dict[str, str]
    arrays: dict[str, Array]
    sheet: DeploymentBuilder
    scales: Mapping[str, float]


def linear(directory: Path, part: str) -> Linear:
    """Returns the first linear of a small model's prefill whose name ends with `part`, with random
    input rows.
    """
    # The last layer of a prefill has no o_proj, so the first attention layer must not be the last.
    write_target(directory, replace(HYBRID, layers=8), 1, "modelopt")
    plan = make_plan(read_target(directory), None, options(directory))
    made = material(plan)
    pairs = zip(plan.graphs, plan.programs, strict=True)
    graph, program = next((g.proto().graph, p) for g, p in pairs if p.name == "prefill")
    step = next(s for s in program.steps if s.name.endswith(part))
    sheet = DeploymentBuilder()
    # gate_proj and up_proj read the same rows, but claim different scales: the larger one counts.
    scales = {n: 3 * s if "gate_proj" in n else s for n, s in made.scales.items()}
    DenseLinears(program, graph, EngineConstants(made.stored), scales).write(step, sheet)
    [node] = [n for n in graph.node if n.name == step.name]
    a = LINEAR.complete({k: v for k, v in step.attributes.items() if k in LINEAR.attributes})
    ports = {p.name: n for p, n in zip(LINEAR.inputs_of(a), node.input, strict=False) if n}
    rng = np.random.default_rng(1)
    arrays = {
        port: rng.standard_normal((5, int(program.values[name].shape[1]))).astype(BF16)
        if name in program.values
        else made.stored.array(name)
        for port, name in ports.items()
    }
    return Linear(a, ports, dict(step.ports), arrays, sheet, scales)


@pytest.mark.parametrize("part", ["in_proj", "out_proj", "gate_up", "down_proj", "qkv", "o_proj"])
def test_the_nodes_of_a_linear_compute_its_reference_over_quantised_rows(
    tmp_path: Path, part: str
) -> None:
    one = linear(tmp_path, part)
    rows = {one.ports[p]: one.arrays[p] for p in ROWS if p in one.ports}
    got = evaluate(model_of(one), rows)
    exact, meant = reference(one.arrays, one.attributes), with_quantised_rows(one)
    for port, want in meant.items():
        value = got[one.outputs[port]].astype(np.float64)
        wide = want.astype(np.float64)
        assert np.abs(value - wide).max() <= 0.03 * np.abs(wide).max()
        near = similar(value, exact[port].astype(np.float64))
        assert near > 0.97
        if part == "gate_up":  # no residual hides the product, so quantised rows must show
            assert near < 0.9999


def similar(a: Array, b: Array) -> float:
    """Returns the cosine similarity."""
    return float((a * b).sum() / np.sqrt((a * a).sum() * (b * b).sum()))


def with_quantised_rows(one: Linear) -> dict[str, Array]:
    """Returns the operator's reference in which segments with NVFP4 weights read rows that were
    quantised to NVFP4, too; other segments read the rows as they are.
    """
    arrays, a = one.arrays, one.attributes
    identity = np.eye(arrays["x"].shape[1], dtype=np.float32)
    before = {p: arrays[p] for p in ("x", "norm_weight", "gate") if p in arrays}
    prologue = Attributes({**a.values, "segments": 1, "epilogue": "none"})
    rows = reference({**before, "weight0": identity}, prologue)["y0"]
    scale = up(max(one.scales[n] for n in one.ports.values() if n in one.scales))
    codes, blocks = quantise(rows, scale)
    wide = codes.astype(np.float64).reshape(len(rows), -1, 16)
    back = (wide * (blocks.astype(np.float64) * scale)[..., None]).reshape(rows.shape)
    after = {p: v for p, v in arrays.items() if p not in before}
    bare = Attributes({**a.values, "gate": "none", "head_dim": 0})
    low = reference({**after, "x": back.astype(BF16)}, bare)
    full = reference({**after, "x": rows}, bare)
    return {p: low[p] if f"block_scale{p[1:]}" in arrays else full[p] for p in low}


def up(scale: float) -> float:
    """Returns the scale rounded up to bfloat16."""
    near = np.array(scale, np.float32).astype(BF16)
    return float(near if near >= scale else np.nextafter(near, BF16.type(np.inf)))


def model_of(one: Linear) -> onnx.ModelProto:
    """Returns the nodes of one linear as a model of its own that contains its constants."""
    bf16 = TensorProto.BFLOAT16
    inputs = [
        helper.make_tensor_value_info(one.ports[p], bf16, one.arrays[p].shape)
        for p in ROWS
        if p in one.ports
    ]
    outputs = [
        helper.make_tensor_value_info(one.outputs[p.name], bf16, None)
        for p in LINEAR.outputs_of(one.attributes)
    ]
    held = {name: one.arrays[port].tobytes() for port, name in one.ports.items()}
    constants = [
        helper.make_tensor(t.name, t.data_type, t.dims, held[t.name], raw=True)
        for t in one.sheet.constants.values()
    ]
    opsets = [helper.make_opsetid(name, n) for name, n in one.sheet.domains.items()]
    graph = helper.make_graph(one.sheet.nodes, "linear", inputs, outputs, constants)
    return helper.make_model(graph, opset_imports=opsets, ir_version=11)
