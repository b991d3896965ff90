"""Cases of a vision tower's operators, as (name, inputs, attributes)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

import numpy as np

from thor_dflash.core.tensors import Array, DType
from thor_dflash.plugins.contract import Attribute

Rng = np.random.Generator
Case = tuple[str, dict[str, Array], dict[str, Attribute]]
TYPES = (DType.F32, DType.BF16)


def _normal(rng: Rng, dtype: DType, *shape: int) -> Array:
    return rng.standard_normal(shape).astype(dtype.numpy)


def positions_of(rng: Rng, rows: int) -> Array:
    """int32 [rows, 3]: positions of text, then of an image."""
    at = np.repeat(np.arange(rows)[:, None] + 9, 3, axis=1)
    at[rows // 3 :, 1:] += rng.integers(0, 50, (rows - rows // 3, 2))
    return at.astype(np.int32)


class _Verify(Protocol):
    """A case of verify_attention."""

    @property
    def name(self) -> str: ...
    @property
    def inputs(self) -> Mapping[str, Array]: ...
    @property
    def attributes(self) -> Mapping[str, Attribute]: ...


def turned_cases(rng: Rng, case: _Verify) -> Iterator[Case]:
    """A case whose rows turn by other positions than their index: all by the same shift, or by the
    positions of an image in the middle of text.
    """
    rows, a = len(case.inputs["q"]), dict(case.attributes)
    if rows <= 32:
        shifted = {"shift": np.array([-33], np.int32)}
        yield f"shifted_{case.name}", {**case.inputs, **shifted}, a
    half = int(a.get("rotary_dim", 64)) // 2
    a |= {"mrope_height": half // 3, "mrope_width": half // 3 - 1}
    yield f"image_{case.name}", {**case.inputs, "at": positions_of(rng, rows)}, a


def norm_case(
    rng: Rng, name: str, rows: int, columns: int, fold: int, dtype: DType, mean: float = 3
) -> Case:
    """Rows far from a mean of zero, which shows a norm that does not remove it."""
    x = {
        "x": (rng.standard_normal((rows, columns)) + mean).astype(dtype.numpy),
        "weight": _normal(rng, DType.BF16, columns),
        "bias": _normal(rng, DType.F32, columns),
    }
    return name, x, {"rows": rows, "columns": columns, "fold": fold, "eps": 1e-6}


def layer_norm_cases(rng: Rng) -> Iterator[Case]:
    """With and without joined rows; a large mean; equal columns, whose variance is zero."""
    for dtype in TYPES:
        yield norm_case(rng, f"rows_{dtype.value}", 5, 72, 1, dtype)
        yield norm_case(rng, f"joined_{dtype.value}", 8, 144, 4, dtype)
    yield norm_case(rng, "far_from_zero", 3, 48, 1, DType.F32, mean=10)
    name, x, a = norm_case(rng, "equal_columns", 2, 48, 1, DType.F32)
    x["x"][:] = np.array([[5.0], [0.0]])
    yield name, x, a


def layer_norm_kernel_cases(rng: Rng) -> Iterator[Case]:
    """As wide as the 27B's tower; as wide as a thread's registers hold; a float32 weight."""
    yield norm_case(rng, "1152_columns", 4, 1152, 4, DType.BF16)
    yield norm_case(rng, "4096_columns", 2, 4096, 1, DType.BF16)
    name, x, a = norm_case(rng, "float32_weight", 3, 200, 1, DType.BF16)
    x["weight"] = x["weight"].astype(np.float32) * np.float32(1.001)
    yield name, x, a


def attention_case(
    rng: Rng,
    name: str,
    grid: tuple[int, int],
    heads: int,
    dim: int,
    dtype: DType,
    padding: int = 0,
    sharp: float = 1.0,
) -> Case:
    """An image of grid patches in merge order; what lies in its padding is NaN."""
    down, across = np.indices(grid).reshape(2, -1)
    order = np.lexsort((across % 2, down % 2, across // 2, down // 2))
    count = len(order)
    qkv = rng.standard_normal((count + padding, 3, heads * dim))
    qkv[:, :2] *= sharp
    qkv[count:] = np.nan
    places = {
        axis: np.concatenate([values[order], np.full(padding, 10**6)]).astype(np.int32)
        for axis, values in (("row", down), ("column", across))
    }
    x = {"qkv": qkv.reshape(count + padding, -1).astype(dtype.numpy), **places}
    x["count"] = np.array([count], np.int32)
    return name, x, {"heads": heads, "head_dim": dim, "rope_theta": 1e4}


def image_attention_cases(rng: Rng) -> Iterator[Case]:
    """Heads of 72 and 64 columns; the smallest image, a line, padding that must not be seen."""
    for dtype in TYPES:
        yield attention_case(rng, f"4x6_{dtype.value}", (4, 6), 2, 72, dtype)
        yield attention_case(rng, f"padded_{dtype.value}", (4, 4), 2, 72, dtype, padding=9)
    yield attention_case(rng, "smallest", (2, 2), 1, 64, DType.F32, padding=4)
    yield attention_case(rng, "a_line", (2, 40), 2, 64, DType.F32, sharp=2)


def image_attention_kernel_cases(rng: Rng) -> Iterator[Case]:
    """More patches than a tile, a tile of padding only, other head sizes, and sharp weights."""
    yield attention_case(rng, "three_tiles", (10, 14), 2, 72, DType.BF16, padding=20)
    yield attention_case(rng, "tile_of_padding", (8, 8), 1, 64, DType.BF16, padding=70)
    yield attention_case(rng, "sharp", (6, 12), 1, 72, DType.BF16, sharp=6)
    yield attention_case(rng, "head_of_128", (4, 4), 1, 128, DType.BF16)
    yield attention_case(rng, "head_of_40", (4, 4), 3, 40, DType.BF16)


def image_positions_cases(rng: Rng) -> Iterator[Case]:
    """Weights of a resampling, and of padding."""
    for dtype in TYPES:
        weights = rng.dirichlet(np.ones(4), 7).astype(np.float32)
        weights[5:] = 0
        x = {
            "table": _normal(rng, dtype, 25, 72),
            "taps": rng.integers(0, 25, (7, 4)).astype(np.int32),
            "weights": weights,
        }
        yield f"seven_{dtype.value}", x, {}


def image_embed_cases(rng: Rng) -> Iterator[Case]:
    """Rows of images between text; text rows that must not be read are NaN."""
    for dtype in TYPES:
        ids = np.array([5, -3, -1, 0, -2, 9], np.int32)
        x = _normal(rng, dtype, 6, 2064)
        x[ids < 0] = np.nan
        image = _normal(rng, dtype, 4, 2064)
        image[3] = np.nan
        yield f"mixed_{dtype.value}", {"x": x, "ids": ids, "image": image}, {}
        no_image = {"x": x[[0, 3]], "ids": ids[[0, 3]], "image": x[1:3]}
        yield f"text_{dtype.value}", no_image, {}


def biased_cases(rng: Rng, rows: int, dtype: DType) -> Iterator[Case]:
    """Products with biases, as a vision tower has them: each epilogue; several segments."""
    k, n = 144, 72
    x = {
        "x": _normal(rng, dtype, rows, k),
        "weight0": (_normal(rng, DType.F32, n, k) / 6).astype(DType.BF16.numpy),
        "bias0": _normal(rng, DType.F32, n),
    }
    for kind in ("gelu_tanh", "gelu_erf", "none"):
        yield f"biased_{kind}_{rows}", x, {"epilogue": kind}
    added = {"residual": _normal(rng, dtype, rows, n)}
    yield f"biased_residual_{rows}", x | added, {"epilogue": "residual"}
    second = {"weight1": x["weight0"][:40], "bias1": x["bias0"][:40] - 1}
    yield f"biased_segments_{rows}", x | second, {"segments": 2}


CASES: Mapping[str, Callable[[Rng], Iterator[Case]]] = {
    "layer_norm": layer_norm_cases,
    "image_attention": image_attention_cases,
    "image_positions": image_positions_cases,
    "image_embed": image_embed_cases,
}
"""Operator -> its cases."""
