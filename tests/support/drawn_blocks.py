"""Checks a block of drawn tokens against the references of its operators."""

from __future__ import annotations

import numpy as np

from thor_dflash.config.decode import SamplingConfig
from thor_dflash.core.tensors import Array
from thor_dflash.plugins import SAMPLE
from thor_dflash.plugins.numpy_noise import DRAFT, noise
from thor_dflash.runtime.decoding.proposers import DflashDrafter
from thor_dflash.runtime.session import Request, Session


def drawing(how: SamplingConfig, length: int) -> dict[str, Array]:
    """The inputs of `sample` for a request, whose seed has one word and whose min_p is off."""
    return {
        "length": np.array([length], np.int32),
        "seed": np.array([how.seed, 0], np.int32),
        "temperature": np.array([how.temperature], np.float32),
        "top_k": np.array([how.top_k], np.int32),
        "top_p": np.array([how.top_p], np.float32),
        "min_log_p": np.array([-np.inf], np.float32),
    }


def decided_by_law(s: Session, request: Request, blocks: int = 4) -> None:
    """Run the first blocks of a request for rejection. Each draft must be drawn from its law; that
    of a drafter without a selector is its best logits by the temperature; and each choice must be
    what `sample` makes of the block.
    """
    run = s.run(request, DflashDrafter())
    length = len(request.prompt) - 1
    for chunk in run:
        if chunk.tokens:
            assert list(chunk.tokens) == _decided(s, request.sampling, length)
            length, blocks = length + len(chunk.tokens), blocks - 1
        if not blocks:
            break
    run.close()
    assert not blocks


def _decided(s: Session, how: SamplingConfig, length: int) -> list[int]:
    """The tokens of the block just run, whose first row has this position."""
    drafts = s.model.block - 1
    x = {name: s.model.read(name) for name in ("logits", "tokens")}
    law = {name: s.model.read(f"draft.{name}") for name in ("candidates", "scores")}
    assert s.manifest.drafter
    if s.manifest.drafter.selector is None:
        own = s.model.read("draft_logits")[1:, : s.manifest.vocab_limit]
        best = np.argsort(-own, axis=1, kind="stable")[:, : law["candidates"].shape[1]]
        assert np.array_equal(law["candidates"][:-1], best)
        scaled = np.take_along_axis(own, best, axis=1) * (1 / np.float32(how.temperature))
        assert np.array_equal(law["scores"][:-1], scaled)
    for i in range(drafts):
        ids, scores = law["candidates"][i], law["scores"][i]
        score = scores + noise(how.seed, np.array(length + 1 + i), ids, DRAFT)
        assert x["tokens"][i + 1] == ids[score.argmax()]
    a = SAMPLE.complete({"vocab": s.manifest.vocab_limit, "first": 1})
    given = x | law | drawing(how, length) | {"drawn": np.array([drafts], np.int32)}
    choice = SAMPLE.reference(given, a)["choice"]
    agreed = int((choice[:-1] == x["tokens"][1:]).cumprod().sum())
    return [int(token) for token in choice[: agreed + 1]]
