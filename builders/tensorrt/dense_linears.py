"""Writes the linears of a prefill as TensorRT's own FP4 products instead of our plugin.

    x -> prologue -> TRT_FP4DynamicQuantize -> DequantizeLinear -> \\
                                                                     MatMul -> epilogue
    codes, block scales -> DequantizeLinear -> Transpose -> Cast -> /

TensorRT recognises this pattern and multiplies in FP4. It quantises the rows, too (W4A4), which our
kernels do not, so prefill results differ slightly, and a row's result may depend on the size of the
prefill step. Rows are quantised and dequantised with the same scale: the checkpoint's, rounded up
to bfloat16.

Source: the graphs that ModelOpt's NVFP4 exporter writes; spec of TRT_FP4DynamicQuantize.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import TensorProto, helper

from thor_dflash.builders.tensorrt.deployment_graph import DeploymentBuilder
from thor_dflash.builders.tensorrt.weight_constants import FP4, EngineConstants
from thor_dflash.core.tensors import Array, DType
from thor_dflash.package.launch_program import Program, Step
from thor_dflash.plugins import LINEAR
from thor_dflash.plugins.contract import Attributes
from thor_dflash.plugins.linear.onnx_body import prologue
from thor_dflash.plugins.numpy_math import NVFP4_GROUP
from thor_dflash.plugins.onnx_builder import FunctionBuilder, Inputs

OPSET = 23
"""The first opset with 4-bit floats in DequantizeLinear."""
TRT = "trt"
"""Domain of TensorRT's own operators; its parser looks only at the type."""


@dataclass(frozen=True, slots=True)
class DenseLinears:
    """Writes the linears of one graph as standard nodes."""

    program: Program
    graph: onnx.GraphProto
    """The graph that the program was made from; it has the weights as the checkpoint holds them."""
    constants: EngineConstants
    scales: Mapping[str, float]
    """Stored weight -> Matrix.input_scale."""

    def takes(self, step: Step) -> bool:
        """See Rewrite. Takes linears with NVFP4 weights and no FP8 weight."""
        if step.op != LINEAR.name:
            return False
        kinds = {self._dtype(name) for name in self._weights(step)}
        return DType.U8 in kinds and DType.FP8 not in kinds

    def unscaled(self) -> list[str]:
        """Return the NVFP4 weights without a scale of the input rows, or with one that must not be
        used.
        """
        return [
            name
            for step in self.program.steps
            if self.takes(step)
            for name in self._weights(step)
            if self._dtype(name) is DType.U8 and name not in self.scales
        ]

    def write(self, step: Step, sheet: DeploymentBuilder) -> None:
        """See Rewrite."""
        a = Attributes(step.attributes)
        ports = self._ports(step)
        b = FunctionBuilder(f"{step.name}.")
        x = _Wired({p: self._dtype(n) for p, n in ports.items()}, ports)
        rows = prologue(b, x, a)
        if a.integer("head_dim"):
            # The prologue infers this size, and TensorRT must know it to cut the rows into blocks.
            rows = b.reshape(rows, 0, self._columns(step))
        rows = b.narrow(rows, DType.BF16)
        y = dict(self._products(b, step, rows))
        weights = self._weights(step)
        low = {value for i, value in y.items() if self._dtype(weights[i]) is DType.U8}
        products = [node for node in b.nodes if low.intersection(node.output)]
        if a.word("epilogue") == "swiglu":
            gate, up = (b.cast(value, DType.F32) for value in y.values())
            y = {0: b.cast(b.op("Mul", b.silu(gate), up), DType.BF16)}
        elif a.word("epilogue") == "residual":
            y = {0: b.op("Add", ports["residual"], y[0])}
        for i, value in y.items():
            _rename(b.nodes, value, step.ports[f"y{i}"])
        for i, node in enumerate(b.nodes):
            node.name = f"{step.name}.{i}"
        sheet.products += [node.name for node in products]
        sheet.nodes += b.nodes
        sheet.domains |= {"": OPSET, TRT: 1}
        used = {name for node in b.nodes for name in node.input}
        for name in ports.values():
            if name in used and name not in self.program.values.keys() | self.program.inputs.keys():
                sheet.constants[name] = self.constants.tensor(name)

    def _products(self, b: FunctionBuilder, step: Step, rows: str) -> Iterator[tuple[int, str]]:
        """Yield the number and product, bf16 [T, N], of every segment that is read. Rows are
        quantised once.
        """
        node = self._node(step)
        weights = self._weights(step)
        codes = [name for name in weights if self._dtype(name) is DType.U8]
        scale = _up(max(self.scales[name] for name in codes))
        quantised = _quantise(b, rows, scale)
        for i, name in enumerate(weights):
            if not self._read(step.ports.get(f"y{i}")):
                continue
            if name not in codes:
                yield i, b.op("MatMul", rows, b.op("Transpose", name, perm=(1, 0)))
                continue
            block, row = _ports(node)[f"block_scale{i}"], _ports(node)[f"row_scale{i}"]
            wide = b.op("Transpose", _dequantised(b, name, block, self._global(row)), perm=(1, 0))
            yield i, b.op("MatMul", quantised, b.cast(wide, DType.BF16))

    def _read(self, value: str | None) -> bool:
        """Whether a step reads a value, besides the one that makes it, or the graph leaves it.
        None is the second product of an epilogue that joins two.
        """
        uses = sum(value in step.ports.values() for step in self.program.steps)
        return value is None or value in self.program.outputs or uses > 1

    def _columns(self, step: Step) -> int:
        """Return K, the columns of the rows that a linear reads."""
        x = step.ports["x"]
        columns = (self.program.values.get(x) or self.program.inputs[x]).shape[-1]
        assert isinstance(columns, int), step.name
        return columns

    def _global(self, name: str) -> float:
        """Return the one value that all row scales of a matrix have."""
        scales = self.constants.source.array(name)
        assert (scales == scales.flat[0]).all(), name
        return float(scales.flat[0])

    def _weights(self, step: Step) -> list[str]:
        ports = _ports(self._node(step))
        return [ports[f"weight{i}"] for i in range(int(step.attributes["segments"]))]

    def _ports(self, step: Step) -> dict[str, str]:
        """Return all inputs of the nodes. Row scales are not among them: they become one number."""
        ports = _ports(self._node(step))
        return {port: name for port, name in ports.items() if not port.startswith("row_scale")}

    def _node(self, step: Step) -> onnx.NodeProto:
        [node] = [n for n in self.graph.node if n.name == step.name]
        assert isinstance(node, onnx.NodeProto), step.name
        return node

    def _dtype(self, name: str) -> DType:
        if name in self.program.values:
            return DType(self.program.values[name].dtype)
        if name in self.program.inputs:
            return DType(self.program.inputs[name].dtype)
        return self.constants.source.stored(name).dtype


