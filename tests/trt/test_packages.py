"""Packages built by TensorRT for RTX on a CPU, and never executed: NVIDIA's parser and builder take
our graphs, and their engines hold what the graphs do.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from support.checkpoints import Dialect, DrafterGeometry, write_drafter, write_target
from support.samples import verify
from support.trt_builds import (
    CHUNKS,
    HYBRID,
    NANO,
    BuiltPackage,
    build_hybrid,
    build_real,
    options,
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
    hold_plugins(nano)


def test_a_dflash2_drafter_becomes_plugins_too(tmp_path: Path) -> None:
    target, drafter = write_target(tmp_path / "target", HYBRID, 1), tmp_path / "drafter"
    write_drafter(drafter, HYBRID, DrafterGeometry(second=True, block=8), 2)
    made = build_real(tmp_path / "package", target, drafter, options(tmp_path))
    hold_plugins(made)
    ops = [node.op for _, node in made.engines["propose"].together.graphs[0].plugins]
    assert (ops.count("draft_conv"), ops.count("selector")) == (8, 1)


def hold_plugins(made: BuiltPackage) -> None:
    """Every engine must be its plugins, and the computation of sizes that a session decides."""
    for name, engine in made.engines.items():
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


def products(dialect: Dialect) -> Counter[str]:
    """Return how many of TensorRT's own products a prefill has, by projection: the last layer,
    which is of attention, has none behind its mixer, nor for the gate of its rows.
    """
    if dialect not in ("modelopt", "compressed-tensors", "mixed"):
        return Counter()
    mlp = Counter(gate_up=2, down_proj=1)
    gdn = Counter(in_proj=2, out_proj=1)
    if dialect == "mixed":
        gdn = Counter()  # stored in FP8
    found: Counter[str] = Counter()
    for _ in range(3):
        found += gdn + mlp
    return found + Counter(qkv=3 if dialect != "mixed" else 0)


@pytest.mark.parametrize(
    "dialect",
    [
        "modelopt",
        "fp8",
        pytest.param("compressed-tensors", marks=pytest.mark.slow),
        pytest.param("mixed", marks=pytest.mark.slow),
    ],
)
def test_products_of_a_prefill_are_tensorrt_s_own_if_stored_in_nvfp4(
    tmp_path: Path, dialect: Dialect
) -> None:
    """The build refuses an engine in which one of them is computed in another type."""
    made = build_hybrid(tmp_path, dialect)
    assert not (made.out / ".scratch").exists()
    assert {n for n in made.engines if n.startswith("prefill")} == (
        {"prefill"} if products(dialect) else {"prefill", f"prefill.chunk{CHUNKS[1]}"}
    )
    engine = made.engines["prefill"]
    names = [name.rpartition(".")[0].rpartition(".")[2] for name in
             engine.together.graphs[0].products]  # fmt: skip
    assert Counter(names) == products(dialect)
    assert "gemm" not in kinds(made.engines["verify"].layers)
    profiles = len(engine.together.ranges)
    assert profiles == (len(CHUNKS) if names else 1)
    for i, chunk in enumerate(CHUNKS[:profiles]):
        description = made.description("prefill" if i == 0 else f"prefill.chunk{chunk}")
        assert (description.file, description.profile) == ("prefill.plan", i)
        assert description.inputs["tokens"].shape == (chunk,)
