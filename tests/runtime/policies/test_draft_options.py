"""Options that limit what the drafter sees of the context: they change drafts, never a token."""

from __future__ import annotations

import numpy as np
import pytest
from support.loop_models import prompt, session
from support.thinking_models import Asked, after, run

from thor_dflash.config.decode import DraftConfig
from thor_dflash.core.tensors import Array
from thor_dflash.runtime.decoding.block import Block, DecodeProgress
from thor_dflash.runtime.decoding.model_runner import ModelRunner
from thor_dflash.runtime.decoding.proposers import DflashDrafter
from thor_dflash.runtime.session import Session

IT = Asked(239, length=120, max_tokens=24)
OPTIONS = [
    DraftConfig(window=16), DraftConfig(full=16), DraftConfig(full=40), DraftConfig(context=1),
    DraftConfig(context=128), DraftConfig(seed=1), DraftConfig(seed=33),
    DraftConfig(window=20, full=30, context=25, seed=70),
]  # fmt: skip


def drafts(s: Session, config: DraftConfig, tokens: tuple[int, ...]) -> Array:
    """The first block drafted after a prompt."""
    model, proposer = s.model, DflashDrafter(config)
    model.state.reset()
    rows = tokens[:-1]
    first = proposer.begin(model, len(rows))
    chunk = model.manifest.chunk
    for start in range(0, len(rows), chunk):
        part = rows[start : start + chunk]
        model.prefill(part, observe=start + len(part) > first)
    proposal = proposer.propose(model, DecodeProgress(tokens), Block(cap=16))
    model.draft(Block(cap=16), proposal.calls)
    return model.read("tokens")


@pytest.mark.parametrize("config", OPTIONS, ids=str)
def test_no_option_changes_a_token(config: DraftConfig) -> None:
    truth = after(IT.prompt, 24)
    got, report = run(IT, DflashDrafter(config))
    assert got == truth
    assert report.spec.drafted > 0


@pytest.mark.parametrize("seed", [1, 32, 33, 100])
def test_a_seed_shows_the_drafter_what_an_equal_context_does(seed: int) -> None:
    """A seed and a context of the same length show the drafter the same rows: with the seed, older
    rows count as unwritten; with the context, they are in the rings and hidden.
    """
    s, tokens = session(), prompt(130, 5)
    seeded = drafts(s, DraftConfig(seed=seed), tokens)
    assert np.array_equal(seeded, drafts(s, DraftConfig(context=seed), tokens))


def test_a_seed_spares_the_chunks_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    s, seen = session(), []
    inner = ModelRunner.prefill

    def prefill(model: ModelRunner, tokens: tuple[int, ...], observe: bool) -> None:
        seen.append(observe)
        inner(model, tokens, observe)

    monkeypatch.setattr(ModelRunner, "prefill", prefill)
    drafts(s, DraftConfig(seed=40), prompt(130, 5))
    assert seen == [False, False, True, True, True], "129 rows in chunks of 32, the last 40 wanted"


def test_what_lies_before_the_context_cap_is_not_seen() -> None:
    """As in FlashRT, all rows of a block see the same context: the last 128 rows before it."""
    s = session()
    model, tokens = s.model, prompt(200, 3)
    capped = drafts(s, DraftConfig(context=128), tokens)
    for name, tensor in model.state.tensors.items():
        if name.startswith("drafter."):
            slots = tensor.spec.at({})[1]
            rows = model.engine.read(tensor)
            old = [p % slots for p in range(max(0, 199 - slots), 199 - 128)]
            rows[:, old] = 1e3
            model.engine.write(tensor, rows)
    model.write_first(128)
    model.engine.run([model.call("propose")])
    assert np.array_equal(model.read("tokens"), capped)
    model.write_first(0)
    model.engine.run([model.call("propose")])
    assert not np.array_equal(model.read("tokens"), capped)
