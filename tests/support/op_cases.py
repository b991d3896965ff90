"""Small cases of every operator's contract, for its body and its kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from support import mtp_cases as mtp
from support import vision_cases as vision
from support.dflash2_cases import conv_cases, selector_cases
from support.drafted_rows import drafted_rows, equal_laws

from thor_dflash.core.tensors import Array, DType
from thor_dflash.plugins import SAMPLE
from thor_dflash.plugins.accept.record import LOG_MARGIN, PROBABILITY_DELTA
from thor_dflash.plugins.contract import Arrays, Attribute
from thor_dflash.plugins.numpy_math import rounded


@dataclass(frozen=True, slots=True)
class OpCase:
    """Inputs and attributes to run an implementation on; absent optional inputs are left out."""

    name: str
    inputs: Arrays
    attributes: Mapping[str, Attribute]


def accept_case(name: str, logits: Array, tokens: Array, **given: Array | int | float) -> OpCase:
    """Returns a case; defaults have no effect. `vocab` is an attribute, all else an input."""
    rows = len(tokens)
    vocab = int(np.asarray(given.pop("vocab", 0)))
    quiet: dict[str, Array | int | float] = {
        "forced": np.full(rows, -1),
        "drafted": rows - 1,
        "cap": rows,
        "stop": np.full(4, -1),
        "rule": 0,
        "top_k": 3,
        "close": -1,
        "strict": np.full(4, -1),
        "soft": np.full(rows, -1),
    }
    x = {**quiet, **given}
    margins = {name: np.array([x.pop(name, 1.0)], np.float32) for name in ("margin", "soft_margin")}
    inputs = {name: np.atleast_1d(value).astype(np.int32) for name, value in x.items()}
    return OpCase(
        name,
        {
            "logits": logits.astype(np.float32),
            "tokens": tokens.astype(np.int32),
            **margins,
            **inputs,
        },
        {"vocab": vocab, "rows": rows},
    )


def any_logits(rng: np.random.Generator, rows: int, width: int) -> Array:
    """Many ties, zeros of both signs, minus infinity; sometimes NaN or infinity, a fault."""
    logits = rng.standard_normal((rows, width)) * rng.choice([0.3, 1.0, 8.0])
    if rng.random() < 0.6:
        logits = np.round(logits * 2) / 2
    logits = np.where(rng.random(logits.shape) < 0.1, -0.0, logits)
    if rng.random() < 0.2:
        logits = np.where(rng.random(logits.shape) < 0.5, -np.inf, logits)
    for value in (np.nan, -np.nan, np.inf):
        if rng.random() < 0.1:
            logits[rng.integers(rows), rng.integers(width)] = value
    return logits


def any_tokens(rng: np.random.Generator, logits: Array) -> Array:
    """A block whose drafts are mostly the best id, sometimes a good one, seldom any other id."""
    rows, width = logits.shape
    order = np.argsort(-logits, axis=1, kind="stable")
    rank = np.where(rng.random(rows) < 0.6, 0, rng.integers(0, 4, rows)) % width
    near = order[np.arange(rows), rank]
    follow = np.where(rng.random(rows) < 0.97, near, rng.integers(-1, width + 2, rows))
    return np.concatenate([[5], follow[:-1]])


def any_ids(rng: np.random.Generator, tokens: Array, width: int, chance: float) -> Array:
    """An id for each row: with probability `chance` mostly the token after the row, else -1."""
    follow = np.roll(tokens, -1)
    ids = np.where(rng.random(len(tokens)) < 0.7, follow, rng.integers(-1, width + 2, len(tokens)))
    return np.where(rng.random(len(tokens)) < chance, ids, -1)


def any_mask(rng: np.random.Generator, rows: int, limit: int) -> Array:
    words = rng.integers(-(2**31), 2**31, (rows, -(-limit // 32)))
    if rng.random() < 0.5:
        words |= rng.integers(-(2**31), 2**31, words.shape)
    return np.where(rng.random((rows, 1)) < 0.1, 0, words)


def any_accept_case(seed: int, widths: Sequence[int], few: int) -> OpCase:
    """A block that combines many hard parts of the rules, with one of these vocabularies; those of
    `few` ids and more get few rows.
    """
    rng = np.random.default_rng(seed)
    width = int(rng.choice(widths))
    rows = int(rng.choice([1, 2, 5, 16, 16, 32])) if width < few else int(rng.integers(1, 5))
    logits = any_logits(rng, rows, width)
    vocab = int(rng.choice([0, width, max(1, width - 5), width + 9]))
    tokens = any_tokens(rng, logits[:, : vocab or None])

    given: dict[str, Array | int | float] = {
        "rule": int(rng.choice([0, 1, 1, 2, 2])),
        "top_k": int(rng.choice([1, 2, 4, 50, 50])),
        "margin": float(rng.choice([0.0, 0.5, 1.0, 1.0, 1e9, 0.013, 0.2])),
        "soft_margin": float(rng.choice([0.0, 0.5, 2.0, np.inf])),
        "cap": int(rng.integers(1, rows + 1)) if rng.random() < 0.3 else rows,
        "drafted": int(rng.integers(0, rows)) if rng.random() < 0.3 else rows - 1,
    }
    if rng.random() < 0.4:
        given["mask"] = any_mask(rng, rows, min(vocab or width, width))
    if rng.random() < 0.3:
        given["forced"] = any_ids(rng, tokens, width, 0.3)
    if rng.random() < 0.5:
        given["soft"] = any_ids(rng, tokens, width, 0.7)
    if rng.random() < 0.3:
        given["close"] = int(rng.choice(tokens))
    for name in ("stop", "strict"):
        if rng.random() < 0.5:
            given[name] = any_ids(rng, tokens, width, 0.2)[: rng.integers(1, 6)]
    case = accept_case(f"seed_{seed}", logits, tokens, vocab=vocab, **given)
    return drawn(rng, case) if seed % 3 == 0 else case


def drawn(rng: np.random.Generator, case: OpCase) -> OpCase:
    """The case with choices of `sample`, and drafts that mostly agree with them."""
    x = {name: case.inputs[name] for name in ("logits", "mask") if name in case.inputs}
    temperature = np.array([rng.choice([0.3, 1.0, 1.0, 4.0])], np.float32)
    given = {"top_k": int(rng.choice([0, 2, 30])), "top_p": float(rng.choice([0.6, 0.95, 1.0]))}
    call = sample_case("", **x, **given, temperature=temperature)
    attributes = SAMPLE.complete({"vocab": case.attributes["vocab"], "first": 1})
    found = SAMPLE.reference(call.inputs, attributes)
    tokens = np.array(case.inputs["tokens"])
    tokens[1:] = np.where(rng.random(len(tokens) - 1) < 0.6, found["choice"][:-1], tokens[1:])
    more = {"sampled": found["choice"], "last": found["last"], "temperature": temperature}
    return OpCase(f"{case.name}_drawn", {**case.inputs, **more, "tokens": tokens}, case.attributes)


def accept_cases(rng: np.random.Generator) -> Iterator[OpCase]:
    """All, no and some drafts right; stops, masks, forced and soft ids, faults, relaxed rules;
    then blocks that combine them.
    """
    rows, vocab = 16, 40
    logits = rng.standard_normal((rows, vocab))
    order = np.argsort(-logits, axis=1, kind="stable")
    full, second = (np.concatenate([[0], order[:-1, i]]) for i in (0, 1))
    for count in (0, 7, 15):
        wrong = np.arange(rows) > count
        yield accept_case(f"{count}_right", logits, np.where(wrong, second, full))
    yield accept_case("right_again_after_a_miss", logits, np.where(np.arange(rows) == 6, 0, full))
    yield accept_case("cap_2", logits, full, cap=2)
    yield accept_case("drafted_6", logits, full, drafted=6)
    yield accept_case("stop_drafted_at_8", logits, full, stop=full[8:9])
    yield accept_case("stop_is_the_bonus", logits, full, stop=logits[15].argmax()[None])
    yield accept_case("padding_never_chosen", logits, full, vocab=17)
    words = rng.integers(-(2**31), 2**31, (rows, 2), dtype=np.int64)
    yield accept_case("mask", logits, full, mask=words)
    words[5] = 0
    yield accept_case("mask_leaves_nothing", logits, np.zeros(rows), mask=words)
    forced = np.where(np.arange(rows) < 5, 7, -1)
    yield accept_case("forced_5", logits, np.where(np.arange(rows) < 6, 7, full), forced=forced)
    soft = np.full(rows, 7)
    yield accept_case("soft_is_drafted", logits, soft, soft=soft, soft_margin=1.0)
    for rule in (LOG_MARGIN, PROBABILITY_DELTA):
        loose: dict[str, int | float] = {"rule": rule, "margin": 9.0, "top_k": vocab}
        yield accept_case(f"rule_{rule}", logits, second, **loose)
        yield accept_case(f"rule_{rule}_close", logits, second, close=second[4], **loose)
        yield accept_case(f"rule_{rule}_strict", logits, second, strict=second[3:5], **loose)
        halves = np.where(np.arange(vocab) < 1, [0.5], [0.25]) * np.ones((rows, 1))
        for margin in (0.25, np.nextafter(np.float32(0.25), np.float32(0))):
            limit = loose | {"margin": float(margin), "top_k": 2}
            yield accept_case(f"rule_{rule}_just_{margin:.9f}", halves, np.ones(rows), **limit)
    for value in (np.nan, np.inf):
        spoiled = np.array(logits)
        spoiled[3, 11] = value
        yield accept_case(f"{value}_in_row_3", spoiled, full)
    yield accept_case("all_minus_infinity", np.full((rows, vocab), -np.inf), full)
    for seed in range(40):
        yield any_accept_case(seed, (1, 2, 7, 40, 333), 1000)


def sample_case(name: str, logits: Array, **given: Array | float) -> OpCase:
    """Returns a case; by default T = 1 and no truncation. `vocab` and `first` are attributes."""
    quiet: dict[str, Array | float] = {"length": 77, "top_k": 0, "seed": np.array([5, -6])}
    real: dict[str, Array | float] = {"temperature": 1.0, "top_p": 1.0, "min_log_p": -np.inf}
    x = {**quiet, **real, **given}
    attributes = {n: int(np.asarray(x.pop(n, 0))) for n in ("vocab", "first")}
    inputs = {
        n: np.atleast_1d(value).astype(np.float32 if n in (*real, "scores") else np.int32)
        for n, value in x.items()
    }
    return OpCase(name, {"logits": logits.astype(np.float32), **inputs}, attributes)


def rejecting(case: OpCase, seed: int, most: int = 16) -> OpCase:
    """The case with drafts drawn from at most so many of its best ids."""
    more = drafted_rows(case.inputs, case.attributes["vocab"], seed, most)
    return OpCase(f"{case.name}_rejecting", {**case.inputs, **more}, case.attributes)


def any_sample_case(seed: int, widths: Sequence[int], few: int) -> OpCase:
    """Rows with many ties and faults, and truncations of every strength, with one of these
    vocabularies; those of `few` ids and more get few rows.
    """
    rng = np.random.default_rng(seed)
    width = int(rng.choice(widths))
    rows = int(rng.choice([1, 2, 5, 16])) if width < few else 1
    logits = any_logits(rng, rows, width)
    vocab = int(rng.choice([0, width, max(1, width - 5), width + 9]))
    given: dict[str, Array | float] = {
        "temperature": float(rng.choice([0.01, 0.3, 0.6, 1.0, 1.0, 3.0, 50.0])),
        "top_k": int(rng.choice([0, 0, 1, 3, 20, width - 1, width, width + 3])),
        "top_p": float(rng.choice([1.0, 1.0, 1e-6, 0.1, 0.5, 0.95, 0.999999, 2.0])),
        "min_log_p": float(rng.choice([-np.inf, -np.inf, -20.0, -4.6, -2.3, -0.3, 0.0])),
        "length": int(rng.integers(0, 2**20)),
        "seed": rng.integers(-(2**31), 2**31, 2),
        "first": int(rng.integers(0, 2)),
    }
    if rng.random() < 0.4:
        given["mask"] = any_mask(rng, rows, min(vocab or width, width))
    if rng.random() < 0.3:
        given["id_map"] = np.sort(rng.permutation(2 * width)[:width])
    return sample_case(f"seed_{seed}", logits, vocab=vocab, **given)


def sample_cases(rng: np.random.Generator) -> Iterator[OpCase]:
    """Every truncation alone and together, ties at its end, masks, faults, extreme logits."""
    logits = rng.standard_normal((16, 40)) * 3
    for temperature in (0.01, 7.0):
        yield sample_case(f"t_{temperature}", logits, temperature=temperature)
    for name, values in (("top_k", (1, 5)), ("top_p", (0.5, 0.0)), ("min_log_p", (-2, 0))):
        for value in values:
            yield sample_case(f"{name}_{value}", logits, **{name: value})
    yield sample_case("qwen", logits, temperature=0.6, top_k=20, top_p=0.95)
    yield sample_case("id_map", logits, id_map=np.arange(40) * 3 + 1)
    tied = np.where(np.arange(40) % 3, 1.0, 2.0) * np.ones((3, 1))
    for keep in (4, 14, 15):
        yield sample_case(f"ties_top_k_{keep}", tied, top_k=keep)
        yield sample_case(f"ties_top_p_{keep}", tied, top_p=keep / 41)
    yield sample_case("all_equal", np.zeros((4, 40)), top_k=7, top_p=0.5, min_log_p=0)
    far = np.array([[3e38, -3e38, 0, 1, -np.inf], [-1e-45, 0.0, -0.0, 1e-45, -3e38]])
    yield sample_case("extremes", far, top_k=3)
    yield sample_case("extremes_all", far, temperature=0.01, top_p=0.5)
    yield sample_case("all_minus_infinity", np.full((2, 40), -np.inf), top_p=0.5)
    for value in (np.nan, np.inf):
        spoiled = np.array(logits)
        spoiled[3, 11] = value
        yield sample_case(f"{value}_in_row_3", spoiled)
    for seed in range(9):
        yield any_sample_case(seed, (1, 2, 7, 40, 333), 1000)
    for seed in range(6):
        yield rejecting(any_sample_case(seed, (40,), 1000), seed)
    peaked = np.full((2, 40), -np.inf)
    peaked[:, 3] = 0  # one id is left: its draft is always accepted
    yield rejecting(sample_case("one_id", peaked), 1)
    yield rejecting(sample_case("qwen", logits, temperature=0.6, top_k=20, top_p=0.95), 2)
    whole = rejecting(sample_case("whole", logits, first=1), 3)
    yield whole
    yield OpCase("equal_laws", equal_laws(whole.inputs), whole.attributes)


def gdn_case(
    rng: np.random.Generator,
    rows: int,
    held: int,
    accepted: int,
    attributes: dict[str, Attribute],
    dtype: DType = DType.F32,
) -> OpCase:
    """Returns a case with random inputs; the records are in the range that a real call writes."""
    a = {"key_heads": 2, "value_heads": 4, "key_dim": 8, "value_dim": 16} | attributes
    hk, hv, dk, dv = (int(a[n]) for n in ("key_heads", "value_heads", "key_dim", "value_dim"))
    channels = 2 * hk * dk + hv * dv

    def normal(*shape: int) -> Array:
        return rng.standard_normal(shape).astype(np.float32)

    x = {
        "qkv": normal(rows, channels),
        "b": normal(rows, hv),
        "a": normal(rows, hv),
        "tail": normal(3, channels),
        "record_qkv": normal(held, channels),
    }
    x = {name: value.astype(dtype.numpy) for name, value in x.items()} | {
        "conv_weight": normal(channels, 1, 4),
        "a_log": np.log(rng.uniform(0.5, 8, hv)).astype(np.float32),
        "dt_bias": normal(hv),
        "accepted": np.array([accepted], np.int32),
        "state": normal(hv, dk, dv),
    }
    if a.get("saves") == "states":
        x["states"] = normal(held, hv, dk, dv)
    else:
        k = normal(held, hk, dk)
        x |= {
            "record_k": k / np.linalg.norm(k, axis=-1, keepdims=True),
            "record_d": normal(held, hv, dv),
            "record_decay": rng.uniform(0.1, 1, (held, hv)).astype(np.float32),
        }
    return OpCase(
        f"{a.get('mode', 'verify')}_{rows}_rows_fold_{accepted}_of_{held}_"
        f"{a.get('saves', 'records')}_{dtype.value}",
        x,
        a,
    )


def gdn_cases(rng: np.random.Generator) -> Iterator[OpCase]:
    """Folds of none, one, some and all records; a prefill that stops early; both kinds of save."""
    for accepted in (0, 1, 2, 3, 7, 16):
        yield gdn_case(rng, 16, 16, accepted, {})
    yield gdn_case(rng, 4, 16, 9, {})
    yield gdn_case(rng, 16, 16, 5, {"key_heads": 4, "value_heads": 4})
    yield gdn_case(rng, 16, 16, 5, {"key_heads": 1, "value_heads": 3})
    yield gdn_case(rng, 16, 16, 5, {"key_dim": 128, "value_dim": 128, "value_heads": 2})
    yield gdn_case(rng, 16, 16, 6, {}, DType.BF16)
    for accepted in (0, 1, 16):
        yield gdn_case(rng, 16, 16, accepted, {"saves": "states"})
    for rows, valid in ((32, 32), (32, 1), (32, 2), (32, 17)):
        case = gdn_case(rng, rows, 16, valid % 5, {"mode": "prefill"})
        yield OpCase(
            f"{case.name}_valid_{valid}",
            {**case.inputs, "valid": np.array([valid], np.int32)},
            case.attributes,
        )


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


def linear_cases(rng: np.random.Generator) -> Iterator[OpCase]:
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
    yield from (OpCase(*case) for case in vision.biased_cases(rng, 40, DType.F32))


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


def head_cases(rng: np.random.Generator) -> Iterator[OpCase]:
    """Each weight kind; padding with the largest logits; equal logits; a NaN row; a reduced
    vocabulary.
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


