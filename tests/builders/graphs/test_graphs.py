"""What graphs take from the configurations of checkpoints, and what they say of their states."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from onnx import NodeProto, helper

from thor_dflash.builders.build import make_plan
from thor_dflash.builders.checkpoint.drafter import read_drafter
from thor_dflash.builders.checkpoint.target import read_target
from thor_dflash.config.build import BuildConfig
from thor_dflash.plugins.contract import IN_PLACE

NANO = Path(__file__).parents[3] / "models" / "planner-nano"


def epsilon(node: NodeProto) -> float:
    given = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    return float(given["norm_eps"])


def test_every_norm_has_the_epsilon_of_its_own_model() -> None:
    target, drafter = read_target(NANO / "target"), read_drafter(NANO / "drafter")
    target = replace(target, dims=replace(target.dims, eps=0.25))
    drafter = replace(drafter, dims=replace(drafter.dims, eps=0.5))
    found: dict[str, set[float]] = {}
    for graph in make_plan(target, drafter, BuildConfig()).graphs:
        nodes = graph.proto().graph.node
        normed = [n for n in nodes if any(name.endswith("norm.weight") for name in n.input)]
        found[graph.name] = {epsilon(node) for node in normed}
    assert found == {
        "prefill": {0.25}, "verify": {0.25}, "accept": set(), "accept_masked": set(),
        "accept_sampled": set(), "accept_sampled_masked": set(), "sample_drafts": set(),
        "sample_drafts_rejection": set(), "accept_rejection": set(),
        "propose": {0.5}, "observe": {0.5}, "observe_chunk": {0.5},
    }  # fmt: skip


def test_caches_and_rings_are_written_in_place() -> None:
    """They are the largest states. Other states alternate between two places."""
    target, drafter = read_target(NANO / "target"), read_drafter(NANO / "drafter")
    for graph in make_plan(target, drafter, BuildConfig()).graphs:
        model = graph.proto()
        [listed] = [p.value for p in model.metadata_props if p.key == IN_PLACE]
        large = ("next.attention.", "next.drafter.")
        names = [out.name for out in model.graph.output if out.name.startswith(large)]
        assert listed.split() == sorted(names), graph.name


@pytest.mark.parametrize("drafted", [True, False])
def test_every_node_is_read_or_leaves_an_output(drafted: bool) -> None:
    """No engine then runs a step for nothing, and TensorRT has none to remove. Nothing reads the
    rows of the last layer of a prefill, unless the drafter taps them.
    """
    target = read_target(NANO / "target")
    drafter = read_drafter(NANO / "drafter") if drafted else None
    last = len(target.dims.layers) - 1
    tapped = drafter and replace(drafter, dims=replace(drafter.dims, taps=(0, last)))
    for one in (drafter, tapped):
        for graph in make_plan(target, one, BuildConfig(engine="cuda")).graphs:
            model = graph.proto().graph
            read = {n for node in model.node for n in node.input} | {v.name for v in model.output}
            assert not [node.name for node in model.node if not read & {*node.output}], graph.name
            assert not [t.name for t in model.initializer if t.name not in read], graph.name
