"""Inputs of `sample` for rejection."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from thor_dflash.core.tensors import Array


def drafted_rows(x: Mapping[str, Array], vocab: int, seed: int, most: int) -> dict[str, Array]:
    """Drafts drawn from at most so many of the best ids, by scores that differ from the logits.
    Some places are unused, some drafts are no candidates, and some rows are not drawn.
    """
    rng, logits = np.random.default_rng(seed), x["logits"]
    rows, width = logits.shape
    near = np.nan_to_num(logits[:, : vocab or None], posinf=0, neginf=-30).clip(-30, 30)
    near = near / x["temperature"] + rng.standard_normal(near.shape)
    best = np.argsort(-near, axis=1)[:, :most]
    scores = np.take_along_axis(near, best, axis=1).astype(np.float32)
    spare = ((0, 0), (0, most - best.shape[1]))
    ids = x["id_map"][best] if "id_map" in x else best
    ids = np.pad(ids, spare, constant_values=-1).astype(np.int32)
    scores = np.pad(scores, spare, constant_values=-np.inf)
    ids[rng.random(ids.shape) < 0.1] = -1
    tokens = ids[np.arange(rows), (scores + rng.gumbel(size=ids.shape)).argmax(axis=1)]
    tokens = np.where(rng.random(rows) < 0.1, rng.integers(0, width, rows), tokens)
    drawn = rows - 1 if rng.random() < 0.5 else int(rng.integers(0, rows))
    return {
        "tokens": np.roll(tokens, 1).astype(np.int32),
        "drawn": np.array([drawn], np.int32),
        "candidates": ids,
        "scores": scores,
    }


def equal_laws(x: Mapping[str, Array]) -> dict[str, Array]:
    """Drafts of every rank, drawn by the target's own law: none is rejected."""
    best = np.argsort(-x["logits"], axis=1)[:, :32]
    rows = np.arange(len(best))
    more = {"candidates": best, "tokens": np.roll(best[rows, rows], 1), "top_k": np.array([32])}
    found = {**x, **{name: value.astype(np.int32) for name, value in more.items()}}
    return {**found, "scores": np.take_along_axis(x["logits"], best, axis=1)}
