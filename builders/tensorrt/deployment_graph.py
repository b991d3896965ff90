"""Deployment graphs: programs written as ONNX for TensorRT's parser, one custom node per step.

A node carries its attributes and, from plugins/tensorrt/node.py, the list of tensors it has. Ports
that a call does not use are omitted, so no input is ever empty. There are no function bodies:
without its plugin a node cannot be parsed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

import onnx
from onnx import helper

from thor_dflash.core.errors import EngineError
from thor_dflash.core.tensors import DType
from thor_dflash.package.launch_program import Program, Step, Value, Weight
from thor_dflash.plugins.contract import DOMAIN, NEXT, VERSION, Attributes
from thor_dflash.plugins.launch import PREFETCHED, CallSite, Shaped
from thor_dflash.plugins.onnx_builder import IR_VERSION, ONNX_TYPE, OPSET
from thor_dflash.plugins.registry import KERNELS
from thor_dflash.plugins.tensorrt.node import WORD, PluginNode, describe

NOMINAL = 128
"""Stands for a size that a session decides; no node depends on its value."""

Shape = tuple[int | str, ...]

_LEFT = {"y0_slabs", "y0_squares", "next_norm_weight", "next_norm_offset", "next_gate"}
"""Ports and attributes of a step that also writes its rows as slabs, for another step."""
_TAKEN = {"x_slabs", "x_squares"}
"""Ports of a step that reads them. Without them it can make them from `x`."""


class StepRewriter(Protocol):
    """Writes some steps as standard nodes instead of a plugin."""

    def takes(self, step: Step) -> bool:
        """Whether it rewrites this step."""
        ...

    def write(self, step: Step, sheet: DeploymentBuilder) -> None:
        """Add the step's nodes, the constants that they read, and its products of 4-bit floats."""
        ...


@dataclass(slots=True)
class DeploymentBuilder:
    """A deployment graph under construction."""

    nodes: list[onnx.NodeProto] = field(default_factory=list[onnx.NodeProto])
    constants: dict[str, onnx.TensorProto] = field(default_factory=dict[str, onnx.TensorProto])
    """Weights that TensorRT's own layers hold."""
    values: dict[str, onnx.ValueInfoProto] = field(default_factory=dict[str, onnx.ValueInfoProto])
    weights: dict[str, Weight] = field(default_factory=dict[str, Weight])
    """Weights that are inputs."""
    plugins: list[tuple[str, PluginNode]] = field(default_factory=list[tuple[str, PluginNode]])
    """Every custom node with its name, in order."""
    products: list[str] = field(default_factory=list[str])
    """The products of 4-bit floats that a StepRewriter has written, by the names of their nodes."""
    domains: dict[str, int] = field(default_factory=lambda: {"": OPSET, DOMAIN: VERSION})


@dataclass(frozen=True, slots=True)
class Deployment:
    """A deployment graph for the parser, and its properties."""

    name: str
    model: onnx.ModelProto
    inputs: Mapping[str, Value]
    outputs: Mapping[str, Value]
    weights: Mapping[str, Weight]
    in_place: tuple[str, ...]
    """Outputs (next states) that their kernels write over the corresponding input (state)."""
    plugins: tuple[tuple[str, PluginNode], ...]
    """Every custom node with its name, in order."""
    products: tuple[str, ...] = ()
    """The nodes that are TensorRT's own products of 4-bit floats."""


def deploy(program: Program, rewrite: StepRewriter | None = None) -> Deployment:
    """Return the deployment graph of a program.

    Raises:
        EngineError: a step reads a value that no earlier step makes.
    """
    sheet = DeploymentBuilder()
    made = {*program.inputs, *program.weights}
    in_place: list[str] = []
    for step in _among_plugins(program, rewrite):
        outs = _written(step, made)
        made |= {step.ports[port] for port in outs}
        if rewrite is not None and rewrite.takes(step):
            rewrite.write(step, sheet)
            continue
        sheet.nodes.append(_custom(program, step, outs, sheet))
        kept = sorted(KERNELS[step.op].in_place)
        in_place += [step.ports[p] for p in kept if _is_state(step.ports.get(p, ""))]
    return Deployment(
        program.name,
        _model(program, sheet),
        program.inputs,
        program.outputs,
        sheet.weights,
        tuple(in_place),
        tuple(sheet.plugins),
        tuple(sheet.products),
    )


