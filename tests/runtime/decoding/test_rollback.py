"""Both ways to drop rejected rows leave the tokens and states of plain decoding: the next step
folds the saved records of the accepted rows, or it begins with a saved state.
"""

from __future__ import annotations

import pytest
from support.coverings import some
from support.loop_models import answer, erring, prompt, session

from thor_dflash.runtime.decoding.proposers import NoDrafter
from thor_dflash.runtime.session import Request, Session

KEPT = (".state", ".tail")


def folded(s: Session) -> dict[str, bytes]:
    """The recurrent states with every committed row folded in, and the attention caches."""
    s.model.write_tokens([0])
    s.model.verify()
    arrays = s.model.state.snapshot().arrays
    return {n: a.tobytes() for n, a in arrays.items() if n.endswith(KEPT) or "attention" in n}


@pytest.mark.parametrize("geometry", ["27b", pytest.param("heads27b", marks=pytest.mark.slow)])
@pytest.mark.parametrize("rate", some([0.0, 0.2, 1.0], [0.2, 1.0], pytest.mark.slow))
def test_both_rollbacks_leave_what_plain_decoding_leaves(geometry: str, rate: float) -> None:
    request = Request(prompt=prompt(45, seed=8), max_tokens=50)
    records = session(geometry)
    truth = answer(records, request, NoDrafter())
    states = [folded(records)]
    for saves in ("records", "states"):
        s = session(geometry, saves=saves)
        assert answer(s, request, erring(truth, rate, 4)) == truth
        states.append(folded(s))
    assert states[0] == states[1] == states[2]
