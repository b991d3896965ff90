"""Calls the kernels are judged on besides the rooms' own cases: the widths they are made for.

`cases` are run on the emulator, so they are as small as those widths let them be. `sites` are calls
of the full model: launched never, but their geometry must be legal and their kernels compile.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from thor_dflash.plugins.accept.reference import accept_case
from thor_dflash.plugins.gdn.reference import gdn_case
from thor_dflash.plugins.launch import Shaped
from thor_dflash.plugins.linear.reference import weight_case
from thor_dflash.plugins.numerics import rounded
from thor_dflash.plugins.op import Attribute, Case
from thor_dflash.tensors import Array, DType

Rng = np.random.Generator
BF16, F32, I32, FP8, U8 = DType.BF16, DType.F32, DType.I32, DType.FP8, DType.U8


def cases(room: str, rng: Rng) -> Iterator[Case]:
    """More cases of a room, in the types kernels take."""
    yield from _CASES[room](rng)


def _bf16(rng: Rng, *shape: int, scale: float = 1.0) -> Array:
    return (rng.standard_normal(shape) * scale).astype(BF16.numpy)


def _number(x: int) -> Array:
    return np.array([x], np.int32)


# ---- linear, head --------------------------------------------------------------------------------
def _linear(rng: Rng) -> Iterator[Case]:
    k, n = 640, 200
    for t in (1, 5, 16, 31, 32, 33, 70):
        x = {"x": _bf16(rng, t, k), "norm_weight": _bf16(rng, k)}
        yield Case(f"norm_{t}_of_{k}", x | weight_case(rng, "nvfp4", n, k), {"norm_offset": 1.0})
    for t in (16, 32, 48):
        for kind in ("nvfp4", "fp8", "bfloat16"):
            x = {"x": _bf16(rng, t, k), "residual": _bf16(rng, t, n, scale=20)}
            a: dict[str, Attribute] = {"epilogue": "residual"}
            yield Case(f"residual_{kind}_{t}_of_{k}", x | weight_case(rng, kind, n, k), a)
        both = weight_case(rng, "nvfp4", n, k, 0) | weight_case(rng, "nvfp4", n, k, 1)
        x = {"x": _bf16(rng, t, k), "norm_weight": _bf16(rng, k)}
        yield Case(f"swiglu_{t}_of_{k}", x | both, {"segments": 2, "epilogue": "swiglu"})
        mixed: dict[str, Array] = {"x": _bf16(rng, t, k, scale=9), "norm_weight": _bf16(rng, k)}
        for i, (kind, width) in enumerate(
            (("nvfp4", 320), ("nvfp4", 72), ("bfloat16", 16), ("bfloat16", 16), ("fp8", 64))
        ):
            mixed |= weight_case(rng, kind, width, k, i)
        yield Case(f"mixed_{t}_of_{k}", mixed, {"segments": 5, "norm_offset": 1.0})
        x = {
            "x": _bf16(rng, t, k),
            "gate": _bf16(rng, t, k, scale=4),
            "norm_weight": _bf16(rng, 128),
        }
        x |= {"residual": _bf16(rng, t, n)} | weight_case(rng, "nvfp4", n, k)
        a = {"epilogue": "residual", "gate": "silu", "head_dim": 128}
        yield Case(f"gated_{t}_of_{k}", x, a)
        x = {name: x[name] for name in x if name != "norm_weight"}
        yield Case(f"sigmoid_{t}_of_{k}", x, {"epilogue": "residual", "gate": "sigmoid"})
    yield every_code(16)
    yield every_code(48)


def every_code(rows: int) -> Case:
    """y[t, n] is FP4 code t % 16 times E4M3 scale n, 1 to 126: exact in bf16."""
    pairs = np.arange(8, dtype=np.uint8) * 0x22 + 0x10
    codes = np.tile(pairs, (128, 16))
    scales = np.minimum(np.arange(1, 129), 126).astype(np.uint8)
    return Case(
        f"every_code_by_every_scale_{rows}_rows",
        {
            "x": np.tile(np.eye(16, 256, dtype=np.float32), (rows // 16, 1)).astype(BF16.numpy),
            "weight0": codes,
            "block_scale0": np.repeat(scales[:, None], 16, axis=1).view(FP8.numpy),
            "row_scale0": np.ones(128, np.float32),
        },
        {},
    )


def _head(rng: Rng) -> Iterator[Case]:
    k, v = 512, 1500
    for t, kind in ((1, "nvfp4"), (16, "nvfp4"), (16, "fp8"), (16, "bfloat16"), (33, "nvfp4")):
        x = {"x": _bf16(rng, t, k), "norm_weight": _bf16(rng, k)} | weight_case(rng, kind, v, k)
        yield Case(f"{kind}_{t}_rows", x, {"norm_offset": 1.0, "vocab": v - 20})
    x = {"x": _bf16(rng, 16, k), "norm_weight": _bf16(rng, k)} | weight_case(rng, "nvfp4", v, k)
    x["id_map"] = rng.permutation(9999)[:v].astype(np.int32)
    yield Case("reduced_wide", x, {"vocab": v - 3})
    twice = np.repeat(rng.standard_normal((v // 2, k)), 2, axis=0).astype(BF16.numpy)
    x = {"x": _bf16(rng, 16, k), "norm_weight": _bf16(rng, k), "weight0": np.roll(twice, 1, axis=0)}
    yield Case("equals_far_and_near", x, {})


# ---- attention -----------------------------------------------------------------------------------
def _verify(rng: Rng) -> Iterator[Case]:
    for heads, kv in ((2, 1), (4, 2), (4, 1), (6, 1)):
        yield _verify_case(rng, 16, 130, heads, kv, FP8, 256)
    for cache in (BF16, FP8):
        for length in (0, 1, 15, 16, 17, 112, 113, 127, 128, 129, 255, 256, 624):
            yield _verify_case(rng, 16, length, 4, 2, cache, 640)
        for rows in (1, 2, 7, 17, 31, 32, 33, 100):
            yield _verify_case(rng, rows, 120, 4, 2, cache, 256)
    for length in (4080, 4096, 4500):
        yield _verify_case(rng, 16, length, 2, 1, FP8, 4864)


def _verify_case(
    rng: Rng, rows: int, length: int, heads: int, kv: int, cache: DType, capacity: int
) -> Case:
    dim = 256
    x: dict[str, Array] = {
        "q": _bf16(rng, rows, heads * dim),
        "k": _bf16(rng, rows, kv * dim),
        "v": _bf16(rng, rows, kv * dim),
        "q_norm": _bf16(rng, dim, scale=0.3),
        "k_norm": _bf16(rng, dim, scale=0.3),
        "length": _number(length),
    }
    for name, scale in (("k", 0.05), ("v", 0.125)):
        scale = scale if cache is FP8 else 1.0
        stored = rounded(rng.standard_normal((kv, capacity, dim)) / scale, cache)
        stored[:, length:] = np.nan
        x[f"cache_{name}"] = stored
        x[f"scale_{name}"] = np.array([scale], np.float32)
    a: dict[str, Attribute] = {"heads": heads, "kv_heads": kv}
    return Case(f"{rows}_rows_at_{length}_{heads}x{kv}x256_{cache.value}", x, a)


def _draft(rng: Rng) -> Iterator[Case]:
    heads, kv, dim, slots = 8, 2, 128, 192
    for causal, window in ((1, 100), (0, 0), (0, 100)):
        for rows, length in ((16, 0), (16, 7), (16, 99), (16, 191), (16, 500), (5, 140), (1, 300)):
            x: dict[str, Array] = {
                "q": _bf16(rng, rows, heads * dim),
                "k": _bf16(rng, rows, kv * dim),
                "v": _bf16(rng, rows, kv * dim),
                "ring_k": _bf16(rng, kv, slots, dim),
                "ring_v": _bf16(rng, kv, slots, dim),
                "q_norm": _bf16(rng, dim),
                "k_norm": _bf16(rng, dim),
                "length": _number(length),
                "window": _number(window),
                "first": _number(max(0, length - 150) if window else 0),
            }
            for ring in (x["ring_k"], x["ring_v"]) if length < slots else ():
                ring[:, length:] = np.nan
            a: dict[str, Attribute] = {"heads": heads, "kv_heads": kv, "causal": causal}
            yield Case(f"{rows}_rows_causal_{causal}_window_{window}_at_{length}", x, a)


def _context(rng: Rng) -> Iterator[Case]:
    kv, dim = 2, 128
    for rows, length in ((16, 0), (16, 150), (1, 159), (100, 155), (7, 160)):
        x: dict[str, Array] = {"length": _number(length)}
        for i, slots in enumerate((160, 300)):
            x |= {f"{n}{i}": _bf16(rng, rows, kv * dim) for n in "kv"}
            x |= {f"ring_{n}{i}": _bf16(rng, kv, slots, dim) for n in "kv"}
            x[f"k_norm{i}"] = _bf16(rng, dim)
        yield Case(f"{rows}_rows_at_{length}_2x128", x, {"layers": 2, "kv_heads": kv})


# ---- gdn, accept ---------------------------------------------------------------------------------
def _gdn(rng: Rng) -> Iterator[Case]:
    wide: dict[str, Attribute] = {"key_dim": 128, "value_dim": 128, "value_heads": 4}
    for rows, held, accepted in (
        (16, 16, 0), (16, 16, 1), (16, 16, 2), (16, 16, 16), (1, 16, 3), (1, 1, 1), (9, 16, 5),
    ):  # fmt: skip
        yield gdn_case(rng, rows, held, accepted, wide, BF16)
    yield gdn_case(rng, 16, 16, 5, wide | {"key_heads": 1, "value_heads": 3}, BF16)
    for accepted in (0, 1, 16):
        yield gdn_case(rng, 16, 16, accepted, wide | {"saves": "states"}, BF16)
    for rows, valid, accepted in (
        (32, 32, 0), (48, 1, 3), (64, 33, 16), (128, 128, 1), (128, 70, 7), (200, 131, 2),
    ):  # fmt: skip
        case = gdn_case(rng, rows, 16, accepted, wide | {"mode": "prefill"}, BF16)
        yield Case(
            f"{case.name}_valid_{valid}", {**case.inputs, "valid": _number(valid)}, case.attributes
        )


def _accept(rng: Rng) -> Iterator[Case]:
    for rows, vocab in ((16, 2500), (1, 700), (16, 129)):
        logits = rng.standard_normal((rows, vocab)) * 3
        tokens = np.concatenate([[1], logits.argmax(axis=1)[:-1]])
        for rule in (0, 1, 2):
            yield accept_case(f"{rows}x{vocab}_rule_{rule}", logits, tokens, rule=rule)


_CASES = {
    "linear": _linear,
    "head": _head,
    "verify_attention": _verify,
    "draft_attention": _draft,
    "context_kv": _context,
    "gdn": _gdn,
    "accept": _accept,
}

Ports = Mapping[str, Shaped]
Full = tuple[str, dict[str, Attribute], Ports]
"""A call of the full model: name, attributes, inputs."""

ROWS = (1, 16, 32, 512)


def sites(room: str) -> Iterator[Full]:
    """Calls of Qwen3.6-27B and its drafter. Source: spec of the model's geometry, its config."""
    yield from _SITES[room]()