def context_kv_cases(rng: np.random.Generator) -> Iterator[OpCase]:
    """Rings of different lengths in one call; starts before, at and after the wrap-around."""
    kv, dim = 2, 16

    def normal(*shape: int) -> Array:
        return rng.standard_normal(shape).astype(np.float32)

    for dtype in (DType.F32, DType.BF16):
        for length in (0, 1, 20, 24, 39, 40, 41, 1000, 200_000) if dtype is DType.F32 else (39,):
            x: dict[str, Array] = {}
            for i, slots in enumerate((40, 40, 1200)):
                x |= {
                    f"k{i}": normal(16, kv * dim),
                    f"v{i}": normal(16, kv * dim),
                    f"ring_k{i}": normal(kv, slots, dim),
                    f"ring_v{i}": normal(kv, slots, dim),
                }
            x = {name: value.astype(dtype.numpy) for name, value in x.items()}
            x |= {f"k_norm{i}": 1 + normal(dim) / 3 for i in range(3)}
            x["length"] = np.array([length], np.int32)
            yield OpCase(
                f"at_{length}_{dtype.value}",
                x,
                {"layers": 3, "kv_heads": kv, "head_dim": dim, "rotary_dim": dim},
            )


CAPACITY = 160
"""Cache rows of each case: five tiles."""


