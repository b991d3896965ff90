"""Single engines, built by TensorRT for RTX on a CPU and never executed. Most have a mistake, in
the graph or in what the builder reports: the checks find each.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from weakref import ref

import onnx
import pytest
from onnx import TensorProto, helper
from support.checkpoints import Dialect, write_target
from support.trt_builds import (
    HYBRID,
    BuiltEngine,
    BuiltPackage,
    build_engine,
    builder,
    building,
    options,
    plan_of,
    tensorrt,
)

from thor_dflash.builders.tensorrt.deployment_graph import Deployment
from thor_dflash.builders.tensorrt.inspection import (
    EngineFinding,
    InspectedLayer,
    InspectedTensor,
    problems,
)
from thor_dflash.builders.tensorrt.profiles import EngineGraphs
from thor_dflash.builders.tensorrt.weight_constants import EngineConstants
from thor_dflash.core.errors import EngineError
from thor_dflash.core.progress import Silent
from thor_dflash.core.tensors import Array, DType
from thor_dflash.plugins.contract import DOMAIN
from thor_dflash.plugins.launch import CallSite, Shaped
from thor_dflash.plugins.registry import KERNELS
from thor_dflash.plugins.tensorrt.node import describe

Model = onnx.ModelProto
Layers = list[InspectedLayer]
CONCAT = KERNELS["concat"].op


@dataclass(frozen=True)
class Prefill:
    """The prefill of a small model, to be built."""

    graphs: EngineGraphs
    constants: EngineConstants

    def build(self, tmp: Path, model: Model | None = None, **changes: object) -> BuiltEngine:
        """Build it changed; it is meant to be as it was."""
        changed = replace(self.graphs, model=model or self.graphs.model, **changes)  # type: ignore[arg-type]
        return build_engine(tmp, changed, self.constants, self.graphs)

    def model(self) -> Model:
        copy = onnx.ModelProto()
        copy.CopyFrom(self.graphs.model)
        return copy


def prefill(tmp: Path, dialect: Dialect) -> Prefill:
    write_target(tmp / "target", HYBRID, 1, dialect)
    plan = plan_of(tmp / "target", None, options(tmp))
    return Prefill(next(one for one in plan.together if one.name == "prefill"), plan.constants)


@pytest.fixture(scope="module")
def plugins(tmp_path_factory: pytest.TempPathFactory) -> Prefill:
    """All of its nodes are plugins."""
    return prefill(tmp_path_factory.mktemp("plugins"), "bf16")


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Prefill:
    """Its products are TensorRT's own."""
    return prefill(tmp_path_factory.mktemp("dense"), "modelopt")


@pytest.fixture(scope="module")
def built(dense: Prefill, tmp_path_factory: pytest.TempPathFactory) -> BuiltEngine:
    return dense.build(tmp_path_factory.mktemp("built"))


