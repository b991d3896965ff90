"""Three ways to drop rejected rows give the same tokens and states: the next step folds the saved
records of the accepted rows, or it begins with a saved state, or the accepted rows are run again
from a snapshot.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from support import constrained_model
from support.loop_models import answer, erring, prompt, session

from thor_dflash.calib.studies.replay_baseline import Replay
from thor_dflash.config.engine import EngineConfig
from thor_dflash.core.progress import Silent
from thor_dflash.runtime.decoding.proposers import DflashDrafter, NoDrafter
from thor_dflash.runtime.session import Request, Session, open_session

KEPT = (".state", ".tail")


def drafting(
    truth: Sequence[int], rate: float, seed: int
) -> Callable[[Sequence[int]], Sequence[int]]:
    """Drafts for a replay: the true continuation, each token wrong with probability `rate`."""

    def guess(tokens: Sequence[int]) -> list[int]:
        rng = np.random.default_rng((seed, len(tokens)))
        right = [*truth[len(tokens) : len(tokens) + 15], *[0] * 15][:15]
        return [(t + 1) % 240 if rng.random() < rate else t for t in right]

    return guess


def folded(s: Session) -> dict[str, bytes]:
    """The recurrent states with every committed row folded in, and the attention caches."""
    s.model.write_tokens([0])
    s.model.verify()
    arrays = s.model.state.snapshot().arrays
    return {n: a.tobytes() for n, a in arrays.items() if n.endswith(KEPT) or "attention" in n}


@pytest.mark.parametrize("geometry", ["0.8b", "27b", "heads27b"])
@pytest.mark.parametrize("rate", [0.0, 0.2, 1.0])
def test_three_rollbacks_give_the_same_tokens(geometry: str, rate: float) -> None:
    request = Request(prompt=prompt(45, seed=8), max_tokens=50)
    records = session(geometry)
    truth = answer(records, request, NoDrafter())
    states: list[dict[str, bytes]] = []
    for saves in ("records", "states"):
        s = session(geometry, saves=saves)
        assert answer(s, request, erring(truth, rate, 4)) == truth
        states.append(folded(s))
    assert states[0] == states[1]
    replay = Replay(records, drafting(truth, rate, 4))
    assert replay.answer(request.prompt, 50) == truth


def test_a_replayed_state_is_a_folded_one() -> None:
    s = session()
    request = Request(prompt=prompt(45, seed=8), max_tokens=50)
    truth = answer(s, request, NoDrafter())
    folds = folded(s)
    # In every cycle one draft is right and the next wrong: two tokens are committed, so that the
    # replay ends after exactly 50 tokens, as the loop did.
    replay = Replay(s, lambda tokens: [truth[len(tokens)], -1] if len(tokens) < 50 else [])
    assert replay.answer(request.prompt, 50) == truth
    assert folded(s) == folds


def test_the_replay_baseline_prefills_by_the_chunk_of_its_session() -> None:
    package = constrained_model.package(32, (16,))
    s = open_session(package, EngineConfig(threads=1, chunk=16), Silent())
    request = Request(prompt=prompt(40, seed=8), max_tokens=4)
    truth = answer(s, request, NoDrafter())
    assert Replay(s, lambda tokens: truth[len(tokens) :]).answer(request.prompt, 4) == truth
    s.close()


def test_the_replay_baseline_costs_two_verifies_a_cycle() -> None:
    s = session()
    request = Request(prompt=prompt(45, seed=8), max_tokens=48)
    truth = answer(s, request, NoDrafter())
    replay = Replay(s, lambda tokens: truth[len(tokens) : len(tokens) + 15])
    replay.answer(request.prompt, 48)
    assert replay.verifies == 6
    assert replay.copied > 0


def test_states_also_drop_a_step_without_a_trace() -> None:
    s = session(saves="states")
    request = Request(prompt=prompt(45, seed=8), max_tokens=50)
    truth = answer(s, request, NoDrafter())
    answers = s.run(request, DflashDrafter())
    got = [token for _ in range(6) for token in next(answers).tokens]
    length, accepted = s.model.state.length, s.model.state.accepted
    s.model.write_tokens(prompt(16, 2))
    s.model.verify()
    assert (s.model.state.length, accepted > 0) == (length, True)
    assert got + [token for chunk in answers for token in chunk.tokens] == truth


def test_states_hold_more_bytes() -> None:
    def held(s: Session) -> int:
        parts = s.model.state.tensors.items()
        return sum(t.spec.nbytes({}) for name, t in parts if name.startswith("gdn."))

    assert held(session(saves="states")) > 5 * held(session())