def _verify_case(
    rng: np.random.Generator,
    rows: int,
    length: int,
    cache: DType,
    attributes: dict[str, Attribute],
    dtype: DType = DType.F32,
) -> OpCase:
    a = {"heads": 4, "kv_heads": 2, "head_dim": 16, "rotary_dim": 8, "tile": 32} | attributes
    heads, kv, dim = int(a["heads"]), int(a["kv_heads"]), int(a["head_dim"])

    def normal(*shape: int) -> Array:
        return rng.standard_normal(shape).astype(np.float32)

    sizes = {"q": heads, "k": kv, "v": kv}
    x = {name: normal(rows, n * dim).astype(dtype.numpy) for name, n in sizes.items()} | {
        "q_norm": normal(dim) * 0.3,
        "k_norm": normal(dim) * 0.3,
        "length": np.array([length], np.int32),
    }
    for name, scale in (("k", 0.05), ("v", 0.125)):
        stored = rounded(normal(kv, CAPACITY, dim) / (scale if cache is DType.FP8 else 1), cache)
        # Rows past the length must never be read: NaN reveals it if they are.
        stored[:, length:] = np.nan
        x[f"cache_{name}"] = stored
        x[f"scale_{name}"] = np.array([scale if cache is DType.FP8 else 1], np.float32)
    return OpCase(f"{rows}_rows_at_{length}_{heads}x{kv}_{cache.value}_{dtype.value}", x, a)


