"""The CUDA engine on a device with planner-nano: laws that hold bit for bit, and ONNX Runtime's
results.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.drawn_blocks import decided_by_law
from support.loop_models import DEAD, answer, drafts, erring, oracle
from support.planner_nano import package, request, tasks
from support.planner_nano import request as nano_request
from support.poisoned_memory import poison

from thor_dflash.config.decode import SamplingConfig
from thor_dflash.config.engine import EngineConfig
from thor_dflash.core.progress import Silent
from thor_dflash.core.tensors import Array
from thor_dflash.runtime.decoding.proposers import DflashDrafter, NoDrafter
from thor_dflash.runtime.engines.cuda.engine import CudaEngine
from thor_dflash.runtime.engines.protocol import Tensor
from thor_dflash.runtime.measure.score import score
from thor_dflash.runtime.session import Session, open_session

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return package(tmp_path_factory.mktemp("cuda") / "nano", engine="cuda")


@pytest.fixture(scope="module")
def session(made: Path) -> Iterator[Session]:
    with closing(open_session(made, EngineConfig(), Silent())) as opened:
        yield opened


@pytest.fixture(scope="module")
def second(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    """With the DFlash2 drafter."""
    out = package(tmp_path_factory.mktemp("cuda") / "second", engine="cuda", drafter="drafter2")
    with closing(open_session(out, EngineConfig(), Silent())) as opened:
        yield opened


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    out = package(tmp_path_factory.mktemp("ort") / "nano", engine="ort")
    with closing(open_session(out, EngineConfig(), Silent())) as opened:
        yield opened


def test_any_drafter_gives_the_plain_answer_on_every_held_out_prompt(session: Session) -> None:
    lengths: list[float] = []
    for index in range(len(tasks())):
        asked = request(session, index)
        truth = answer(session, asked, NoDrafter())
        rng = np.random.default_rng(index)
        random = drafts(lambda n, rng=rng: [int(t) for t in rng.integers(0, 1280, 15)])  # type: ignore[misc]
        for proposer in (DEAD, random, oracle(truth), erring(truth, 0.2, index), DflashDrafter()):
            assert answer(session, asked, proposer) == truth, (index, proposer)
        spec = session.report().spec  # the real drafter's
        assert spec.drafted > 0
        lengths.append(spec.accept_len)
    print(f"{np.mean(lengths):.2f} tokens a cycle")
    assert np.mean(lengths) > 8  # it was trained for these tasks


DRAWN = {
    "all": SamplingConfig(temperature=1.0, seed=1),
    "qwen": SamplingConfig(temperature=1.0, top_k=20, top_p=0.95, seed=2**63 - 1),
    "wide": SamplingConfig(temperature=0.7, top_p=0.9, min_p=0.01, seed=7),
}


@pytest.mark.parametrize("how", DRAWN)
def test_any_drafter_gives_the_plain_sampled_answer(session: Session, how: str) -> None:
    lengths: list[float] = []
    for index in range(0, len(tasks()), 8):
        greedy = request(session, index)
        asked = replace(greedy, sampling=DRAWN[how])
        truth = answer(session, asked, NoDrafter())
        for proposer in (DEAD, oracle(truth), erring(truth, 0.2, index), DflashDrafter()):
            assert answer(session, asked, proposer) == truth, (index, proposer)
        lengths.append(session.report().spec.accept_len)
    print(f"{np.mean(lengths):.2f} tokens a cycle")
    assert np.mean(lengths) > 3


@pytest.mark.parametrize("how", ["greedy", *DRAWN])
def test_a_dflash2_drafter_gives_the_plain_answer(second: Session, how: str) -> None:
    lengths: list[float] = []
    for index in range(0, len(tasks()), 4):
        asked = request(second, index)
        if how != "greedy":
            asked = replace(asked, sampling=DRAWN[how])
        truth = answer(second, asked, NoDrafter())
        assert answer(second, asked, DflashDrafter()) == truth, index
        lengths.append(second.report().spec.accept_len)
    print(f"{np.mean(lengths):.2f} tokens a cycle, of 8")
    assert np.mean(lengths) > 6


@pytest.mark.parametrize("drafter", ["session", "second"])
def test_rejection_decides_by_what_each_draft_was_drawn_from(
    drafter: str, request: pytest.FixtureRequest
) -> None:
    s: Session = request.getfixturevalue(drafter)
    how = SamplingConfig(temperature=0.8, top_k=50, seed=3, acceptance="rejection")
    lengths: list[float] = []
    for index in range(0, len(tasks()), 8):
        asked = replace(nano_request(s, index), sampling=how)
        decided_by_law(s, asked)
        assert len(answer(s, asked, DflashDrafter())) > 8
        lengths.append(s.report().spec.accept_len)
    print(f"{np.mean(lengths):.2f} tokens a cycle")
    assert np.mean(lengths) > 3


def test_an_oracle_gives_a_full_block_a_cycle(session: Session) -> None:
    asked = request(session, 0, 64)
    truth = answer(session, asked, NoDrafter())
    answer(session, asked, oracle([*truth, *[0] * 16]))
    assert max(session.report().spec.accept_hist[:15]) <= 1


def test_every_choice_is_nearly_the_best_for_onnx_runtime(
    session: Session, reference: Session
) -> None:
    """Given the same tokens (teacher forcing), ONNX Runtime's logit of each token that the device
    would choose must be nearly its largest.
    """
    worst = largest = 0.0
    for index in range(0, len(tasks()), 6):
        asked = request(session, index)
        tokens = [*asked.prompt, *answer(session, asked, DflashDrafter())]
        ours = score(session, tokens, False, Silent())["logits"]
        theirs = score(reference, tokens, False, Silent())["logits"]
        scale = np.abs(theirs).max()
        rows = np.arange(len(tokens))
        regret = theirs.max(1) - theirs[rows, ours.argmax(1)]
        worst = max(worst, float(regret.max() / scale))
        largest = max(largest, float(np.abs(ours - theirs).max() / scale))
    print(f"worst regret {worst:.4f} and worst difference {largest:.4f} of the logits' scale")
    assert worst < 0.03
    assert largest < 0.06


SIZES = (32, 64, 128, 256, 512)


@pytest.fixture(scope="module")
def sized(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    """A session of a package with the default sizes of prefill steps."""
    out = package(tmp_path_factory.mktemp("sized") / "nano", engine="cuda", chunk=0)
    with closing(open_session(out, EngineConfig(), Silent())) as opened:
        assert opened.model.step_sizes == SIZES
        yield opened


def long(session: Session, index: int) -> tuple[int, ...]:
    """The prompts of four tasks in a row: more than 512 tokens."""
    return sum((request(session, index + i).prompt for i in range(4)), ())


@pytest.mark.parametrize("chunk", SIZES)
def test_a_prompt_read_in_chunks_leaves_the_state_that_blocks_leave(
    sized: Session, chunk: int
) -> None:
    model = sized.model
    model.chunk = chunk
    used: set[int] = set()
    for index, count in enumerate((5, 32, 33, 64, 65, 100, 128, 129, 161, 300)):
        prompt = long(sized, 12 * index)[: count + 16]
        blocks = score(sized, prompt, False, Silent())["logits"][-16:]
        model.state.reset()
        for at in range(0, count, chunk):
            part = prompt[at : min(at + chunk, count)]
            model.prefill(part, observe=True)
            used.add(model.step_rows(len(part)))
        model.write_tokens(prompt[count:])
        model.verify()
        off = np.abs(model.read("logits") - blocks).max() / np.abs(blocks).max()
        assert off < 0.06, (count, off)
    assert used == {rows for rows in SIZES if rows <= chunk}


@pytest.mark.parametrize("chunk", SIZES)
def test_the_laws_hold_with_every_size_of_step(sized: Session, chunk: int) -> None:
    """Any drafter gives the same answer, and a saved prefix leaves the same bits, whatever the size
    of the step that reads the rest of the prompt.
    """
    sized.model.chunk = chunk
    for index in range(0, 120, 24):
        prompt = long(sized, index)[: chunk + 2 + 7 * index]
        asked = replace(request(sized, index, 100), prompt=prompt)
        truth = answer(sized, asked, NoDrafter())
        for proposer in (DEAD, erring(truth, 0.3, index), DflashDrafter()):
            assert answer(sized, asked, proposer) == truth
        state = sized.model.state.snapshot().arrays
        sized.prefixes.put("half", prompt[: chunk + 1])
        assert answer(sized, asked, DflashDrafter()) == truth
        assert sized.report().usage.cached_tokens == chunk
        for name, array in sized.model.state.snapshot().arrays.items():
            assert array.tobytes() == state[name].tobytes(), name
        sized.prefixes.drop("half")


@pytest.mark.parametrize("option", [{"saves": "states"}, {"chunk": 33}, {"kv": "bf16"}])
def test_other_builds_obey_the_laws(tmp_path: Path, option: dict[str, object]) -> None:
    out = package(tmp_path / "p", engine="cuda", **option)
    with closing(open_session(out, EngineConfig(), Silent())) as s:
        for index in range(0, 120, 12):
            asked = request(s, index)
            truth = answer(s, asked, NoDrafter())
            for proposer in (DEAD, erring(truth, 0.3, index), DflashDrafter()):
                assert answer(s, asked, proposer) == truth


def test_eager_launches_and_serial_launches_give_the_same_answers(
    session: Session, made: Path
) -> None:
    for config in (EngineConfig(graphs=False), EngineConfig(overlap=False)):
        with closing(open_session(made, config, Silent())) as s:
            for index in range(0, 120, 24):
                asked = request(s, index)
                assert answer(s, asked, DflashDrafter()) == answer(session, asked, DflashDrafter())


def test_a_record_handed_over_is_the_one_on_the_device(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host gets the record while the rest of the cycle still runs. It must be that of this
    cycle, not of the one before.
    """
    engine = session.model.engine
    assert isinstance(engine, CudaEngine)
    handed, read = 0, engine.read

    def both(tensor: Tensor, shape: tuple[int, ...] | None = None) -> Array:
        nonlocal handed
        found = read(tensor, shape)
        if tensor.spec.name == "record":
            handed += engine.replay.times.left
            np.testing.assert_array_equal(found, read(tensor, tensor.spec.at({})))
        return found

    monkeypatch.setattr(engine, "read", both)
    for index in range(0, len(tasks()), 4):
        answer(session, request(session, index), DflashDrafter())
    assert handed > 100


