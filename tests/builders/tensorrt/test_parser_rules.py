"""The rules of TensorRT's ONNX parser: our graphs obey them, and each broken rule is noticed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper
from support.checkpoints import write_target
from support.trt_builds import HYBRID, NANO, options

from thor_dflash.builders.build import make_plan, material
from thor_dflash.builders.checkpoint.drafter import read_drafter
from thor_dflash.builders.checkpoint.target import read_target
from thor_dflash.builders.tensorrt.package import plan_engines
from thor_dflash.builders.tensorrt.parser_rules import deployed_problems
from thor_dflash.plugins import OPS


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


def attribute(node: onnx.NodeProto, name: str) -> onnx.AttributeProto:
    return next(a for a in node.attribute if a.name == name)


def drop(model: onnx.ModelProto, name: str) -> None:
    node = model.graph.node[0]
    node.attribute.remove(attribute(node, name))


def add(model: onnx.ModelProto, name: str, value: object) -> None:
    model.graph.node[0].attribute.append(helper.make_attribute(name, value))


def swap(model: onnx.ModelProto) -> None:
    first, second = (onnx.NodeProto.FromString(n.SerializeToString())
                     for n in model.graph.node[:2])  # fmt: skip
    model.graph.node[0].CopyFrom(second)
    model.graph.node[1].CopyFrom(first)


Change = Callable[[onnx.ModelProto], object]
BREAKS: dict[str, tuple[Change, str]] = {
    "namespace": (lambda m: drop(m, "plugin_namespace"), "plugin_namespace must be"),
    "clash": (lambda m: rename_type(m, "Gather"), "must begin with Thor, as no operator"),
    "unknown": (lambda m: m.graph.node[0].ClearField("domain"), "no operator of ONNX"),
    "list": (lambda m: add(m, "sizes", [1, 2]), "sizes must be a number or text"),
    "left out": (lambda m: m.graph.node[1].input.append(""), "an input left out"),
    "order": (swap, "is read before anything makes it"),
    "same": (lambda m: rename(m.graph.node[1], m.graph.node[0].name), "2 custom nodes named"),
    "output": (lambda m: m.graph.output.add(name="nobody"), "output nobody that nothing makes"),
    "huge": (lambda m: resize(m, 2**31), "elements, more than"),
}


def rename(node: onnx.NodeProto, name: str) -> None:
    node.name = name


def rename_type(model: onnx.ModelProto, kind: str) -> None:
    model.graph.node[0].op_type = kind


def opset(model: onnx.ModelProto, version: int) -> None:
    next(o for o in model.opset_import if not o.domain).version = version


def retype(model: onnx.ModelProto, kind: int) -> None:
    model.graph.input[0].type.tensor_type.elem_type = kind


def resize(model: onnx.ModelProto, size: int) -> None:
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = size


@pytest.mark.parametrize("what", BREAKS)
def test_a_broken_rule_is_named(what: str, deployed: dict[str, onnx.ModelProto]) -> None:
    model = onnx.ModelProto()
    model.CopyFrom(deployed["nano.verify"])
    change, words = BREAKS[what]
    change(model)
    assert any(words in problem for problem in deployed_problems(model)), deployed_problems(model)


def test_a_graph_that_breaks_a_rule_is_not_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from thor_dflash.builders.tensorrt import package
    from thor_dflash.core.errors import ConfigError

    monkeypatch.setattr(package, "readers", lambda model: defaultdict(lambda: 2))
    plan = make_plan(read_target(NANO / "target"), None, options(tmp_path))
    with pytest.raises(ConfigError, match="read by 2 nodes and written in place by one of them"):
        plan_engines(material(plan))