def verify_cases(rng: np.random.Generator) -> Iterator[OpCase]:
    """Empty and full cache; lengths around tile boundaries; group sizes 1 to 6; each cache type."""
    for length in (0, 1, 15, 16, 17, 31, 32, 33, 63, 64, 100, 128):
        yield _verify_case(rng, 16, length, DType.F32, {})
    yield _verify_case(rng, 1, 40, DType.F32, {})
    yield _verify_case(rng, 48, 40, DType.F32, {})
    for heads, kv in ((2, 2), (6, 1), (12, 2)):
        yield _verify_case(rng, 16, 50, DType.F32, {"heads": heads, "kv_heads": kv})
    yield _verify_case(rng, 16, 70, DType.F32, {"rotary_dim": 16})
    for length in (0, 31, 90):
        yield _verify_case(rng, 16, length, DType.FP8, {})
    yield _verify_case(rng, 16, 31, DType.BF16, {}, DType.BF16)
    yield _verify_case(rng, 16, 31, DType.FP8, {}, DType.BF16)
    yield _verify_case(rng, 16, CAPACITY - 16, DType.F32, {})
    for rows in (16, 48):
        case = _verify_case(rng, rows, 40, DType.F32, {})
        yield from (OpCase(*one) for one in vision.turned_cases(rng, case))


