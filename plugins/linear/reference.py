"""linear in numpy: the definition that every other implementation is tested against."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from thor_dflash.core.tensors import Array, DType
from thor_dflash.plugins.contract import Arrays, Attributes, OpCase
from thor_dflash.plugins.numpy_math import dequantise, rms_norm, rounded, sigmoid, silu, wide


def reference(x: Arrays, a: Attributes) -> dict[str, Array]:
    """See the operator's docstring for shapes."""
    dtype = DType.of(x["x"])
    rows = wide(rounded(_prologue(x, a), dtype))
    y = [_project(x, rows, i) for i in range(a.integer("segments"))]
    if a.word("epilogue") == "swiglu":
        y = [silu(y[0]) * y[1]]
    elif a.word("epilogue") == "residual":
        y = [wide(x["residual"]) + y[0]]
    return {f"y{i}": rounded(value, dtype) for i, value in enumerate(y)}


def _prologue(x: Arrays, a: Attributes) -> Array:
    rows = wide(x["x"])
    if "norm_weight" in x:
        width = a.integer("head_dim") or rows.shape[1]
        by_head = rows.reshape(rows.shape[0], -1, width)
        eps, offset = a.real("norm_eps"), a.real("norm_offset")
        rows = rms_norm(by_head, wide(x["norm_weight"]), eps, offset).reshape(rows.shape)
    if a.word("gate") == "sigmoid":
        rows = rows * sigmoid(wide(x["gate"]))
    elif a.word("gate") == "silu":
        rows = rows * silu(wide(x["gate"]))
    return rows


def _project(x: Arrays, rows: Array, i: int) -> Array:
    y = rows @ dequantise(x[f"weight{i}"], x.get(f"block_scale{i}")).T
    return y * wide(x[f"row_scale{i}"]) if f"row_scale{i}" in x else y


def weight_case(
    rng: np.random.Generator, kind: str, n: int, k: int, i: int = 0
) -> dict[str, Array]:
    """Returns one random stored weight. NVFP4 covers all codes, and scales down to subnormals."""
    if kind == "nvfp4":
        scales = rng.integers(1, 0x7F, (n, k // 16), dtype=np.uint8).view(DType.FP8.numpy)
        return {
            f"weight{i}": rng.integers(0, 256, (n, k // 2), dtype=np.uint8),
            f"block_scale{i}": scales,
            f"row_scale{i}": rng.uniform(1e-4, 1e-3, n).astype(np.float32),
        }
    w = rng.standard_normal((n, k)).astype(np.float32) / np.sqrt(k)
    if kind == "fp8":
        return {
            f"weight{i}": rounded(w * 64, DType.FP8),
            f"row_scale{i}": np.full(n, 1 / 64, np.float32),
        }
    return {f"weight{i}": w.astype(DType(kind).numpy)}


def cases(rng: np.random.Generator) -> Iterator[OpCase]:
    """Every weight kind; each prologue and epilogue; mixed kinds in one launch; 1 to 17 rows; rows
    near zero.
    """
    k, n = 64, 48
    for kind in ("nvfp4", "fp8", "bfloat16", "float16", "float32"):
        yield OpCase(kind, {"x": _rows(rng, 16, k), **weight_case(rng, kind, n, k)}, {})
    norm = rng.standard_normal(k).astype(DType.BF16.numpy)
    for t in (1, 3, 16, 17):
        x = {"x": _rows(rng, t, k, 30), "norm_weight": norm, **weight_case(rng, "nvfp4", n, k)}
        yield OpCase(f"norm_{t}_rows", x, {"norm_offset": 1.0})
    for kind in ("nvfp4", "bfloat16"):
        x = {"x": _rows(rng, 16, k).astype(DType.BF16.numpy), "norm_weight": norm}
        yield OpCase(f"bf16_rows_{kind}", x | weight_case(rng, kind, n, k), {"norm_offset": 1.0})
    mixed: dict[str, Array] = {"x": _rows(rng, 16, k), "norm_weight": norm}
    for i, kind in enumerate(("nvfp4", "fp8", "bfloat16", "float32")):
        mixed |= weight_case(rng, kind, n - 16 * (i % 2), k, i)
    yield OpCase("mixed_segments", mixed, {"segments": 4, "norm_offset": 1.0})
    yield from _fused_cases(rng, n, k, norm)


def _fused_cases(rng: np.random.Generator, n: int, k: int, norm: Array) -> Iterator[OpCase]:
    swiglu = {**weight_case(rng, "nvfp4", n, k, 0), **weight_case(rng, "bfloat16", n, k, 1)}
    yield OpCase(
        "swiglu",
        {"x": _rows(rng, 16, k), "norm_weight": norm, **swiglu},
        {"segments": 2, "epilogue": "swiglu", "norm_offset": 1.0},
    )
    x = {"x": _rows(rng, 16, k), "residual": _rows(rng, 16, n, 50)}
    yield OpCase("residual", x | weight_case(rng, "fp8", n, k), {"epilogue": "residual"})
    x = {"x": _rows(rng, 16, k), "residual": _rows(rng, 16, n), "gate": _rows(rng, 16, k, 20)}
    x |= weight_case(rng, "nvfp4", n, k)
    yield OpCase("sigmoid_gate_residual", x, {"epilogue": "residual", "gate": "sigmoid"})
    yield OpCase(
        "gated_head_norm",
        {**x, "norm_weight": norm[:32]},
        {"epilogue": "residual", "gate": "silu", "head_dim": 32},
    )
    x = {"x": near_zero(_rows(rng, 16, k)), "norm_weight": norm, **weight_case(rng, "nvfp4", n, k)}
    yield OpCase("rows_near_zero", x, {"norm_eps": NEAR_ZERO**2})


NEAR_ZERO = 0.03
"""A root mean square whose square a test takes as `norm_eps`."""


def near_zero(rows: Array) -> Array:
    """Scales rows [T, K], in turn, to zeros, to below NEAR_ZERO, to about that, and to above."""
    scales = np.array([0, 0.1, 1, 3, 100]) * NEAR_ZERO
    return (rows * np.resize(scales, (len(rows), 1))).astype(rows.dtype)


def _rows(rng: np.random.Generator, t: int, width: int, scale: float = 1.0) -> Array:
    return (rng.standard_normal((t, width)) * scale).astype(np.float32)
