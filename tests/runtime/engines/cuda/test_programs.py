"""Whole programs on the CPU: the engine captures and replays them, the emulator runs the kernels.

The tests of operators do not cover what the calls of a program share: norms, slabs, sums of
squares, scratch memory. Here a small package runs cycles as on a device, and results are compared
with those of ONNX Runtime."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from emulator.compiler import COMPILER, EmulatorFault
from stand_ins.emulated_driver import emulate
from support.drawn_blocks import decided_by_law
from support.engine_pair import DEVICE, NEAR, SECOND, Pair, opened, packages, paired
from support.loop_models import answer, oracle
from support.poisoned_memory import poison

from thor_dflash.calib.calibrate.observed_steps import ProgramObserver
from thor_dflash.calib.calibrate.package_statistics import observer, package_statistics
from thor_dflash.calib.check.step_runner import StepRunner
from thor_dflash.calib.quantize.statistics import Statistics, read_statistics
from thor_dflash.config.decode import SamplingConfig
from thor_dflash.config.engine import EngineConfig
from thor_dflash.core.progress import Silent
from thor_dflash.runtime.decoding.proposers import DflashDrafter, NoDrafter
from thor_dflash.runtime.engines.cuda.engine import CudaEngine
from thor_dflash.runtime.engines.cuda.launch_runner import LaunchRunner
from thor_dflash.runtime.measure.chain_timer import ChainTimer, tunable
from thor_dflash.runtime.measure.cuda_bench import CudaBench
from thor_dflash.runtime.session import Request, Session

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
def test_a_dflash2_drafter_drafts_what_onnx_runtime_drafts(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    with paired(packages(tmp_path_factory.mktemp("second"), SECOND), 8) as made:
        made.prefill(list(range(30, 70)))
        for forced in ([], [3], [], [4, 5, 6]):
            made.cycle(forced)
    assert made.agreed.count(True) >= 3, "the rounding of bf16 may change a draft"


@pytest.mark.slow
@pytest.mark.parametrize("second", [False, True])
def test_rejection_decides_by_what_each_draft_was_drawn_from(
    second: bool, root: Path, tmp_path: Path
) -> None:
    made, block = (packages(tmp_path, SECOND), 8) if second else (root, 16)
    how = SamplingConfig(temperature=0.8, top_k=40, top_p=0.95, seed=6, acceptance="rejection")
    with pytest.MonkeyPatch.context() as patch:
        emulate(patch, DEVICE)
        with closing(opened(made / "cuda", block)) as session:
            decided_by_law(session, Request(prompt=tuple(range(40)), max_tokens=20, sampling=how))
            rejecting = "propose+sample_drafts_rejection+verify+accept_rejection+observe"
            assert rejecting in session.model.engine.busy()


def test_a_new_sequence_finds_cleared_states(root: Path) -> None:
    with paired(root, 16) as made:
        engine, state = made.ours.engine, made.ours.state
        states = {n: t for n, t in state.tensors.items() if n.startswith("gdn.")}
        for tensor in states.values():
            engine.write(tensor, np.ones(tensor.spec.shape, tensor.spec.dtype.numpy))
        assert all(engine.read(tensor).all() for tensor in states.values())
        state.reset()
        assert [n for n, tensor in states.items() if engine.read(tensor).any()] == []


@pytest.mark.slow
def test_steps_in_ranges_leave_what_a_graph_leaves(root: Path) -> None:
    """Each range is captured once and run at both places of a state; a block between runs whole."""
    with paired(root, 16) as made:
        model, logits = made.ours, list[list[np.ndarray]]()
        assert isinstance(model.engine, CudaEngine)
        show = ProgramObserver(StepRunner(model.engine))
        for whole in ([0, 1, 2, 3], [2]):
            model.state.reset()
            logits.append([])
            for i, count in enumerate((13, 16, 16, 16)):
                model.write_tokens(range(16 * i, 16 * i + 16))
                model.verify(None if i in whole else lambda call: [None for _ in show.run(call)])
                logits[-1].append(model.read("logits"))
                model.state.commit(count)
        np.testing.assert_array_equal(logits[0], logits[1])


@pytest.mark.slow
def test_activations_are_those_on_onnx_runtime(root: Path, tmp_path: Path) -> None:
    """Also of rows that are written as slabs, too, with a norm or gate applied. An energy is a mean
    of squares, so it differs by twice what values do.
    """
    found: list[Statistics] = []
    with paired(root, 16) as made:
        for engine, model in (("cuda", made.ours), ("ort", made.theirs)):
            show, out = observer(root / engine, model.engine), tmp_path / f"{engine}.safetensors"
            documents = [tuple(range(40)), tuple(range(60, 99))]
            out.write_bytes(package_statistics(Session(model, None), show, documents, 1, Silent()))
            found.append(read_statistics(out))
    have, want = found
    assert list(have.inputs) == list(want.inputs)
    for name, one in want.inputs.items():
        error = np.abs(have.inputs[name].energy - one.energy).max()
        assert error <= 2 * NEAR * one.energy.max(), name
        assert have.inputs[name].energy.sum() == pytest.approx(one.energy.sum(), rel=0.01), name
        assert have.inputs[name].amax == pytest.approx(one.amax, rel=NEAR), name
    np.testing.assert_allclose(have.cache[2].k_amax, want.cache[2].k_amax, rtol=NEAR)
    np.testing.assert_allclose(have.cache[2].v_amax, want.cache[2].v_amax, rtol=NEAR)


@pytest.mark.slow
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


@pytest.mark.slow
def test_other_choices_obey_the_laws_and_chains_stay_in_their_memory(root: Path) -> None:
    """Some launches by the last of their candidates: chains run, and any drafter gives the same."""
    with pytest.MonkeyPatch.context() as patch:
        emulate(patch, DEVICE)
        with closing(opened(root / "cuda")) as session:
            engine, model = session.model.engine, session.model
            assert isinstance(engine, CudaEngine)
            runner = LaunchRunner(engine.driver, EngineConfig().cubins_directory)
            bench = CudaBench(engine, model, runner, {}, 0)
            other, timer = DEVICE, ChainTimer(bench)
            for one in tunable(bench, DEVICE)[:5]:  # those that read most weights
                other = other.choosing(one.site, one.choices[-1])
                trial = engine.trial(one.call, one.steps[:3], other)
                timer.place(one.call, 40)
                trial.captured.start()
                trial.close()
        patch.setattr(CudaEngine, "_tuned", lambda self: other)
        with closing(opened(root / "cuda")) as session:
            assert "tuned" in session.model.engine.device
            asked = Request(prompt=tuple(range(40)), max_tokens=12)
            truth = answer(session, asked, NoDrafter())
            assert answer(session, asked, DflashDrafter()) == truth
            assert answer(session, asked, oracle(truth)) == truth