LENGTHS = (0, 1, 8, 23, 24, 25, 47, 48, 49, 200, 200_000)


VIEWS = {(1, 24): LENGTHS, (0, 0): LENGTHS, (1, 0): LENGTHS, (0, 24): LENGTHS, (0, 7): (200,)}
"""(causal, window) -> lengths. The last window hides even rows of the block from one another."""


def _stale(x: Arrays, first: int, length: int) -> dict[str, Array]:
    """Returns the inputs with NaN in every ring slot except those of positions from `first` on."""
    out = dict(x)
    for name in ("ring_k", "ring_v"):
        slots = out[name].shape[1]
        kept = np.arange(first, length) % slots
        ring = np.full_like(out[name], np.nan)
        ring[:, kept] = out[name][:, kept]
        out[name] = ring
    return out


def draft_cases(rng: np.random.Generator) -> Iterator[OpCase]:
    """Context empty, below, at and above the window and the ring; both causalities; bf16 rows."""
    heads, kv, dim, slots = 4, 2, 16, 48

    def normal(*shape: int) -> Array:
        return rng.standard_normal(shape).astype(np.float32)

    for dtype in (DType.F32, DType.BF16):
        for (causal, window), lengths in VIEWS.items():
            for length in lengths if dtype is DType.F32 else (30,):
                x: dict[str, Array] = {
                    "q": normal(16, heads * dim),
                    "k": normal(16, kv * dim),
                    "v": normal(16, kv * dim),
                    "ring_k": normal(kv, slots, dim),
                    "ring_v": normal(kv, slots, dim),
                }
                x = {name: value.astype(dtype.numpy) for name, value in x.items()} | {
                    "q_norm": 1 + normal(dim) / 3,
                    "k_norm": 1 + normal(dim) / 3,
                    "length": np.array([length], np.int32),
                    "window": np.array([window], np.int32),
                    "first": np.zeros(1, np.int32),
                }
                a: dict[str, Attribute] = {
                    "heads": heads,
                    "kv_heads": kv,
                    "head_dim": dim,
                    "rotary_dim": dim,
                    "causal": causal,
                }
                name = f"causal_{causal}_window_{window}_at_{length}_{dtype.value}"
                yield OpCase(name, x, a)
                if length in (25, 49, 200):
                    for first in (length - 5, length, length + 3):
                        late = {"first": np.array([first], np.int32)}
                        yield OpCase(f"{name}_from_{first}", _stale(x, first, length) | late, a)


CASES: Mapping[str, Callable[[np.random.Generator], Iterator[OpCase]]] = {
    "linear": linear_cases, "gdn": gdn_cases, "verify_attention": verify_cases,
    "draft_attention": draft_cases, "context_kv": context_kv_cases, "head": head_cases,
    "accept": accept_cases, "sample": sample_cases,
    **{
        name: lambda rng, make=make: (OpCase(*case) for case in make(rng))
        for name, make in {
            "draft_conv": conv_cases, "selector": selector_cases, **vision.CASES, **mtp.CASES
        }.items()
    },
}  # fmt: skip
"""Operator -> its cases."""
