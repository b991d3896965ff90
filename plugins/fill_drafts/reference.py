"""fill_drafts in numpy: the definition that every other implementation is tested against."""

from __future__ import annotations

import numpy as np

from thor_dflash.core.tensors import Array
from thor_dflash.plugins.contract import Arrays, Attributes


def reference(x: Arrays, a: Attributes) -> dict[str, Array]:
    """See the operator's docstring for shapes."""
    at, best = a.integer("at"), np.maximum(x["best"], 0)
    tokens = x["ids"].copy()
    places = tokens[at : at + len(best)]
    places[:] = np.where(places < 0, best, places)
    return {"tokens": tokens, "first": tokens[at : at + 1]}
