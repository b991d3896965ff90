"""Cases of draft_conv and selector, as (name, inputs, attributes)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from thor_dflash.core.tensors import Array, DType
from thor_dflash.plugins.contract import Attribute

Rng = np.random.Generator
Case = tuple[str, dict[str, Array], dict[str, Attribute]]


def conv_case(
    rng: Rng,
    name: str,
    rows: int,
    hidden: int,
    *,
    side: int = 0,
    taps: int = 2,
    group: int = 16,
    norm: bool = False,
    residual: bool = False,
    dtype: DType = DType.F32,
) -> Case:
    """Random rows and kernels, the kernels far from the identity."""

    def normal(*shape: int) -> Array:
        return rng.standard_normal(shape).astype(dtype.numpy)

    x = {
        "x": normal(rows, hidden),
        "dynamic": normal(rows, 2 * taps * (hidden // group)),
        "base": normal(2, taps, hidden),
    }
    if norm:
        x["norm_weight"] = normal(hidden)
    if residual:
        x["residual"] = normal(rows, hidden)
    a: dict[str, Attribute] = {"side": side, "taps": taps, "group": group, "norm_offset": 0.5}
    return name, x, a


def conv_cases(rng: Rng) -> Iterator[Case]:
    """Both sides, blocks of one row to 16, other taps and groups; kernels of one number, which show
    an exchange of sides, taps or groups; the identity.
    """
    bf16 = DType.BF16
    yield conv_case(rng, "before_8_rows", 8, 64, norm=True)
    yield conv_case(rng, "behind_8_rows", 8, 64, side=1, residual=True)
    yield conv_case(rng, "both_16_rows", 16, 96, side=1, norm=True, residual=True)
    yield conv_case(rng, "one_row", 1, 64, norm=True, residual=True)
    yield conv_case(rng, "three_taps_groups_of_32", 5, 64, taps=3, group=32, side=1)
    yield conv_case(rng, "bfloat16", 8, 64, norm=True, residual=True, dtype=bf16)
    name, x, a = conv_case(rng, "identity", 8, 64)
    x["dynamic"][:] = 0
    x["base"][:] = np.array([1, 0], np.float32)[:, None]
    yield name, x, a
    for at in np.ndindex(2, 2):
        side, tap = at
        name, x, a = conv_case(rng, f"group_3_of_side_{side}_tap_{tap}", 8, 64, side=side)
        x["base"][:] = x["dynamic"][:] = 0
        x["dynamic"].reshape(8, 2, 2, 4)[:, side, tap, 3] = 1
        x["dynamic"].reshape(8, 2, 2, 4)[:, 1 - side] = 7
        yield name, x, a


EDGES = ("hidden", "predecessors", "successors")


def selector_case(
    rng: Rng,
    name: str,
    rows: int = 8,
    width: int = 200,
    *,
    rank: int = 16,
    reduced: int = 0,
    dtype: DType = DType.F32,
    attributes: dict[str, Attribute] | None = None,
) -> Case:
    """Random logits and codebooks in which edges often outweigh the candidates' order. With
    `reduced` the columns of the logits are that many of the `width` ids.
    """
    x: dict[str, Array] = {
        "logits": (2 * rng.standard_normal((rows, reduced or width))).astype(np.float32),
        "hidden": rng.standard_normal((rows, rank)).astype(dtype.numpy),
        "last": rng.integers(0, width, 1).astype(np.int32),
        "forced": np.full(rows, -1, np.int32),
    }
    for part in ("predecessors", "successors"):
        x[part] = (rng.standard_normal((width, rank)) / rank**0.25).astype(dtype.numpy)
    if reduced:
        x["id_map"] = np.sort(rng.permutation(width)[:reduced]).astype(np.int32)
    return name, x, {"rows": rows, **(attributes or {})}


def selector_cases(rng: Rng) -> Iterator[Case]:
    """Blocks of one row to 16; padding with the largest logits; equal logits and scores; forced
    ids; few candidates; multiplier and softcap; rows that have no candidate.
    """
    yield selector_case(rng, "8_rows")
    yield selector_case(rng, "16_rows_few_candidates", 16, attributes={"top_k": 3})
    yield selector_case(rng, "one_row", 1)
    yield selector_case(rng, "fewer_ids_than_candidates", width=9)
    yield selector_case(rng, "reduced", reduced=60, attributes={"vocab": 50})
    scaled: dict[str, Attribute] = {"multiplier": 0.2, "softcap": 2.0}
    yield selector_case(rng, "multiplier_and_softcap", attributes=scaled)
    yield selector_case(rng, "bfloat16", dtype=DType.BF16)
    name, x, a = selector_case(rng, "padding_is_no_candidate", attributes={"vocab": 180})
    x["logits"][:, 180:] = 100
    yield name, x, a
    name, x, a = selector_case(rng, "forced_are_predecessors")
    x["forced"][[1, 2, 5]] = 7, 150, 0
    yield name, x, a
    name, x, a = selector_case(rng, "equal_logits", attributes={"top_k": 5})
    x["logits"][:] = np.float32(0.5)
    yield name, x, a
    name, x, a = selector_case(rng, "equal_scores")
    x["predecessors"][:] = 0
    x["logits"] = np.round(x["logits"])
    yield name, x, a
    name, x, a = selector_case(rng, "rows_without_candidates")
    x["logits"][2], x["logits"][4, 17], x["logits"][5, :190] = -np.inf, np.nan, -np.inf
    yield name, x, a
    yield worked_example()
    for length in (3, 200_000):
        yield _drawn(length, selector_case(rng, f"drawn_at_{length}", reduced=120))
    law: dict[str, Attribute] = {"rejection": 1}
    yield _drawn(5, selector_case(rng, "rejection", reduced=120, attributes=law))
    for width in (9, 200):
        few = selector_case(rng, f"rejection_of_{width}_without_edges", width=width, attributes=law)
        name, x, a = _drawn(6, few)
        x["logits"][3], x["logits"][4, 5], x["logits"][5, 4:] = -np.inf, np.nan, -np.inf
        yield name, {n: v for n, v in x.items() if n not in EDGES}, a


def _drawn(length: int, case: Case) -> Case:
    name, x, a = case
    x |= {"length": np.array([length], np.int32), "temperature": np.array([0.7], np.float32)}
    x |= {"seed": np.array([-5, 77], np.int32)}
    x["forced"][2] = 7
    return name, x, a


def worked_example() -> Case:
    """Two candidates whose scores are known: id 2 has 569.5, id 4 has 1116.5.
    Source: SpecForge tests of dflash2.py.
    """
    x: dict[str, Array] = {
        "logits": np.full((2, 6), -np.inf, np.float32),
        "hidden": np.array([[0, 0], [17, 19]], np.float32),
        "predecessors": np.zeros((6, 2), np.float32),
        "successors": np.zeros((6, 2), np.float32),
        "last": np.array([1], np.int32),
        "forced": np.array([-1, -1], np.int32),
    }
    x["logits"][1, [2, 4]] = 0.5, 1.5
    x["predecessors"][1] = 2, 3
    x["successors"][2], x["successors"][4] = (5, 7), (11, 13)
    return "worked_example", x, {"rows": 2, "top_k": 2}


def conv_kernel_cases(rng: Rng) -> Iterator[Case]:
    """Rows of more columns than a block computes; the types of weights that kernels take."""
    bf16 = DType.BF16
    yield conv_case(rng, "wide_8_rows", 8, 2304, norm=True, dtype=bf16)
    yield conv_case(rng, "wide_16_rows_behind", 16, 2112, side=1, residual=True, dtype=bf16)
    yield conv_case(rng, "32_rows_four_taps", 32, 128, taps=4, group=8, norm=True, dtype=bf16)
    name, x, a = conv_case(rng, "float32_weights", 8, 192, norm=True, dtype=bf16)
    x |= {n: x[n].astype(np.float32) * np.float32(1.001) for n in ("norm_weight", "base")}
    yield name, x, a


def selector_kernel_cases(rng: Rng) -> Iterator[Case]:
    """Rows of several slices; every case of the operator in the types that kernels take."""
    for name, x, a in selector_cases(rng):
        codes = {n: x[n].astype(DType.BF16.numpy) for n in EDGES if n in x}
        if not codes or (x["hidden"].dtype != DType.BF16.numpy and x["hidden"].shape[1] % 8 == 0):
            yield name, x | codes, a
    wide: dict[str, Attribute] = {"vocab": 20000}
    yield selector_case(rng, "wide", 8, 20480, rank=64, dtype=DType.BF16, attributes=wide)
    name, x, a = selector_case(rng, "odd_width", 3, 8201, rank=8, dtype=DType.BF16)
    x["logits"][1, 8192:] = 20 + np.arange(9)
    x["logits"][2, 7] = np.nan
    yield name, x, a
    many: dict[str, Attribute] = {"top_k": 32}
    yield selector_case(rng, "32_rows_32", 32, 300, rank=24, dtype=DType.BF16, attributes=many)
