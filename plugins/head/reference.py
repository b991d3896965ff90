"""head in numpy: the definition that every other implementation is tested against."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from thor_dflash.core.tensors import Array, DType
from thor_dflash.plugins.contract import Arrays, Attributes, OpCase
from thor_dflash.plugins.linear.reference import weight_case
from thor_dflash.plugins.numpy_math import dequantise, rms_norm, rounded, wide


def reference(x: Arrays, a: Attributes) -> dict[str, Array]:
    """See the operator's docstring for shapes."""
    rows = rms_norm(wide(x["x"]), wide(x["norm_weight"]), a.real("norm_eps"), a.real("norm_offset"))
    rows = wide(rounded(rows, DType.of(x["x"])))
    logits = rows @ dequantise(x["weight0"], x.get("block_scale0")).T
    if "row_scale0" in x:
        logits = logits * wide(x["row_scale0"])
    chosen = logits.astype(np.float32)[:, : a.integer("vocab") or None]
    best = np.where(np.isnan(chosen).any(axis=1), -1, chosen.argmax(axis=1))
    if "id_map" in x:
        best = np.where(best < 0, -1, x["id_map"][best])
    return {"logits": logits.astype(np.float32), "best": best.astype(np.int32)}


def cases(rng: np.random.Generator) -> Iterator[OpCase]:
    """Each weight kind; padding with the largest logits, or with NaN; equal logits; a NaN row;
    infinities; a reduced vocabulary.
    """
    hidden, vocab = 64, 96
    norm = rng.standard_normal(hidden).astype(np.float32)

    def rows() -> Array:
        return rng.standard_normal((16, hidden)).astype(np.float32)

    for kind in ("nvfp4", "fp8", "bfloat16", "float32"):
        yield OpCase(
            kind,
            {"x": rows(), "norm_weight": norm, **weight_case(rng, kind, vocab, hidden)},
            {"norm_offset": 1.0},
        )
    weight = rng.standard_normal((vocab, hidden)).astype(np.float32)
    weight[80:] *= 100
    yield OpCase(
        "padding_never_wins", {"x": rows(), "norm_weight": norm, "weight0": weight}, {"vocab": 80}
    )
    twice = np.repeat(rng.standard_normal((48, hidden)), 2, axis=0).astype(np.float32)
    yield OpCase("first_of_equals", {"x": rows(), "norm_weight": norm, "weight0": twice}, {})
    broken = rows()
    broken[3, 5] = np.nan
    yield OpCase("nan_row", {"x": broken, "norm_weight": norm, "weight0": weight}, {})
    endless = weight.copy()
    endless[[7, 30], 5] = np.inf, -np.inf
    positive = {
        "x": np.full((16, hidden), 3, np.float32),
        "norm_weight": np.full(hidden, 9, np.float32),
    }
    yield OpCase("infinities", {**positive, "weight0": endless}, {})
    ids = rng.permutation(1000)[:vocab].astype(np.int32)
    yield OpCase(
        "reduced_vocabulary",
        {
            "x": rows(),
            "norm_weight": norm,
            "id_map": ids,
            **weight_case(rng, "nvfp4", vocab, hidden),
        },
        {"vocab": 90},
    )
    yield OpCase(
        "bf16_rows",
        {
            "x": rows().astype(DType.BF16.numpy),
            "norm_weight": norm,
            **weight_case(rng, "bfloat16", vocab, hidden),
        },
        {"norm_offset": 1.0},
    )
    weight[90] = np.nan
    yield OpCase(
        "nan_row_and_nan_padding_of_a_reduced_vocabulary",
        {"x": broken, "norm_weight": norm, "id_map": ids, "weight0": weight},
        {"vocab": 80},
    )
