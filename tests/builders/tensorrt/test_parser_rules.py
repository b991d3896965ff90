"""The rules of TensorRT's ONNX parser beyond those of ONNX: our graphs obey them.

The rules are those of the parsers of TensorRT 10.13 to 11.4:

* The parser finds importers by type alone, ignoring the domain, and tries its built-in ones first:
  a custom type must not have the name of a standard operator, nor begin as TensorRT's own types.
* A node with its namespace and version as attributes becomes the registered plugin in all of these
  versions; one whose namespace is only its domain becomes its function body in some.
* Functions are looked up by name, ignoring domain and overload, and their arity must match exactly.
* Attributes become plugin fields: 32-bit numbers and text. Lists and tensors are supported, too,
  but differently by different versions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import onnx
import pytest
from onnx import AttributeProto, TensorProto, helper
from support.checkpoints import write_target
from support.trt_builds import HYBRID, NANO, options

from thor_dflash.builders.build import make_plan, material
from thor_dflash.builders.checkpoint.drafter import read_drafter
from thor_dflash.builders.checkpoint.target import read_target
from thor_dflash.builders.tensorrt.package import plan_engines
from thor_dflash.plugins import OPS
from thor_dflash.plugins.contract import DOMAIN, VERSION

OPSETS = (21, 23)
"""Allowed opsets of standard operators: 23 for graphs with 4-bit floats."""
PREFIX = "Thor"
"""Prefix of every custom type."""
OWN = "TRT_"
"""Prefix of TensorRT's own types, which are not standard operators."""
TYPES = {
    TensorProto.FLOAT,
    TensorProto.BFLOAT16,
    TensorProto.FLOAT8E4M3FN,
    TensorProto.INT32,
}
"""Allowed element types of inputs, outputs and everything that a plugin reads or writes."""
FIELDS = (AttributeProto.FLOAT, AttributeProto.INT, AttributeProto.STRING)
LARGEST = 2**31 - 1
"""Largest value of an integer field, most bytes of a graph, and most elements of a tensor."""


def deployed_problems(model: onnx.ModelProto) -> list[str]:
    """List the problems of a deployment graph; empty if there are none."""
    found = [*_every(model), *_types(model), *_dense(model)]
    found += [f"a function {f.name}, which would be built in place of a plugin"
              for f in model.functions]  # fmt: skip
    return found


def _every(model: onnx.ModelProto) -> Iterator[str]:
    opsets = {entry.domain: entry.version for entry in model.opset_import}
    if opsets.get("") not in OPSETS:
        yield f"opset {opsets.get('')}, not one of {OPSETS}"
    for name, count in Counter(node.name for node in model.graph.node if node.domain).items():
        if count > 1 or not name:
            yield f"{count} custom nodes named {name!r}"
    for node in model.graph.node:
        yield from (f"{node.op_type} {node.name}: {what}" for what in _node(node))


def _node(node: onnx.NodeProto) -> Iterator[str]:
    if node.domain != DOMAIN:
        if not node.op_type.startswith(OWN) and not onnx.defs.has(node.op_type):
            yield "no operator of ONNX"
        return
    if not node.op_type.startswith(PREFIX):
        yield f"a custom type must begin with {PREFIX}, as no operator of ONNX does"
    given = {a.name: a for a in node.attribute}
    for name, want in (("plugin_namespace", DOMAIN), ("plugin_version", str(VERSION))):
        if name not in given or helper.get_attribute_value(given[name]) != want.encode():
            yield f'{name} must be "{want}" on the node itself'
    for a in node.attribute:
        yield from _field(a)


def _field(a: AttributeProto) -> Iterator[str]:
    if a.type not in FIELDS:
        yield f"{a.name} must be a number or text"
    elif a.type == AttributeProto.INT and not -LARGEST <= a.i <= LARGEST:
        yield f"{a.name} must fit in 32 bits (got {a.i})"
    elif a.type == AttributeProto.STRING and (not a.s.isascii() or b"\0" in a.s):
        yield f"{a.name} must be ASCII (got {a.s!r})"


def _types(model: onnx.ModelProto) -> Iterator[str]:
    graph = model.graph
    kinds = {v.name: v.type.tensor_type for v in (*graph.input, *graph.output, *graph.value_info)}
    outside = {v.name for v in (*graph.input, *graph.output)}
    plugged = {
        n for node in graph.node if node.domain == DOMAIN for n in (*node.input, *node.output)
    }
    for name in sorted(outside | plugged):
        if name not in kinds:
            yield f"{name} of no declared type"
            continue
        kind = kinds[name]
        if kind.elem_type not in TYPES:
            yield f"{name} of type {TensorProto.DataType.Name(kind.elem_type)}"
        size = 1
        for d in kind.shape.dim:
            if not d.dim_param and d.dim_value < 1:
                yield f"{name} of an empty or unknown size"
            size *= d.dim_value or 1
        if size > LARGEST:
            yield f"{name} of {size} elements, more than {LARGEST}"


def _dense(model: onnx.ModelProto) -> Iterator[str]:
    """List plugin nodes with an empty input, for which TensorRT would pass a null tensor."""
    for node in model.graph.node:
        if node.domain == DOMAIN and "" in node.input:
            yield f"{node.op_type} {node.name}: an input left out"


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, onnx.ModelProto]:
    """Deployment graphs of two models. In the prefill of "hybrid", products are TensorRT's own; in
    "nano", all are plugins.
    """
    tmp = tmp_path_factory.mktemp("lint")
    write_target(tmp / "t", HYBRID, 1, "modelopt")
    hybrid = make_plan(read_target(tmp / "t"), None, options(tmp))
    nano = make_plan(
        read_target(NANO / "target"), read_drafter(NANO / "drafter"), options(tmp, level=0)
    )
    return {
        f"{name}.{one.name}": one.model
        for name, plan in (("nano", nano), ("hybrid", hybrid))
        for one in plan_engines(material(plan)).together
    }


def test_deployment_graphs_obey_the_parser_and_onnx(deployed: dict[str, onnx.ModelProto]) -> None:
    assert len(deployed) > 12
    for name, model in deployed.items():
        assert not deployed_problems(model), name
        least = helper.find_min_ir_version_for(list(model.opset_import), ignore_unknown=True)
        assert model.ir_version >= least, name
        onnx.checker.check_model(without_files(model), full_check=True)


def without_files(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model with external tensors as inputs: onnx.checker would need their files."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    for tensor in [t for t in copy.graph.initializer if t.data_location == TensorProto.EXTERNAL]:
        kind = helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
        copy.graph.input.append(kind)
        copy.graph.initializer.remove(tensor)
    return copy


def test_no_type_of_ours_is_one_of_onnx_or_of_tensorrt() -> None:
    # Operators that TensorRT's parser imports without a plugin, though ONNX may not have them.
    taken = {"Attention", "RMSNormalization", "RotaryEmbedding", "Swish", "TensorScatter"}
    for op in OPS:
        assert not onnx.defs.has(op.type)
        assert op.type not in taken
        assert op.type.startswith("Thor")
