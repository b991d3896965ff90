"""Every operator as a TensorRT plugin: types, shapes and memory follow its contract, and `enqueue`
runs the operator's launches. TensorRT is replaced by a stand-in.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from emulator.runner import Emulator
from stand_ins import tensorrt_module as trt
from support.gated_attention import gated_call
from support.gdn_cases import case_of
from support.gdn_epilogue_calls import finishing, normed_case, taking
from support.kernel_cases import cases_of, taken_of
from support.kernel_runner import Call, call_of, launch, packed, rule_of, site_of
from support.plugin_enqueue import Emulated, Ready
from support.sites_27b import sites
from support.slab_outputs import leaving

from thor_dflash.core.errors import EngineError
from thor_dflash.core.tensors import DType
from thor_dflash.plugins import DRAFT_ATTENTION, GDN, LINEAR, OPS, VERIFY_ATTENTION
from thor_dflash.plugins.contract import DOMAIN, Op
from thor_dflash.plugins.launch import THOR, CallSite, Shaped
from thor_dflash.plugins.tensorrt.node import PluginNode, describe, parse, tensor_of

every_operator = pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)


@pytest.fixture(autouse=True)
def tensorrt(monkeypatch: pytest.MonkeyPatch) -> None:
    trt.stand_in(monkeypatch)


def taken(op: Op) -> Iterator[tuple[str, CallSite]]:
    """Every call that an operator's kernels do not refuse: of its cases, and of the full model."""
    yield from taken_of(op)
    for name, attributes, inputs in sites(op.name):
        yield name, packed(site_of(op, attributes, inputs), {})[0]
    if op is GDN:
        weight = np.ones(128, np.float32)
        yield "finishing", finishing(call_of(GDN, case_of(1, 5, 4, 3)), weight, 1.0).site
    if op is LINEAR:
        yield "taking", taking(normed_case(5, 3, 128)).site


def node_of(site: CallSite) -> PluginNode:
    return describe(site, outs_of(site))


def outs_of(site: CallSite) -> set[str]:
    left = {"y0_slabs", "y0_squares"}
    return {p.name for p in site.op.outputs_of(site.attributes)} | left


def tensors(site: CallSite, ports: tuple[str, ...]) -> list[Shaped]:
    return [tensor_of(site.ports[port]) for port in ports]


def registered(*nodes: PluginNode) -> Any:
    from thor_dflash.plugins.tensorrt.host import Messages
    from thor_dflash.plugins.tensorrt.plugin import register

    registry: Any = trt.get_plugin_registry()
    return register(registry, THOR, None, nodes, Messages())


@every_operator
def test_a_node_says_all_that_a_launch_rule_asks(op: Op) -> None:
    for name, site in taken(op):
        node = node_of(site)
        assert parse(op.name, node.fields()) == node, name
        shaped = dict(zip((*node.inputs, *node.outputs), both(site, node), strict=True))
        again = node.site(shaped)
        assert dict(again.ports) == dict(site.ports), name
        assert again.attributes == site.attributes, name


def both(site: CallSite, node: PluginNode) -> list[Shaped]:
    return tensors(site, (*node.inputs, *node.outputs))


@every_operator
def test_types_and_shapes_are_the_contracts(op: Op) -> None:
    for name, site in taken(op):
        node = node_of(site)
        registered(node)
        plugin = trt.made(node)
        found = trt.outputs(plugin, tensors(site, node.inputs))
        want = [trt.desc(shaped) for shaped in tensors(site, node.outputs)]
        assert found == want, name
        assert plugin.num_outputs == len(want)
        trt.get_plugin_registry().creators.clear()


@every_operator
def test_a_size_that_is_still_unknown_stays_symbolic(op: Op) -> None:
    symbols = {"T", "N", "N0"} - ({"N", "N0"} if op.name in ("linear", "head") else set())
    for _, site in list(taken(op))[:3]:
        node = node_of(site)
        ports = {
            p.name: p for p in (*op.inputs_of(site.attributes), *op.outputs_of(site.attributes))
        }

        def declared(
            name: str, node: PluginNode = node, ports: Any = ports, site: CallSite = site
        ) -> list[Any]:
            sizes = site.ports[name].shape
            names = ports[name].shape if name in ports else sizes
            return [n if n in symbols else s for n, s in zip(names, sizes, strict=True)]

        shapes = node.output_shapes({n: declared(n) for n in node.inputs}, lambda n: n)
        assert {n: list(s) for n, s in shapes.items()} == {n: declared(n) for n in node.outputs}


@every_operator
def test_one_format_is_taken_and_only_the_contracts_types(op: Op) -> None:
    for _, site in list(taken(op))[:8]:
        node = node_of(site)
        registered(node)
        plugin, count = trt.made(node), len(node.inputs)
        # The bounds of sizes are given later, to configure_plugin.
        good = [replace(trt.dynamic(shaped), max=()) for shaped in both(site, node)]
        for pos, described in enumerate(good):
            assert plugin.supports_format_combination(pos, good, count), (pos, node.inputs)
            for other in (
                replace(described.desc, format=trt.TensorFormat.CHW32),
                replace(described.desc, type=trt.DataType.INT8),
            ):
                bad = [*good[:pos], replace(described, desc=other), *good[pos + 1 :]]
                assert not plugin.supports_format_combination(pos, bad, count)
        trt.get_plugin_registry().creators.clear()


