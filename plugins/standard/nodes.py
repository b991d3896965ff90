"""The standard nodes as contracts, so that a program can call them like operators.

They are not operators: the ONNX body of each is the standard node itself. Ports: see launch.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from thor_dflash.core.tensors import Array
from thor_dflash.plugins.contract import Arrays, Attribute, Attributes, Op


def _embed(x: Arrays, a: Attributes) -> dict[str, Array]:
    ids, mask = x["ids"], a.integer("mask")
    if mask >= 0:
        ids = np.concatenate([ids, np.full(a.integer("rows") - 1, mask, np.int32)])
    return {"rows": x["table"][ids]}


def _concat(x: Arrays, a: Attributes) -> dict[str, Array]:
    del a
    return {"y": np.concatenate([x[f"x{i}"] for i in range(len(x))], axis=1)}


def _compose(x: Arrays, a: Attributes) -> dict[str, Array]:
    del a
    drafts = np.maximum(np.append(x["best"][1:], -1), 0)
    follow = np.where(x["forced"] >= 0, x["forced"], drafts)
    return {"tokens": np.concatenate([x["last"], follow[:-1]]).astype(np.int32)}


def _node(
    name: str,
    reference: Callable[[Arrays, Attributes], dict[str, Array]],
    attributes: Mapping[str, Attribute],
) -> Op:
    return Op(
        name=name,
        inputs=(),
        outputs=(),
        attributes=attributes,
        reference=reference,
        folder=Path(__file__).parent,
    )


EMBED = _node("embed", _embed, {"mask": -1, "rows": 0})
CONCAT = _node("concat", _concat, {})
COMPOSE = _node("compose", _compose, {})
