"""Cases of an MTP layer's operators, as (name, inputs, attributes)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np
from support.vision_cases import TYPES, Case, Rng

from thor_dflash.core.tensors import DType


def norm_case(
    rng: Rng, name: str, rows: int, columns: int, dtype: DType, weight: DType = DType.BF16
) -> Case:
    """Rows of very different sizes, the last one zero; the weight is an offset from 1."""
    x = rng.standard_normal((rows, columns)) * np.logspace(-3, 2, rows)[:, None]
    x[-1] = 0
    w = 0.3 * rng.standard_normal(columns)
    inputs = {"x": x.astype(dtype.numpy), "weight": w.astype(weight.numpy)}
    return name, inputs, {"eps": 1e-6, "offset": 1.0}


def norm_cases(rng: Rng) -> Iterator[Case]:
    """Both types of rows; a weight that is the whole factor."""
    for dtype in TYPES:
        yield norm_case(rng, f"rows_{dtype.value}", 5, 72, dtype)
    name, x, a = norm_case(rng, "plain_weight", 3, 40, DType.F32, DType.F32)
    yield name, x, a | {"offset": 0.0}


def norm_kernel_cases(rng: Rng) -> Iterator[Case]:
    """Fewer columns than a block has threads, and more than one for each; a float32 weight."""
    yield norm_case(rng, "72_columns", 3, 72, DType.BF16)
    yield norm_case(rng, "5120_columns", 2, 5120, DType.BF16)
    yield norm_case(rng, "float32_weight", 2, 200, DType.BF16, DType.F32)


def fill_cases(rng: Rng) -> Iterator[Case]:
    """One draft and several, at the beginning and at the end; forced places; a row without best."""
    ids = np.array([7, -1, -1, 3, -1, 9, 9, -1], np.int32)
    for at, count in ((1, 1), (0, 8), (3, 2), (7, 1)):
        best = rng.integers(-1, 50, count).astype(np.int32)
        yield f"{count}_at_{at}", {"ids": ids, "best": best}, {"at": at}
    yield "no_best", {"ids": ids, "best": np.full(4, -1, np.int32)}, {"at": 1}


CASES: Mapping[str, Callable[[Rng], Iterator[Case]]] = {
    "rms_norm": norm_cases,
    "fill_drafts": fill_cases,
}
"""Operator -> its cases."""