def test_constants_stay_mapped_until_an_engine_of_the_same_bytes_is_built_and_then_go(
    dense: Prefill, built: BuiltEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parser gets their addresses, and TensorRT reads them when it builds."""
    given, alive = list[ref[Array]](), list[bool]()
    mapped = EngineConstants.mapped
    build = tensorrt().Builder.build_serialized_network_to_stream

    def watched(*args: Any) -> Iterator[tuple[str, Array]]:
        for name, array in mapped(*args):
            given.append(ref(array))
            yield name, array

    def building(*args: Any) -> bool:
        done: bool = build(*args)
        alive.extend(array() is not None for array in given)
        return done

    monkeypatch.setattr(EngineConstants, "mapped", watched)
    monkeypatch.setattr(tensorrt().Builder, "build_serialized_network_to_stream", building)
    again = dense.build(tmp_path)
    assert again.path.read_bytes() == built.path.read_bytes()
    assert len(alive) > 10
    assert all(alive)
    assert not any(array() is not None for array in given)


# ---- in the graph ------------------------------------------------------------------------------
@pytest.mark.parametrize("op", ["ThorLinear", "ThorEmbed", "ThorGdn"])
def test_a_node_that_nobody_reads_is_found_missing(
    plugins: Prefill, tmp_path: Path, op: str
) -> None:
    """TensorRT removes it, as it did the last steps of a prefill."""
    model, [graph] = plugins.model(), plugins.graphs.graphs
    dead = onnx.NodeProto()
    dead.CopyFrom(next(node for node in model.graph.node if node.op_type == op))
    node, dead.name = dict(graph.plugins)[dead.name], "dead"
    dead.output[:] = [f"dead{i}" for i in range(len(dead.output))]
    model.graph.node.append(dead)
    graph = replace(graph, plugins=(*graph.plugins, ("dead", node)))
    meant = replace(plugins.graphs, model=model, graphs=(graph,))
    count = len(graph.plugins)
    with pytest.raises(EngineError, match=rf"{count - 1} plugins of {count} nodes: dead"):
        build_engine(tmp_path, meant)


@pytest.mark.parametrize("name", ["gdn.0.state", "next.gdn.1.tail", "layers.2.linear_attn.A_log"])
def test_a_tensor_that_passes_through_another_layer_is_found(
    plugins: Prefill, tmp_path: Path, name: str
) -> None:
    model = plugins.model()
    ports = {v.name: v for v in (*model.graph.input, *model.graph.output)}
    inward = name in {v.name for v in model.graph.input}
    for node in model.graph.node:
        names = node.input if inward else node.output
        names[:] = ["between" if n == name else n for n in names]
    ends = (name, "between") if inward else ("between", name)
    model.graph.node.insert(
        0 if inward else len(model.graph.node), helper.make_node("Neg", [ends[0]], [ends[1]], "neg")
    )
    between = onnx.ValueInfoProto()
    between.CopyFrom(ports[name])
    between.name = "between"
    model.graph.value_info.append(between)
    with pytest.raises(EngineError, match=rf"1 tensors copied: {name} by __myl_Neg"):
        plugins.build(tmp_path, model)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda trt, net: net.add_input("m", trt.float32, (1,)), "input m too many"),
        (lambda trt, net: net.add_identity(net.get_input(0)), "layers that no node needs"),
        (lambda trt, net: net.unmark_output(net.get_output(0)), "output y missing"),
    ],
)
def test_a_network_that_is_not_its_graph_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[..., object], words: str
) -> None:
    trt = tensorrt()

    class OnnxParser(trt.OnnxParser):  # type: ignore[name-defined, misc]
        def __init__(self, network: Any, logger: Any) -> None:
            super().__init__(network, logger)
            self.network = network

        def parse_model_proto(self) -> bool:
            done: bool = super().parse_model_proto()
            change(trt, self.network)
            return done

    monkeypatch.setattr(trt, "OnnxParser", OnnxParser)
    with pytest.raises(EngineError, match=rf"TensorRT must parse the graph .*{words}"):
        build_engine(tmp_path, concatenation())


def test_swapped_profiles_are_found(dense: Prefill, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"tokens of shapes \(\(\(64,\)"):
        dense.build(tmp_path, ranges=dense.graphs.ranges[::-1])


def test_rows_that_are_not_quantised_are_found(dense: Prefill, tmp_path: Path) -> None:
    """An input of the product that is not in 4 bits makes it one of 16 bits."""
    model = dense.model()
    makers = {name: node for node in model.graph.node for name in node.output}
    first = dense.graphs.graphs[0].products[0]
    product = next(node for node in model.graph.node if node.name == first)
    quantiser = makers[makers[product.input[0]].input[0]]
    product.input[0] = quantiser.input[0]
    match = rf"1 of \d+ products of 4-bit floats computed in another type: {first}"
    with pytest.raises(EngineError, match=match):
        dense.build(tmp_path, model)


def concatenation() -> EngineGraphs:
    """Return a graph of one custom node that has a function body, too."""
    rows, op = Shaped(DType.F32, (4, 8)), CONCAT
    both = Shaped(DType.F32, (4, 16))
    node = describe(CallSite(op, op.complete({}), {"x0": rows, "x1": rows, "y": both}), {"y"})
    given = {"plugin_namespace": DOMAIN, "plugin_version": "1", **node.fields()}
    info = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, shaped.shape)
        for name, shaped in (("x0", rows), ("x1", rows), ("y", both))
    ]
    call = helper.make_node(op.type, ["x0", "x1"], ["y"], "call", domain=DOMAIN, **given)
    inner = helper.make_node("Concat", ["x0", "x1"], ["y"], axis=1)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid(DOMAIN, 1)]
    body = helper.make_function(DOMAIN, op.type, ["x0", "x1"], ["y"], [inner], opsets)
    model = helper.make_model(
        helper.make_graph([call], "concat", info[:2], info[2:]),
        functions=[body],
        ir_version=10,
        opset_imports=opsets,
    )
    graph = Deployment("concat", model, {}, {}, {}, (), (("call", node),))
    return EngineGraphs("concat", model, (graph,), ({},))


def test_a_plugin_wins_over_a_function_body_and_its_body_is_found(tmp_path: Path) -> None:
    graphs = concatenation()
    assert [one.kind for one in build_engine(tmp_path, graphs).layers] == ["custom_layer"]
    with pytest.raises(EngineError, match="0 plugins of 1 nodes"):
        build_engine(tmp_path, graphs, nodes=())


# ---- in the report -----------------------------------------------------------------------------
def first(layers: Sequence[InspectedLayer], kind: str) -> int:
    return next(i for i, one in enumerate(layers) if one.kind == kind)


def without(kind: str) -> Callable[[Layers, str], Layers]:
    def change(layers: Layers, product: str) -> Layers:
        at = first(layers, kind)
        return [*layers[:at], *layers[at + 1 :]]

    return change


def retyped(operands: tuple[str, ...]) -> Callable[[Layers, str], Layers]:
    """Make one product's operands another type, in one of the profiles."""

    def change(layers: Layers, product: str) -> Layers:
        at = next(i for i, one in enumerate(layers) if product in one.nodes and one.kind == "gemm")
        return [*layers[:at], replace(layers[at], operands=operands), *layers[at + 1 :]]

    return change


def renamed(kind: str) -> Callable[[Layers, str], Layers]:
    return lambda layers, product: [
        replace(one, kind=kind) if one.kind == "custom_layer" else one for one in layers
    ]


def nameless(layers: Layers, product: str) -> Layers:
    return [replace(one, nodes=(one.name,)) for one in layers]


def fused(layers: Layers, product: str) -> Layers:
    at = first(layers, "custom_layer")
    return [
        *layers[:at],
        replace(layers[at], nodes=(*layers[at].nodes, "another")),
        *layers[at + 1 :],
    ]


@pytest.mark.parametrize(
    ("change", "text", "certain"),
    [
        (without("custom_layer"), "plugins of 5 nodes", True),
        (lambda layers, _: layers * 2, "0 plugins of 5 nodes", True),
        (fused, "plugins fused with other nodes", True),
        (lambda layers, _: [*layers, InspectedLayer("Reformatting x")], "1 copies", True),
        (lambda layers, _: [*layers, InspectedLayer("x", "Reformat")], "1 copies", True),
        (retyped(("BFloat16", "BFloat16")), "computed in another type", True),
        (retyped(("FP4E2M1", "BFloat16")), "computed in another type", True),
        (renamed("Foreign"), "of type Foreign, not a plugin's", False),
        (nameless, "none of 5 custom nodes among", False),
        (lambda layers, _: [replace(x, operands=()) for x in layers], "21 of 21 products", False),
    ],
)
def test_a_report_of_another_engine_is_found_and_unknown_words_are_not_certain(
    dense: Prefill, built: BuiltEngine, change: Callable[..., Layers], text: str, certain: bool
) -> None:
    assert not problems(built.tensors, built.layers, dense.graphs)
    layers = change(built.layers, dense.graphs.graphs[0].products[3])
    found = problems(built.tensors, layers, dense.graphs)
    assert text in found[0].text
    assert any(one.certain for one in found) == certain


def tensor(tensors: Sequence[InspectedTensor], **changes: object) -> list[InspectedTensor]:
    return [replace(one, **changes) if one.name == "tokens" else one for one in tensors]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda all_: all_[1:], "tensor tokens missing"),
        (lambda all_: [*all_, replace(all_[0], name="x")], "tensor x too many"),
        (lambda all_: tensor(all_, elem_type=TensorProto.FLOAT), "tokens of another type"),
        (lambda all_: tensor(all_, on_device=False), "tokens in the host's memory"),
        (lambda all_: tensor(all_, linear=(True, False)), "tokens in another format than rows"),
        (lambda all_: tensor(all_, shapes=all_[0].shapes[:1]), "tokens of shapes"),
    ],
)
def test_a_tensor_that_is_not_as_planned_is_found(
    dense: Prefill, built: BuiltEngine, change: Callable[..., list[InspectedTensor]], text: str
) -> None:
    assert built.tensors[0].name == "tokens"
    [found] = problems(change(built.tensors), built.layers, dense.graphs)
    assert found.certain
    assert text in found.text