def _written(step: Step, made: Collection[str]) -> set[str]:
    """Return the ports that a step writes: those whose values are new."""
    op = KERNELS[step.op].op
    written = {port for port, value in step.ports.items() if value not in made}
    attributes = Attributes({**op.attributes, **step.attributes})
    reads = {port.name for port in op.inputs_of(attributes)} | {"next_gate", *_TAKEN}
    if wrong := sorted(written & reads):
        value = step.ports[wrong[0]]
        raise EngineError(f"{step.name}.{wrong[0]} must be made by an earlier step (got {value})")
    return written


def _among_plugins(program: Program, rewrite: StepRewriter | None) -> list[Step]:
    """Return the steps, with slabs kept only between two plugins."""
    ours = [step.ports for step in program.steps if rewrite is None or not rewrite.takes(step)]
    left, taken = ({p[port] for p in ours if port in p} for port in ("y0_slabs", "x_slabs"))
    return [_trimmed(step, left & taken) for step in program.steps]


def _trimmed(step: Step, kept: Collection[str]) -> Step:
    """Return a step that neither writes nor reads slabs other than `kept`."""
    gone: set[str] = {PREFETCHED}  # TensorRT decides what runs after a step
    for port, all_of_it in (("y0_slabs", _LEFT), ("x_slabs", _TAKEN)):
        if step.ports.get(port) not in kept:
            gone |= all_of_it
    return replace(
        step,
        ports={port: name for port, name in step.ports.items() if port not in gone},
        attributes={name: x for name, x in step.attributes.items() if name not in gone},
    )


def _is_state(value: str) -> bool:
    return value.startswith(NEXT)


def _custom(
    program: Program, step: Step, outs: Collection[str], sheet: DeploymentBuilder
) -> onnx.NodeProto:
    rule = KERNELS[step.op]
    shapes = {port: _shaped(program, name) for port, name in step.ports.items()}
    attributes = Attributes({**rule.op.attributes, **step.attributes})
    node = describe(CallSite(rule.op, attributes, shapes), outs)
    sheet.plugins.append((step.name, node))
    for name in (step.ports[port] for port in node.inputs):
        if name in program.weights:
            sheet.weights[name] = program.weights[name]
    made = helper.make_node(
        rule.op.type,
        [step.ports[port] for port in node.inputs],
        [step.ports[port] for port in node.outputs],
        step.name,
        domain=DOMAIN,
    )
    named = {"plugin_namespace": DOMAIN, "plugin_version": str(VERSION)}
    made.attribute.extend(
        helper.make_attribute(key, value) for key, value in {**named, **node.fields()}.items()
    )
    return made


def _shaped(program: Program, name: str) -> Shaped:
    value = (
        program.weights.get(name)
        or program.values.get(name)
        or program.inputs.get(name)
        or program.outputs[name]
    )
    sizes = (NOMINAL if isinstance(n, str) else n for n in value.shape)
    return Shaped(DType(value.dtype), tuple(sizes))


def info(name: str, dtype: str, shape: Shape) -> onnx.ValueInfoProto:
    """Declare a value of the graph. Bytes are declared as words of int32."""
    kind, dims = DType(dtype), shape
    if kind is DType.U8:
        assert isinstance(shape[-1], int), name
        assert shape[-1] % WORD == 0, name
        kind, dims = DType.I32, (*shape[:-1], shape[-1] // WORD)
    return helper.make_tensor_value_info(name, ONNX_TYPE[kind], dims)


def _model(program: Program, sheet: DeploymentBuilder) -> onnx.ModelProto:
    made = {name for node in sheet.nodes for name in node.output}
    inside = {n: info(n, v.dtype, v.shape) for n, v in program.values.items() if n in made}
    graph = helper.make_graph(
        sheet.nodes,
        program.name,
        [
            *(info(name, v.dtype, v.shape) for name, v in program.inputs.items()),
            *(info(name, w.dtype, w.shape) for name, w in sheet.weights.items()),
        ],
        [info(name, v.dtype, v.shape) for name, v in program.outputs.items()],
        list(sheet.constants.values()),
        value_info=list({**inside, **sheet.values}.values()),
    )
    return helper.make_model(
        graph,
        ir_version=IR_VERSION if sheet.domains[""] == OPSET else IR_VERSION + 1,
        producer_name="thor-dflash",
        opset_imports=[helper.make_opsetid(name, n) for name, n in sheet.domains.items()],
    )