class _Wired(Inputs):
    """The inputs of a function body, by the names of the values bound to them."""

    def __init__(self, dtypes: Mapping[str, DType], names: Mapping[str, str]) -> None:
        super().__init__(dtypes)
        self._names = names

    def __getitem__(self, port: str) -> str:
        return self._names[super().__getitem__(port)]

    def f32(self, b: FunctionBuilder, port: str) -> str:
        return self[port] if self.dtype(port) is DType.F32 else b.cast(self[port], DType.F32)


def _ports(node: onnx.NodeProto) -> dict[str, str]:
    given = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    a = LINEAR.complete({"segments": given["segments"]})
    pairs = zip(LINEAR.inputs_of(a), node.input, strict=False)
    return {port.name: name for port, name in pairs if name}


def _quantise(b: FunctionBuilder, rows: str, scale: Array) -> str:
    """Quantise rows bf16 [T, K] to NVFP4 and dequantise them to bf16."""
    codes, blocks = b.name(), b.name()
    wide = b.const(scale.astype(np.float32))
    b.nodes.append(
        helper.make_node(
            "TRT_FP4DynamicQuantize",
            [rows, wide],
            [codes, blocks],
            domain=TRT,
            axis=-1,
            block_size=NVFP4_GROUP,
            scale_type=TensorProto.FLOAT8E4M3FN,
        )
    )
    scales = b.op("DequantizeLinear", blocks, b.const(scale))
    return b.op("DequantizeLinear", codes, scales, axis=-1, block_size=NVFP4_GROUP)


def _dequantised(b: FunctionBuilder, codes: str, blocks: str, scale: float) -> str:
    """Dequantise a weight to float32 [N, K]. Nothing may come between the two nodes, which TensorRT
    takes for one double quantisation.
    """
    scales = b.op("DequantizeLinear", blocks, b.f32(scale))
    return b.op("DequantizeLinear", codes, scales, axis=-1, block_size=NVFP4_GROUP)


def _up(scale: float) -> Array:
    """Round up to the next bfloat16, as a scalar array."""
    bits = np.array(scale, np.float32).view(np.uint32)
    return ((bits + 0xFFFF) >> 16).astype(np.uint16).view(DType.BF16.numpy)


def _rename(nodes: list[onnx.NodeProto], old: str, new: str) -> None:
    [node] = [n for n in nodes if old in n.output]
    node.output[list(node.output).index(old)] = new


__all__ = ["FP4", "DenseLinears"]