@pytest.mark.parametrize(
    "op",
    [o for o in OPS if o.name not in ("accept", "sample", "fill_drafts")],
    ids=lambda op: op.name,
)
def test_what_the_kernels_refuse_is_refused_once_all_is_known(op: Op) -> None:
    """Every contract but those three allows rows in float32, and no kernel takes them."""
    name, site = next(iter(taken(op)))
    wide = {
        port: Shaped(DType.F32, shaped.shape) if shaped.dtype is DType.BF16 else shaped
        for port, shaped in site.ports.items()
    }
    site = CallSite(op, site.attributes, wide)
    assert rule_of(op).refuse(site), name
    node = node_of(site)
    registered(node)
    plugin, count = trt.made(node), len(node.inputs)
    descs = [trt.dynamic(shaped) for shaped in both(site, node)]
    rule = rf"Thor.*{op.name}\..* must be "
    with pytest.raises(EngineError, match=rule):
        plugin.configure_plugin(descs[:count], descs[count:])
    ins, outs = [d.desc for d in descs[:count]], [d.desc for d in descs[count:]]
    with pytest.raises(EngineError, match=rule):
        plugin.on_shape_change(ins, outs)


def test_a_creator_makes_the_calls_of_its_package_and_no_others() -> None:
    first, other = [node_of(site) for _, site in list(taken(OPS[0]))[:2]]
    [creator] = registered(first)
    assert [creator.name, creator.plugin_namespace, creator.plugin_version] == [
        "ThorLinear",
        DOMAIN,
        "1",
    ]
    plugin = trt.made(first)
    assert plugin.plugin_name == "ThorLinear"
    assert plugin.node == first
    with pytest.raises(EngineError, match="a call that its package describes"):
        creator.create_plugin("x", trt.fields({"call0": other.key[0], "call1": other.key[1]}), None)
    with pytest.raises(EngineError, match=r"registered once .* close the other"):
        registered(first)


# ---- enqueue -----------------------------------------------------------------------------------
SMALL = 3
"""Cases of each operator that run here, those with the smallest inputs; `make test` runs the first.
All cases run on a GPU."""


def small(op: Op) -> list[Any]:
    cases = cases_of(op)
    found = [(sum(x.nbytes for x in cases[n].inputs.values()), n) for n, _ in taken_of(op)]
    return [
        pytest.param(op, name, id=f"{op.name}-{name}", marks=pytest.mark.emulator if i else ())
        for i, (_, name) in enumerate(sorted(found)[:SMALL])
    ]


@pytest.mark.parametrize(("op", "name"), [param for op in OPS for param in small(op)])
def test_enqueue_leaves_the_bits_that_the_launches_leave(
    op: Op, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    enqueued_as_launched(call_of(op, cases_of(op)[name]), monkeypatch)


def test_enqueue_leaves_rows_for_the_next_product_too(monkeypatch: pytest.MonkeyPatch) -> None:
    case = cases_of(VERIFY_ATTENTION)["more_7_rows_at_120_4x2x256_bfloat16"]
    enqueued_as_launched(gated_call(case), monkeypatch)
    case = cases_of(DRAFT_ATTENTION)["more_5_rows_causal_1_window_100_at_140"]
    enqueued_as_launched(leaving(call_of(DRAFT_ATTENTION, case), "o"), monkeypatch)


def enqueued_as_launched(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    op = call.site.op
    want = launch(call, Emulator(0), THOR)
    for apart in (False, True):
        machine = Emulated(monkeypatch, THOR)
        ready = Ready(machine, call, apart=apart)
        for capturing in (False, True):
            machine.capturing = capturing
            ready.fill()
            ready.enqueue()
            for port, value in ready.outputs().items():
                np.testing.assert_array_equal(value.view(np.uint8), want[port].view(np.uint8), port)
        launches = len(machine.overlapped) // 2
        assert not machine.overlapped[0], "it cannot know what is in front of it"
        assert not machine.overlapped[launches]
        copies = machine.done.count("cuMemcpyDtoDAsync")
        assert copies == 2 * apart * len(rule_of(op).in_place & call.want.keys())


@every_operator
def test_a_capture_finds_everything_made_or_says_so(
    op: Op, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a stream is captured, an allocation would end the capture, and an upload would be
    captured instead of made.
    """
    call = call_of(op, cases_of(op)[small(op)[0].values[1]])
    machine = Emulated(monkeypatch, THOR)
    ready = Ready(machine, call, apart=False)
    ready.fill()
    ready.enqueue()
    machine.capturing = True
    before = len(machine.done)
    ready.fill()
    ready.enqueue()
    assert not [name for name in machine.done[before:] if name.startswith("cuMem")]
    made = [n for n in machine.done[:before] if n in ("cuMemcpyHtoDAsync", "cuMemsetD8Async")]
    if made:
        fresh = Ready(machine, call, apart=False)
        with pytest.raises(EngineError, match="must run once with these addresses"):
            fresh.enqueue()


def test_nothing_is_launched_while_an_engine_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorRT times plugins on inputs whose values mean nothing."""
    op = OPS[0]
    machine = Emulated(monkeypatch, THOR)
    ready = Ready(machine, call_of(op, cases_of(op)[small(op)[0].values[1]]), apart=False)
    trt.get_plugin_registry().creators.clear()
    registered(ready.node)
    ready.plugin = trt.made(ready.node)
    ready.plugin.on_shape_change(ready.ins, ready.outs)
    ready.enqueue()
    assert not machine.done
