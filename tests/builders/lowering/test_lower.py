"""Programs (launch lists) of the CUDA engine: every node of the graphs becomes a step, values that
are needed at the same time do not overlap in memory, and what is fused is right.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper
from support.checkpoints import GEOMETRIES, DrafterGeometry, write_drafter, write_target
from support.samples import verify

from thor_dflash.builders.build import build, make_plan
from thor_dflash.builders.checkpoint.drafter import read_drafter
from thor_dflash.builders.checkpoint.target import read_target
from thor_dflash.builders.lowering.lower import lower
from thor_dflash.builders.lowering.packed_weights import WeightPacker
from thor_dflash.builders.lowering.scratch_offsets import Lifetime, assign_offsets
from thor_dflash.builders.output.weight_files import WeightFiles
from thor_dflash.builders.synthetic import write_synthetic
from thor_dflash.config.build import BuildConfig
from thor_dflash.core.errors import ConfigError
from thor_dflash.core.progress import Silent
from thor_dflash.package import manifest
from thor_dflash.package.launch_program import ENDING, Program, read
from thor_dflash.plugins.contract import DOMAIN, Attributes
from thor_dflash.plugins.registry import KERNELS

NANO = Path(__file__).parents[3] / "models" / "planner-nano"


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("cuda") / "package"
    config = BuildConfig(engine="cuda", chunk=128, capacity=512)
    build(NANO / "target", NANO / "drafter", out, config, Silent())
    return out


def programs(package: Path) -> list[Program]:
    return [read(package, p.name.removesuffix(ENDING)) for p in package.glob(f"*{ENDING}")]


def test_a_package_for_cuda_holds_programs_and_no_onnx(package: Path) -> None:
    found = manifest.read(package)
    verify(package, found)
    assert (found.engine, found.kv, found.activations) == ("cuda", "fp8", "bf16")
    assert not list(package.glob("*.onnx"))
    assert {"prefill", "verify", "accept", "accept_masked", "propose", "observe"} <= {
        p.name for p in programs(package)
    }


def test_every_operator_call_of_the_graph_is_a_step_in_order(package: Path) -> None:
    config = BuildConfig(engine="cuda", chunk=128, capacity=512)
    plan = make_plan(read_target(NANO / "target"), read_drafter(NANO / "drafter"), config)
    for graph, program in zip(plan.graphs, plan.programs, strict=True):
        nodes = [n.name for n in graph.proto().graph.node if n.domain == DOMAIN]
        names = [s.name for s in program.steps if KERNELS[s.op].op.type.startswith("Thor")]
        assert [name for name in names if name in nodes] == nodes
        assert set(program.outputs) <= {n for s in program.steps for n in s.ports.values()}


def test_values_are_written_before_they_are_read(package: Path) -> None:
    outputs = {"rows", "y", "tokens"}  # of the standard operators, whose contracts have no ports
    outputs |= {"y0_slabs", "y0_squares"}  # of any operator, added to its contract
    for program in programs(package):
        known = {*program.inputs, *program.weights}
        for step in program.steps:
            op = KERNELS[step.op].op
            attributes = Attributes({**op.attributes, **step.attributes})
            inputs = {port.name for port in op.inputs_of(attributes)}
            written = outputs | {port.name for port in op.outputs_of(attributes)}
            read = {n for p, n in step.ports.items() if p in inputs or p not in written}
            assert read <= known, step.name
            known |= set(step.ports.values())
        assert known >= set(program.outputs)


def test_values_alive_at_once_do_not_overlap(package: Path) -> None:
    for program in programs(package):
        alive: dict[str, list[int]] = {}
        for at, step in enumerate(program.steps):
            for name in step.ports.values():
                if name in program.values:
                    alive.setdefault(name, []).append(at)
        spans = [
            (v.offset, v.offset + v.spec(n).nbytes({}), min(ats), max(ats), n)
            for n, ats in alive.items()
            for v in [program.values[n]]
        ]  # fmt: skip
        for i, a in enumerate(spans):
            assert a[1] <= program.scratch
            for b in spans[:i]:
                together = a[2] <= b[3] and b[2] <= a[3]
                assert not together or a[1] <= b[0] or b[1] <= a[0], (program.name, a, b)


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 12), st.integers(0, 5)), max_size=14))
def test_any_lives_are_placed_apart(made: list[tuple[int, int, int]]) -> None:
    lives = [Lifetime(str(i), 256 * n, at, at + more) for i, (n, at, more) in enumerate(made)]
    offsets, total = assign_offsets(lives)
    busiest = max(
        (sum(v.nbytes for v in lives if v.first <= t <= v.last) for t in range(20)), default=0
    )
    assert busiest <= total <= sum(v.nbytes for v in lives)
    for i, a in enumerate(lives):
        for b in lives[:i]:
            if a.first <= b.last and b.first <= a.last:
                low, high = sorted((a, b), key=lambda v: offsets[v.name])
                assert offsets[low.name] + low.nbytes <= offsets[high.name]


def test_prefill_and_verify_share_their_weights(package: Path) -> None:
    verify, prefill = read(package, "verify").weights, read(package, "prefill").weights
    assert set(prefill) < set(verify)
    assert all(verify[name] == weight for name, weight in prefill.items())


def test_attention_leaves_its_rows_gated_for_the_next_product(package: Path) -> None:
    steps = read(package, "verify").steps
    products = {s.ports["x"]: s for s in steps if s.name.endswith("o_proj")}
    makers = [s for s in steps if s.op == "verify_attention"]
    assert makers
    for maker in makers:
        product = products.pop(maker.ports["o"])
        assert maker.ports["y0_slabs"] == product.ports["x_slabs"]
        assert maker.ports["next_gate"] == product.ports["gate"]
        assert "x_squares" not in product.ports
    assert not products
    long = [s for s in read(package, "prefill").steps if s.op == "verify_attention"]
    assert all({"next_gate", "y0_slabs"}.isdisjoint(s.ports) for s in long)


def test_gdn_leaves_its_rows_normed_by_head_and_gated_for_the_next_product(package: Path) -> None:
    steps = read(package, "verify").steps
    products = {s.ports["x"]: s for s in steps if s.name.endswith("out_proj")}
    makers = [s for s in steps if s.op == "gdn"]
    assert makers
    for maker in makers:
        product = products.pop(maker.ports["o"])
        assert maker.ports["y0_slabs"] == product.ports["x_slabs"]
        assert maker.ports["y0_squares"] == product.ports["x_squares"]
        assert maker.ports["next_gate"] == product.ports["gate"]
        assert maker.ports["next_norm_weight"] == product.ports["norm_weight"]
        assert maker.attributes["next_norm_offset"] == product.attributes["norm_offset"]
    assert not products
    long = [s for n in ("prefill", "prefill.chunk32") for s in read(package, n).steps]
    gdn = [s for s in long if s.op == "gdn"]
    assert gdn
    assert all({"next_gate", "y0_slabs"}.isdisjoint(s.ports) for s in gdn)


def test_what_leaves_memory_idle_and_the_product_after_it_fetch_ahead(package: Path) -> None:
    steps = read(package, "verify").steps
    idle = [i for i, s in enumerate(steps) if s.op in ("gdn", "verify_attention")]
    assert {steps[i].op for i in idle} == {"gdn", "verify_attention"}
    prefetches = 0
    for i in idle:
        product, after = [s for s in steps[i:] if "packed" in s.ports][:2]
        assert product.name.endswith(("out_proj", "o_proj"))
        assert after.name.endswith("gate_up")
        assert steps[i].ports["next_packed"] == product.ports["packed"]
        assert product.ports["next_packed"] == after.ports["packed"]
        prefetches += 2
    assert sum("next_packed" in s.ports for s in steps) == prefetches
    for name in ("prefill", "prefill.chunk64", "propose"):
        assert not any("next_packed" in s.ports for s in read(package, name).steps)


def test_a_node_without_a_kernel_is_refused_by_name() -> None:
    value = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])
    out = helper.make_tensor_value_info("y", TensorProto.FLOAT, [1])
    node = helper.make_node("Sin", ["x"], ["y"], name="wave")
    model = helper.make_model(helper.make_graph([node], "odd", [value], [out]))
    with pytest.raises(ConfigError, match=r"every node of the graphs \(got odd: Sin wave"):
        lower(model, WeightPacker(WeightFiles()))


def test_rows_without_a_kernel_are_refused_by_the_key_that_sets_them() -> None:
    config = BuildConfig(engine="cuda", block=40, chunk=128, capacity=512)
    message = r"sizes of step verify \(got .* at most 32 rows \(got 40\)\); build.block and"
    with pytest.raises(ConfigError, match=message):
        make_plan(read_target(NANO / "target"), None, config)


@pytest.mark.parametrize("engine", ["cuda", "tensorrt"])
@pytest.mark.parametrize("key", ["kv", "activations"])
def test_float32_is_refused_by_its_key(tmp_path: Path, engine: str, key: str) -> None:
    write_target(tmp_path / "t", GEOMETRIES["27b"], 1, "bf16")
    write_drafter(tmp_path / "d", GEOMETRIES["27b"], DrafterGeometry(), 2)
    config = BuildConfig(**{"engine": engine, key: "f32"})  # type: ignore[arg-type]
    message = rf"build.{key} must be auto or bf16( or fp8)? for engine {engine} \(got f32\)"
    with pytest.raises(ConfigError, match=message):
        make_plan(read_target(tmp_path / "t"), read_drafter(tmp_path / "d"), config)


@pytest.mark.slow
def test_the_27b_is_lowered_without_its_weights(tmp_path: Path) -> None:
    made = write_synthetic("qwen3.6-27b", tmp_path, BuildConfig(engine="cuda"), (1, 32))
    assert manifest.read(tmp_path) == made
    manifest.check_files(tmp_path, made)
    verify = read(tmp_path, "verify")
    linears = [s for s in verify.steps if s.op in ("linear", "head")]
    assert len(linears) == 257
    used = {n for s in linears for p, n in s.ports.items() if p == "packed"}
    size = sum(verify.weights[n].nbytes for n in used)
    # 9/16 of a byte for each NVFP4 weight, two bytes for each of in_proj_a and in_proj_b.
    assert size == pytest.approx(14.446e9, rel=2e-3)
    assert (made.chunk, made.chunks) == (512, (256, 128, 64, 32))
    for step in (f"{step}.chunk{rows}" for step in manifest.CHUNK_STEPS for rows in made.chunks):
        assert set(read(tmp_path, step).weights) == set(read(tmp_path, step.split(".")[0]).weights)


def test_every_product_of_a_dflash2_drafter_reads_prepared_rows(tmp_path: Path) -> None:
    """The norms before its convolutions cost no launch, and the selector shares the head's rows."""
    g = GEOMETRIES["heads27b"]
    g = replace(g, value_heads=4)
    write_target(tmp_path / "t", g, 0)
    write_drafter(tmp_path / "d", g, DrafterGeometry(second=True, block=8), 0)
    config = BuildConfig(engine="cuda", chunk=64, chunks=(32,))
    plan = make_plan(read_target(tmp_path / "t"), read_drafter(tmp_path / "d"), config)
    [steps] = [p.steps for p in plan.programs if p.name == "propose"]
    products = [s for s in steps if s.op in ("linear", "head")]
    assert len(products) == 2 * 6 + 2
    down = [s for s in products if s.name.endswith("down_proj")]
    assert [s for s in products if "x_slabs" not in s.ports] == down, "96 columns are no slabs"
    [head, hidden] = products[-2:]
    assert head.ports["x_squares"] == hidden.ports["x_squares"]
    assert not [s for s in steps if s.op == "compose"]
    for graph in (graph.proto().graph for graph in plan.graphs):
        read = {name for node in graph.node for name in node.input}
        assert {i.name for i in graph.input} <= read, "TensorRT drops an input that nothing reads"
