"""Whole answers through the decode loop have the law of a known target, with drafts and without,
and as many drafts are accepted as the laws of both say.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from support.chi_square import likely
from support.loop_models import session
from support.markov_target import (
    IDS,
    LENGTH,
    SHARES,
    TEMPERATURE,
    DraftCount,
    Spoil,
    Tables,
    answers,
    array,
    marginals,
    tabled,
)

from thor_dflash.config.decode import SamplingConfig
from thor_dflash.core.tensors import Array
from thor_dflash.plugins.accept.record import HEADER
from thor_dflash.plugins.numpy_noise import RESIDUAL, noise
from thor_dflash.runtime.decoding.proposers import DflashDrafter, NoDrafter, Proposer
from thor_dflash.runtime.engines.protocol import Call

pytestmark = pytest.mark.slow  # test_sampling_laws.py checks single draws against the operator

COUPLED = SamplingConfig(temperature=TEMPERATURE)
REJECTION = SamplingConfig(temperature=TEMPERATURE, acceptance="rejection")
MANY = 256


def answered(
    how: SamplingConfig,
    proposer: Proposer,
    seeds: Sequence[int],
    *,
    second: bool = True,
    edges: bool = False,
    spoil: Spoil = lambda call: None,
) -> tuple[Array, DraftCount]:
    s = session(second=second)
    with tabled(s, Tables(s.model.block, edges, spoil)):
        return answers(s, how, proposer, seeds)


def steps(found: Array) -> Array:
    """How far each token is from the one before it: drawn by SHARES, whatever was before."""
    before = np.concatenate([np.zeros((len(found), 1), int), found[:, :-1]], axis=1)
    return np.asarray((found - before) % IDS).ravel()


def lawful(found: Array) -> bool:
    return likely(steps(found), np.array(SHARES)) and all(
        likely(found[:, at], law) for at, law in enumerate(marginals())
    )


def test_coupled_answers_have_the_law_plain_and_drafted() -> None:
    plain, _ = answered(COUPLED, NoDrafter(), range(MANY))
    assert plain.shape == (MANY, LENGTH)
    assert lawful(plain)
    drafted, drafts = answered(COUPLED, DflashDrafter(), range(MANY))
    assert np.array_equal(drafted, plain)
    assert abs(drafts.sigmas) < 3


@pytest.mark.parametrize(("second", "edges"), [(True, True), (False, False)])
def test_every_position_has_the_law_by_rejection(second: bool, edges: bool) -> None:
    found, drafts = answered(
        REJECTION, DflashDrafter(), range(MANY, 2 * MANY), second=second, edges=edges
    )
    assert lawful(found)
    assert abs(drafts.sigmas) < 3
    assert min(drafts.accepted, len(drafts.chances) - drafts.accepted) > 1000


# ---- mistakes ------------------------------------------------------------------------------------
def shared_noise(call: Call) -> None:
    """Drafts are drawn by the noise of the draw after a rejection."""
    if call.graph.name.startswith("sample_drafts_rejection"):
        out = {name: array(tensor) for name, tensor in call.outputs.items()}
        seed, length = (int(array(call.inputs[n])[0]) for n in ("sampling.seed", "length"))
        ids, scores = (out[f"draft.{name}"][:-1, :IDS] for name in ("candidates", "scores"))
        at = length + 1 + np.arange(len(ids))[:, None]
        best = (scores + noise(seed, at, ids, RESIDUAL)).argmax(axis=1)
        out["tokens"][1:] = ids[np.arange(len(ids)), best]


def no_temperature(call: Call) -> None:
    """Drafts are drawn at the temperature, but their law is that of temperature 1."""
    if call.graph.name.startswith("sample_drafts_rejection"):
        array(call.outputs["draft.scores"])[:] *= TEMPERATURE


def no_residual(call: Call) -> None:
    """After a rejection the target's own law is drawn from."""
    if call.graph.name.startswith("accept_rejection"):
        record, tokens = array(call.outputs["record"]), array(call.inputs["tokens"])
        count = int(record[0])
        if count < len(tokens) and record[HEADER + count - 1] != tokens[count]:
            logits = array(call.inputs["logits"])[count - 1, :IDS] / TEMPERATURE
            seed, length = (int(array(call.inputs[n])[0]) for n in ("sampling.seed", "length"))
            score = logits + noise(seed, np.array(length + count), np.arange(IDS))
            record[HEADER + count - 1] = score.argmax()


@pytest.mark.parametrize(
    ("mistake", "most"), [(shared_noise, MANY), (no_temperature, 96), (no_residual, 96)]
)
def test_a_mistake_is_noticed(mistake: Spoil, most: int) -> None:
    found, _ = answered(REJECTION, DflashDrafter(), range(most), spoil=mistake)
    assert not lawful(found)