def _weights(kind: str, widths: tuple[int, ...], k: int) -> dict[str, Shaped]:
    found: dict[str, Shaped] = {}
    for i, n in enumerate(widths):
        this = "bfloat16" if n == 48 else kind
        if this == "nvfp4":
            found[f"weight{i}"] = Shaped(U8, (n, k // 2))
            found[f"block_scale{i}"] = Shaped(FP8, (n, k // 16))
        else:
            found[f"weight{i}"] = Shaped(DType(this), (n, k))
        if this != "bfloat16":
            found[f"row_scale{i}"] = Shaped(F32, (n,))
    return found


def _linear_sites() -> Iterator[Full]:
    h, inner = 5120, 17408
    for kind in ("nvfp4", "float8_e4m3fn", "bfloat16"):
        for t in ROWS:
            rows, norm = {"x": Shaped(BF16, (t, h))}, {"norm_weight": Shaped(BF16, (h,))}
            offset: dict[str, Attribute] = {"norm_offset": 1.0}
            for name, widths in (("gdn_in", (10240, 6144, 48, 48)), ("qkv", (12288, 1024, 1024))):
                a = offset | {"segments": len(widths)}
                yield f"{name}_{kind}_{t}", a, rows | norm | _weights(kind, widths, h)
            a = offset | {"segments": 2, "epilogue": "swiglu"}
            yield f"gate_up_{kind}_{t}", a, rows | norm | _weights(kind, (inner, inner), h)
            yield (
                f"fc_{kind}_{t}",
                {},
                {"x": Shaped(BF16, (t, 5 * h))} | _weights(kind, (h,), 5 * h),
            )
            for name, k in (("down", inner), ("o_proj", 6144), ("gdn_out", 6144)):
                x = {"x": Shaped(BF16, (t, k)), "residual": Shaped(BF16, (t, h))}
                a = {"epilogue": "residual"}
                if name != "down":
                    x["gate"] = Shaped(BF16, (t, k))
                    a["gate"] = "sigmoid"
                if name == "gdn_out":
                    x["norm_weight"] = Shaped(BF16, (128,))
                    a |= {"gate": "silu", "head_dim": 128}
                yield f"{name}_{kind}_{t}", a, x | _weights(kind, (h,), k)


def _head_sites() -> Iterator[Full]:
    for v in (248320, 65536):
        for t in (1, 16):
            x = {"x": Shaped(BF16, (t, 5120)), "norm_weight": Shaped(BF16, (5120,))}
            x |= {"id_map": Shaped(I32, (v,))} if v == 65536 else {}
            yield f"{v}_{t}", {"norm_offset": 1.0}, x | _weights("nvfp4", (v,), 5120)


def _attention(t: int, heads: int, kv: int, dim: int, norm: DType) -> dict[str, Shaped]:
    return {
        "q": Shaped(BF16, (t, heads * dim)),
        "k": Shaped(BF16, (t, kv * dim)),
        "v": Shaped(BF16, (t, kv * dim)),
        "q_norm": Shaped(norm, (dim,)),
        "k_norm": Shaped(norm, (dim,)),
        "length": Shaped(I32, (1,)),
    }


def _verify_sites() -> Iterator[Full]:
    for cache in (FP8, BF16):
        for t, n in ((1, 2048), (16, 2048), (16, 32768), (16, 262144), (512, 8192)):
            x = _attention(t, 24, 4, 256, BF16)
            for name in "kv":
                x[f"cache_{name}"] = Shaped(cache, (4, n, 256))
                x[f"scale_{name}"] = Shaped(F32, (1,))
            yield f"{cache.value}_{t}_of_{n}", {"heads": 24, "kv_heads": 4}, x


def _draft_sites() -> Iterator[Full]:
    for n, causal in ((2064, 1), (32768, 0)):
        x = _attention(16, 32, 8, 128, BF16)
        x |= {"window": Shaped(I32, (1,)), "first": Shaped(I32, (1,))}
        x |= {f"ring_{name}": Shaped(BF16, (8, n, 128)) for name in "kv"}
        yield f"ring_{n}", {"heads": 32, "kv_heads": 8, "causal": causal}, x


def _context_sites() -> Iterator[Full]:
    for t in (16, 512):
        x = {"length": Shaped(I32, (1,))}
        for i, n in enumerate((2560, 2560, 2560, 2560, 32768)):
            x |= {f"{name}{i}": Shaped(BF16, (t, 1024)) for name in "kv"}
            x |= {f"ring_{name}{i}": Shaped(BF16, (8, n, 128)) for name in "kv"}
            x[f"k_norm{i}"] = Shaped(BF16, (128,))
        yield f"{t}_rows", {"layers": 5, "kv_heads": 8}, x


def _gdn_sites() -> Iterator[Full]:
    a: dict[str, Attribute] = {"key_heads": 16, "value_heads": 48}
    for mode, saves, t in (
        ("verify", "records", 16),
        ("verify", "records", 1),
        ("verify", "states", 16),
        ("prefill", "records", 512),
        ("prefill", "states", 512),
    ):
        x = {
            "qkv": Shaped(BF16, (t, 10240)),
            "b": Shaped(BF16, (t, 48)),
            "a": Shaped(BF16, (t, 48)),
            "conv_weight": Shaped(BF16, (10240, 1, 4)),
            "a_log": Shaped(F32, (48,)),
            "dt_bias": Shaped(F32, (48,)),
            "accepted": Shaped(I32, (1,)),
            "state": Shaped(F32, (48, 128, 128)),
            "tail": Shaped(BF16, (3, 10240)),
            "record_qkv": Shaped(BF16, (16, 10240)),
        }
        x |= {"valid": Shaped(I32, (1,))} if mode == "prefill" else {}
        if saves == "states":
            x["states"] = Shaped(F32, (16, 48, 128, 128))
        else:
            x["record_k"] = Shaped(F32, (16, 16, 128))
            x["record_d"] = Shaped(F32, (16, 48, 128))
            x["record_decay"] = Shaped(F32, (16, 48))
        yield f"{mode}_{saves}_{t}", a | {"mode": mode, "saves": saves}, x


def _accept_sites() -> Iterator[Full]:
    v = 248320
    one = ("drafted", "cap", "rule", "top_k", "close")
    x = {name: Shaped(I32, (1,)) for name in one}
    x |= {name: Shaped(I32, (16,)) for name in ("tokens", "forced", "soft")}
    x |= {name: Shaped(F32, (1,)) for name in ("margin", "soft_margin")}
    x |= {"stop": Shaped(I32, (8,)), "strict": Shaped(I32, (8,)), "logits": Shaped(F32, (16, v))}
    a: dict[str, Attribute] = {"vocab": 248077, "rows": 16}
    yield "unmasked", a, x
    yield "masked", a, x | {"mask": Shaped(I32, (16, -(-248077 // 32)))}


_SITES = {
    "linear": _linear_sites,
    "head": _head_sites,
    "verify_attention": _verify_sites,
    "draft_attention": _draft_sites,
    "context_kv": _context_sites,
    "gdn": _gdn_sites,
    "accept": _accept_sites,
}
