"""Three ways to drop rejected rows give the same tokens and states: the next step folds the saved
records of the accepted rows, or it begins with a saved state, or the accepted rows are run again
from a snapshot.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from support.loop_models import answer, erring, prompt, session

from thor_dflash.calib.studies.replay_baseline import Replay
from thor_dflash.runtime.decoding.proposers import NoDrafter
from thor_dflash.runtime.session import Request, Session

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
