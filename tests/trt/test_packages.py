"""Packages built by TensorRT for RTX on a CPU, and never executed: NVIDIA's parser and builder take
our graphs, and their engines hold what the graphs do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pytest
from support.checkpoints import DrafterGeometry, write_drafter, write_target
from support.samples import verify
from support.trt_builds import (
    HYBRID,
    NANO,
    BuiltEngine,
    BuiltPackage,
    build_engine,
    build_real,
    options,
    plan_of,
)

from thor_dflash.builders.tensorrt import package
from thor_dflash.builders.tensorrt.inspection import InspectedLayer
from thor_dflash.package import manifest
from thor_dflash.plugins.contract import NEXT
from thor_dflash.plugins.tensorrt.node import fingerprint, parse

STATES = ("gdn.", "attention.", "drafter.")
"""How the names of states begin."""


@pytest.fixture(scope="module")
def nano(tmp_path_factory: pytest.TempPathFactory) -> BuiltPackage:
    tmp = tmp_path_factory.mktemp("trt")
    return build_real(tmp / "package", NANO / "target", NANO / "drafter", options(tmp))


def kinds(layers: list[InspectedLayer]) -> Counter[str]:
    return Counter(layer.kind for layer in layers)


def test_the_package_holds_an_engine_and_a_description_of_every_graph(nano: BuiltPackage) -> None:
    found = manifest.read(nano.out)
    verify(nano.out, found)
    assert (found.engine, found.kv, found.activations) == ("tensorrt", "fp8", "bf16")
    steps = {"verify", "accept", "accept_masked", "accept_sampled", "accept_sampled_masked",
             "accept_rejection", "propose", "sample_drafts", "sample_drafts_rejection",
             "observe", "observe_chunk", "observe_chunk.chunk64",
             "prefill", "prefill.chunk64"}  # fmt: skip
    assert nano.engines.keys() == steps
    for step in steps:
        one, graph = nano.description(step), nano.engines[step].together.graphs[0]
        assert (one.name, one.file, one.profile) == (step, f"{step}.plan", 0)
        assert one.sha256 == found.files[one.file].sha256
        assert (one.inputs, one.outputs) == (graph.inputs, graph.outputs)
        assert (one.weights, one.in_place) == (graph.weights, graph.in_place)
        assert [(call.name, parse(call.op, call.fields)) for call in one.nodes] == [*graph.plugins]
    log = (nano.out / package.LOG).read_text()
    assert "INSPECTED" not in log
    assert not [n for n in found.files if n.endswith((".onnx", ".program.json"))]


def test_an_engine_is_its_plugins_and_nothing_else(nano: BuiltPackage) -> None:
    """No copy, no reformat; engines with sizes that a session decides compute these once."""
    hold_plugins(nano.engines)


def test_a_dflash2_drafter_becomes_plugins_too(tmp_path: Path) -> None:
    target, drafter = write_target(tmp_path / "target", HYBRID, 1), tmp_path / "drafter"
    write_drafter(drafter, HYBRID, DrafterGeometry(second=True, block=8), 2)
    plan = plan_of(target, drafter, options(tmp_path))
    drafting = [one for one in plan.together if one.name in ("propose", "observe")]
    made = {one.name: build_engine(tmp_path, one, plan.constants) for one in drafting}
    hold_plugins(made)
    ops = [node.op for _, node in made["propose"].together.graphs[0].plugins]
    assert (ops.count("draft_conv"), ops.count("selector")) == (8, 1)


def hold_plugins(engines: Mapping[str, BuiltEngine]) -> None:
    """Every engine must be its plugins, and the computation of sizes that a session decides."""
    for name, engine in engines.items():
        graph = engine.together.graphs[0]
        plugins = [one for one in engine.layers if one.kind == "custom_layer"]
        nodes = Counter((node,) for node, _ in graph.plugins)
        assert Counter(one.nodes for one in plugins) == nodes, name
        dynamic = any(isinstance(n, str) for v in graph.inputs.values() for n in v.shape)
        assert kinds(engine.layers) - Counter(custom_layer=len(plugins)) == Counter(
            {"shape_call": 1} if dynamic else {}
        )


def test_a_state_is_read_and_written_by_its_plugin_alone(nano: BuiltPackage) -> None:
    kept: set[str] = set()
    for name, engine in nano.engines.items():
        graph = engine.together.graphs[0]
        for output in [n for n in graph.outputs if n.startswith(NEXT)]:
            state = output.removeprefix(NEXT)
            if state not in graph.inputs:
                continue
            assert state.startswith(STATES), state
            [reader] = [one for one in engine.layers if state in one.inputs]
            [writer] = [one for one in engine.layers if output in one.outputs]
            assert reader == writer or output not in graph.in_place, (name, state)
        kept |= {*graph.in_place}
    assert {n.rpartition(".")[2] for n in kept} == {"state", "k", "v"}


def test_the_builder_has_these_settings(nano: BuiltPackage) -> None:
    assert len(nano.settings) == len(nano.engines)
    for settings in nano.settings:
        assert settings == {
            "flags": {"DIRECT_IO", "MONITOR_MEMORY"},
            "workspace": 4096 << 20,
            "verbosity": "DETAILED",
            "level": 3,
            "streams": 0,
        }


def test_timings_are_kept_by_version_device_and_kernels(nano: BuiltPackage) -> None:
    version = nano.description("verify").made.tensorrt
    [file] = (nano.out.parent / "timings").iterdir()
    assert file.name == f"{version}-sm_110-20-{fingerprint()[:16]}.timing"