def test_a_thousand_requests_leak_no_memory_and_change_no_answer(session: Session) -> None:
    engine = session.model.engine
    assert isinstance(engine, CudaEngine)
    rng = np.random.default_rng(0)
    picks = [(int(i), int(n)) for i, n in zip(rng.integers(0, 120, 40), rng.integers(1, 90, 40),
                                              strict=True)]  # fmt: skip
    alone = {pick: answer(session, request(session, *pick), DflashDrafter()) for pick in picks}
    # What this engine made, not the device's free memory, which other processes change.
    before = list(engine.driver._made)
    for n in range(1000):
        pick = picks[int(rng.integers(0, len(picks)))]
        assert answer(session, request(session, *pick), DflashDrafter()) == alone[pick], n
    assert engine.driver._made == before


def test_no_answer_depends_on_memory_that_nothing_wrote(
    session: Session, made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(monkeypatch)
    with closing(open_session(made, EngineConfig(), Silent())) as other:
        for index in (1, 2, 3):
            asked = request(session, index)
            assert answer(other, asked, DflashDrafter()) == answer(session, asked, DflashDrafter())
            tokens = [*asked.prompt, *answer(session, asked, NoDrafter())]
            ours = score(other, tokens, True, Silent())
            for name, value in score(session, tokens, True, Silent()).items():
                np.testing.assert_array_equal(ours[name], value)
