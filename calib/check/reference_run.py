"""Evaluates an operator's definition for one call, to judge an engine's outputs by it."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from thor_dflash.core.tensors import Array
from thor_dflash.plugins.contract import Attributes, Op

PART = 8192
"""Vocabulary rows evaluated at a time: those of a large model in float64 would take tens of
gigabytes."""
BY_ROW = ("weight0", "block_scale0", "row_scale0")


def define(
    op: Op, x: Mapping[str, Array], attributes: Attributes, have: Mapping[str, Array]
) -> dict[str, Array]:
    """Return the reference's outputs for inputs `x`; `have` are the engine's outputs.

    The best ids of a head are computed from the engine's own logits: of two nearly equal logits,
    rounding may make either the larger.
    """
    if op.name != "head":
        return op.reference(x, attributes)
    whole = Attributes({**attributes.values, "vocab": 0})
    rest = {name: value for name, value in x.items() if name not in (*BY_ROW, "id_map")}
    parts = [
        op.reference(rest | {n: x[n][at : at + PART] for n in BY_ROW if n in x}, whole)["logits"]
        for at in range(0, len(x["weight0"]), PART)
    ]
    chosen = have["logits"][:, : attributes.integer("vocab") or None]
    best = np.where(np.isnan(chosen).any(axis=1), -1, chosen.argmax(axis=1))
    if "id_map" in x:
        best = np.where(best < 0, -1, x["id_map"][best])
    return {"logits": np.concatenate(parts, axis=1), "best": best.astype(np.int32)}