@pytest.mark.parametrize(
    ("how", "certain", "refused"),
    [
        ("auto", True, True),
        ("auto", False, False),
        ("refuse", False, True),
        ("note", True, False),
    ],
)
def test_a_finding_is_refused_or_noted(
    tmp_path: Path, how: str, certain: bool, refused: bool
) -> None:
    with building():
        by = builder(BuiltPackage(tmp_path), options(tmp_path, inspect=how).tensorrt, Silent())
        with pytest.raises(EngineError, match="a word") if refused else nullcontext():
            by.judge("x.plan", [EngineFinding("a word", certain)])
        assert by.warnings == ["INSPECTED: a word"]


def test_what_the_inspector_reports_is_read(tmp_path: Path) -> None:
    """Its report in JSON, as TensorRT's documents show it; no device is here to make one."""
    port = {"Name": "x", "Dimensions": [4], "Datatype": "FP4E2M1"}
    whole = {"Name": "one", "LayerType": "gemm", "Inputs": [port], "Outputs": [{"Name": "y"}],
             "Constants": [{"Name": "w", "Format/Datatype": "FP4"}], "TacticName": "t",
             "Metadata": "[ONNX Layer: a.1]\x1e[ONNX Layer: a.2]"}  # fmt: skip
    with building():
        from thor_dflash.builders.tensorrt import engine_inspector

        trt = tensorrt()
        engine = SimpleNamespace(
            create_engine_inspector=lambda: SimpleNamespace(
                get_engine_information=lambda kind: json.dumps({"Layers": [whole, "two"]})
            ),
            num_io_tensors=1,
            num_optimization_profiles=2,
            get_tensor_name=lambda i: "tokens",
            get_tensor_dtype=lambda name: trt.DataType.INT32,
            get_tensor_mode=lambda name: trt.TensorIOMode.INPUT,
            get_tensor_location=lambda name: trt.TensorLocation.DEVICE,
            get_tensor_format=lambda name, i: trt.TensorFormat.LINEAR,
            get_tensor_profile_shape=lambda name, i: [trt.Dims([n]) for n in (1, 2, 3 + i)],
        )
        layers = engine_inspector.layers(engine)
        [tokens] = engine_inspector.tensors(engine)
    assert layers == [
        InspectedLayer("one", "gemm", "t", ("a.1", "a.2"), ("x",), ("y",), ("FP4E2M1", "FP4")),
        InspectedLayer("two", nodes=("two",)),
    ]
    shapes = (((1,), (2,), (3,)), ((1,), (2,), (4,)))
    assert tokens == InspectedTensor("tokens", TensorProto.INT32, True, (True, True), shapes)
