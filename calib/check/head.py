"""The choice of a head judged by the engine's own logits."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from thor_dflash.plugins.op import Attributes, Op
from thor_dflash.tensors import Array


def own_best(
    op: Op,
    x: Mapping[str, Array],
    attributes: Attributes,
    have: Mapping[str, Array],
    want: Mapping[str, Array],
) -> dict[str, Array]:
    """The definition's outputs; but `best` of a head is the best of the logits that the engine
    itself made: of two logits that all but tie, either may win once they are rounded.
    """
    if op.name != "head" or "best" not in want or "logits" not in have:
        return dict(want)
    chosen = have["logits"][:, : attributes.integer("vocab") or None]
    best = np.where(np.isnan(chosen).any(axis=1), -1, chosen.argmax(axis=1))
    if "id_map" in x:
        best = np.where(best < 0, -1, x["id_map"][best])
    return {**want, "best": best.astype(np.int32)}
