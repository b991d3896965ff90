"""Which engines a package will have, decided before TensorRT is asked, and what is refused then."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest
from onnx import numpy_helper
from support.checkpoints import Dialect, write_target
from support.trt_builds import CAPACITY, CHUNKS, HYBRID, NANO, options, plan_of

from thor_dflash.builders.build import make_plan, material
from thor_dflash.builders.checkpoint.drafter import read_drafter
from thor_dflash.builders.checkpoint.target import read_target
from thor_dflash.builders.tensorrt import package
from thor_dflash.builders.tensorrt.deployment_graph import deploy
from thor_dflash.core.errors import ConfigError, EngineError
from thor_dflash.core.model_dims import MIN_CONVERSATION, DrafterDims
from thor_dflash.package.launch_program import Program, Step, Value
from thor_dflash.runtime.decoding.model_runner import cache_rows, ring_rows


def test_profiles_hold_every_size_a_session_may_ask_for(tmp_path: Path) -> None:
    target, drafter = read_target(NANO / "target"), read_drafter(NANO / "drafter")
    longest, found = target.dims.max_position, dict[str, set[int]]()
    for one in plan_of(NANO / "target", NANO / "drafter", options(tmp_path)).together:
        free = {d.dim_param for v in one.model.graph.input for d in v.type.tensor_type.shape.dim}
        for ranges in one.ranges:
            assert ranges.keys() == free - {""}
            for symbol, size in ranges.items():
                for capacity in (drafter.dims.block + MIN_CONVERSATION, CAPACITY, longest):
                    rows = needed(drafter.dims, symbol, capacity)
                    assert size.least <= rows <= size.most
                    found.setdefault(symbol, set()).add(rows)
                fits = needed(drafter.dims, symbol, CAPACITY)
                assert size.least <= fits <= size.best <= min(size.most, fits + drafter.dims.block)
    assert found.keys() == {
        "cache_rows",
        *(f"ring_rows.{i}" for i in range(len(drafter.dims.layers))),
    }


def needed(drafter: DrafterDims, symbol: str, capacity: int) -> int:
    """Return the rows of a cache or ring (`symbol`) that a session of a capacity needs."""
    if symbol == "cache_rows":
        return cache_rows(capacity, drafter.block, CHUNKS[0])
    window = drafter.layers[int(symbol.partition(".")[2])].window
    return ring_rows(window, capacity, drafter.block, CHUNKS[0])


@pytest.mark.parametrize(("dialect", "some"), [("modelopt", False), ("mixed", True)])
def test_plugins_leave_rows_ready_for_plugins_alone(
    tmp_path: Path, dialect: Dialect, some: bool
) -> None:
    """In a step of few rows. `some`: some of its products are plugins; otherwise none is."""
    write_target(tmp_path / "t", HYBRID, 1, dialect)
    config = replace(options(tmp_path), chunks=(CHUNKS[0], 16))
    made = plan_of(tmp_path / "t", None, config).together
    graphs = {graph.name: graph for one in made for graph in one.graphs}
    short = graphs["prefill.chunk16"].plugins
    left = [name for name, node in short if "y0_slabs" in node.outputs]
    taken = [name for name, node in short if "x_slabs" in (*node.inputs, *node.outputs)]
    assert len(left) == len(taken)
    assert bool(left) == some
    together = next(one.graphs for one in made if one.name == "prefill")
    assert len(together) == (1 if some else 2)
    for name, node in short:
        names = {*node.inputs, *node.outputs, *node.attributes.values}
        assert "next_packed" not in names
        if name not in left:
            assert not {"next_gate", "next_norm_weight", "next_norm_offset", "y0_squares"} & names


def test_only_what_tensorrt_multiplies_with_is_a_constant(tmp_path: Path) -> None:
    """And every constant is read. The axis that is cut into blocks has a size that TensorRT knows:
    its documentation of DynamicQuantize demands one.
    """
    write_target(tmp_path / "t", HYBRID, 1, "modelopt")
    for one in plan_of(tmp_path / "t", None, options(tmp_path)).together:
        graph = one.model.graph
        held = {t.name for t in graph.initializer if t.HasField("data_location")}
        assert bool(held) == (one.name == "prefill")
        assert held <= {name for node in graph.node for name in node.input}
        assert not [n for n in held if "conv1d" in n or "embed" in n]
        assert not held & {v.name for v in graph.input}
        values = {node.output[0]: node for node in graph.node if node.op_type == "Constant"}
        shapes = [
            numpy_helper.to_array(values[node.input[1]].attribute[0].t).tolist()
            for node in graph.node
            if node.op_type == "Reshape" and node.input[1] in values
        ]
        assert ([0, HYBRID.value_heads * HYBRID.value_dim] in shapes) == bool(held)


@pytest.mark.parametrize(("dialect", "scale"), [("modelopt", 0.01), ("compressed-tensors", 1 / 77)])
def test_the_scale_of_rows_is_what_the_checkpoint_tells(
    tmp_path: Path, dialect: Dialect, scale: float
) -> None:
    write_target(tmp_path / "t", HYBRID, 1, dialect)
    plan = make_plan(read_target(tmp_path / "t"), None, options(tmp_path))
    [read] = set(material(plan).scales.values())
    assert read == pytest.approx(scale, rel=1e-6)


# ---- refusals ----------------------------------------------------------------------------------
def test_a_prefill_in_fp4_needs_scales_for_its_rows(tmp_path: Path) -> None:
    config = options(tmp_path, prefill_linears="tensorrt")
    with pytest.raises(ConfigError, match="without an input_scale"):
        plan_of(NANO / "target", None, config)
    write_target(tmp_path / "t", HYBRID, 1, "bf16")
    with pytest.raises(ConfigError, match="no NVFP4 weight"):
        plan_of(tmp_path / "t", None, config)


def test_a_state_that_two_nodes_read_is_not_written_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(package, "_readers", lambda model: defaultdict(lambda: 2))
    with pytest.raises(ConfigError, match="read by 2 nodes and written in place by one of them"):
        plan_of(NANO / "target", None, options(tmp_path))


def test_a_step_that_reads_what_nobody_has_made_is_refused() -> None:
    rows = Value(dtype="bfloat16", shape=(16, 64))
    program = Program(
        name="step",
        inputs={},
        outputs={"y": rows},
        values={"later": rows},
        weights={},
        steps=(Step(name="one", op="linear", attributes={}, ports={"x": "later", "y0": "y"}),),
        scratch=0,
    )
    with pytest.raises(EngineError, match=r"one\.x must be made by an earlier step \(got later\)"):
        deploy(program)
