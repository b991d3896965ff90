"""Whole programs on the CPU: the engine captures and replays them, the emulator runs the kernels.

The tests of operators do not cover what the calls of a program share: norms, slabs, sums of
squares, scratch memory. Here a small package runs cycles as on a device, and results are compared
with those of ONNX Runtime."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from emulator.compiler import COMPILER, EmulatorFault
from stand_ins.emulated_driver import emulate
from support.engine_pair import DEVICE, Pair, built, near, opened, packages, paired
from support.loop_models import answer
from support.poisoned_memory import poison

from thor_dflash.builders import build as builder
from thor_dflash.core.tensors import Array
from thor_dflash.package.launch_program import read
from thor_dflash.plugins.launch import never
from thor_dflash.plugins.registry import KERNELS
from thor_dflash.runtime.decoding.proposers import DflashDrafter
from thor_dflash.runtime.session import Request

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return packages(tmp_path_factory.mktemp("programs"))


@pytest.fixture(scope="module")
def pair(root: Path) -> Iterator[Pair]:
    """Both engines after a first cycle, which has committed five rows."""
    with paired(root, 16) as made:
        made.cycle([1, 200, 3, 40])
        yield made


def test_cycles_leave_what_onnx_runtime_leaves(pair: Pair) -> None:
    pair.cycle(list(range(90, 105)))
    assert set(pair.ours.engine.busy()) == {"propose+verify+accept+observe"}
    assert len(pair.device.graphs) == 1
    assert {name for name, places in pair.places.items() if len(places) == 2} == pair.moved()


@pytest.mark.slow
def test_a_program_without_fusion_gives_nearly_the_same_logits(pair: Pair, root: Path) -> None:
    assert pair.begun is not None
    tokens, logits = pair.begun
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builder, "make_plan", partial(builder.make_plan, fused=False))
        apart = built(root, "cuda", "apart")
    steps = read(apart, "verify").steps
    assert not any({"x_slabs", "next_gate"} & step.ports.keys() for step in steps[:-1])
    near("logits", verified(apart, tokens), logits)


def verified(package: Path, tokens: Array) -> Array:
    """Logits of a verify of the first block of a sequence."""
    with pytest.MonkeyPatch.context() as patch:
        emulate(patch, DEVICE)
        with closing(opened(package)) as session:
            session.model.write_tokens(tokens.tolist())
            session.model.verify()
            return session.model.read("logits")


@pytest.mark.slow
def test_rows_gated_by_attention_equal_those_gated_by_the_product(pair: Pair, root: Path) -> None:
    assert pair.begun is not None
    tokens, logits = pair.begun
    with pytest.MonkeyPatch.context() as patch:
        rule = replace(KERNELS["verify_attention"], fuses_gate=never)
        patch.setitem(KERNELS, "verify_attention", rule)  # type: ignore[arg-type]
        other = built(root, "cuda", "ungated")
    steps = [s for s in read(other, "verify").steps if s.op == "verify_attention"]
    assert not any("next_gate" in step.ports for step in steps)
    np.testing.assert_array_equal(verified(other, tokens).view(np.uint32), logits.view(np.uint32))


@pytest.mark.slow
def test_rows_finished_by_gdn_are_near_those_finished_by_the_product(
    pair: Pair, root: Path
) -> None:
    """Not equal: they are rounded before the factor 1 / rms instead of after it."""
    assert pair.begun is not None
    tokens, logits = pair.begun
    with pytest.MonkeyPatch.context() as patch:
        rule = replace(KERNELS["gdn"], fuses_head_norm=never)
        patch.setitem(KERNELS, "gdn", rule)  # type: ignore[arg-type]
        other = built(root, "cuda", "unfinished")
    steps = [s for s in read(other, "verify").steps if s.op == "gdn"]
    assert not any("next_gate" in step.ports for step in steps)
    near("logits", verified(other, tokens), logits)


def test_a_new_sequence_finds_cleared_states(root: Path) -> None:
    with paired(root, 16) as made:
        engine, state = made.ours.engine, made.ours.state
        states = {n: t for n, t in state.tensors.items() if n.startswith("gdn.")}
        for tensor in states.values():
            engine.write(tensor, np.ones(tensor.spec.shape, tensor.spec.dtype.numpy))
        assert all(engine.read(tensor).all() for tensor in states.values())
        state.reset()
        assert [n for n, tensor in states.items() if engine.read(tensor).any()] == []


def test_rings_written_in_the_same_graph_are_not_read_early(root: Path) -> None:
    """draft_attention reads the rings before it waits. So a graph in which an earlier kernel writes
    them must be a fault; in a cycle, `propose` comes before `observe`.
    """
    with paired(root, 16) as made:
        engine, calls = made.ours.engine, [made.ours.call(n) for n in ("observe", "propose")]
        engine.write(calls[0].inputs["length"], np.array([20], np.int32))
        for call in calls:
            engine.run([call])
        with pytest.raises(EmulatorFault, match=r"draft_attention: .* wait_for_previous"):
            engine.run(calls)


SHARED = {
    "verify": "layers.0.linear_attn.in_proj= layers.0.linear_attn.out_proj= "
    "layers.0.mlp.gate_up= layers.0.mlp.down_proj "
    "layers.1.linear_attn.in_proj= layers.1.linear_attn.out_proj= "
    "layers.1.mlp.gate_up= layers.1.mlp.down_proj layers.2.self_attn.qkv= "
    "layers.2.self_attn.o_proj layers.2.mlp.gate_up= layers.2.mlp.down_proj head=",
    "propose": "drafter.layers.0.self_attn.qkv= "
    "drafter.layers.0.self_attn.o_proj drafter.layers.0.mlp.gate_up= "
    "drafter.layers.0.mlp.down_proj drafter.layers.1.self_attn.qkv= "
    "drafter.layers.1.self_attn.o_proj drafter.layers.1.mlp.gate_up= "
    "drafter.layers.1.mlp.down_proj head=",
    "observe": "drafter.context=",
}
"""Calls whose rows an earlier call leaves in slabs; "=" marks rows that are also normed and come
with sums of squares."""
ROWS_OF = {"embed": "rows", "gdn": "o", "verify_attention": "o", "draft_attention": "o"}
"""Operator -> its output of rows, where that is not y0."""


def test_all_rows_that_can_be_left_in_slabs_are(pair: Pair) -> None:
    bounds = {bound.program.name: bound for bound in pair.device.bounds}
    for name, calls in SHARED.items():
        found: list[str] = []
        for step in bounds[name].program.steps:
            launched = [p.launch.kernel for p in bounds[name].launches if p.step is step]
            if "x_slabs" in step.ports:
                found.append(step.name + "=" * ("x_squares" in step.ports))
                assert "linear_rows" not in launched
                makers = [s for s in bounds[name].program.steps
                          if s.ports.get("y0_slabs") == step.ports["x_slabs"]]  # fmt: skip
                assert [m.ports[ROWS_OF.get(m.op, "y0")] for m in makers] == [step.ports["x"]]
            elif step.op in ("linear", "head"):
                assert launched[0] == "linear_rows"
        assert found == calls.split()


@pytest.mark.slow
def test_no_answer_depends_on_memory_that_nothing_wrote(root: Path) -> None:
    answers: list[list[int]] = []
    for prepare in (poison, lambda patch: None):
        with pytest.MonkeyPatch.context() as patch:
            prepare(patch)
            emulate(patch, DEVICE)
            with closing(opened(root / "cuda")) as session:
                asked = Request(prompt=tuple(range(40)), max_tokens=3)
                answers.append(answer(session, asked, DflashDrafter()))
                logits = session.model.read("logits")
            assert np.isfinite(logits).all()
    assert answers[0] == answers[1]
