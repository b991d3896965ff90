"""Calls with the sizes of Qwen3.6-27B and its drafter, to test launch rules. They are never run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from thor_dflash.core.tensors import DType
from thor_dflash.plugins.contract import Attribute
from thor_dflash.plugins.launch import Shaped

BF16, F32, I32, FP8, U8 = DType.BF16, DType.F32, DType.I32, DType.FP8, DType.U8
Ports = Mapping[str, Shaped]
Full = tuple[str, dict[str, Attribute], Ports]
"""A call of the full model: name, attributes, types and shapes of the inputs."""

ROWS = (1, 16, 32, 512)
"""Rows of a linear: a single token, blocks of two widths, a prefill step."""


def sites(operator: str) -> Iterator[Full]:
    """The calls of an operator. Source of the models' dimensions: their config.json. Numbers of
    rows, cache and ring lengths, kinds of weights and the reduced vocabulary are chosen.
    """
    yield from _SITES[operator]()


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
    yield from _tower_linear_sites()
    h, inner = 5120, 17408
    for kind, counts in (("nvfp4", ROWS), ("float8_e4m3fn", (16,)), ("bfloat16", (512,))):
        for t in counts:
            rows, norm = {"x": Shaped(BF16, (t, h))}, {"norm_weight": Shaped(BF16, (h,))}
            offset: dict[str, Attribute] = {"norm_offset": 1.0}
            for name, widths in (
                ("gdn_in", (10240, 6144, 48, 48)),
                ("qkv", (6144, 6144, 1024, 1024)),
            ):
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
        for t, n in ((1, 2048), (16, 2048), (16, 32768), (16, 262144), (32, 2048), (512, 8192)):
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


def _conv_sites() -> Iterator[Full]:
    for t, side in ((8, 0), (8, 1), (16, 1)):
        x = {"x": Shaped(BF16, (t, 5120)), "dynamic": Shaped(BF16, (t, 1280))}
        x |= {"base": Shaped(BF16, (2, 2, 5120))}
        x["residual" if side else "norm_weight"] = Shaped(BF16, (t, 5120) if side else (5120,))
        yield f"{t}_rows_side_{side}", {"side": side}, x


def _selector_sites() -> Iterator[Full]:
    for t, v in ((8, 248320), (8, 65536), (16, 248320)):
        x = {"logits": Shaped(F32, (t, v)), "hidden": Shaped(BF16, (t, 256))}
        x |= {"id_map": Shaped(I32, (v,))} if v == 65536 else {}
        x |= {name: Shaped(BF16, (248320, 256)) for name in ("predecessors", "successors")}
        x |= {"last": Shaped(I32, (1,)), "forced": Shaped(I32, (t,))}
        yield f"{t}_rows_{v}", {"rows": t}, x


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
    drawn = {name: Shaped(I32, (16,)) for name in ("sampled", "last")}
    yield "sampled", a, x | drawn | {"temperature": Shaped(F32, (1,))}


def _sample_sites() -> Iterator[Full]:
    x = {name: Shaped(I32, (1,)) for name in ("length", "top_k")} | {"seed": Shaped(I32, (2,))}
    x |= {name: Shaped(F32, (1,)) for name in ("temperature", "top_p", "min_log_p")}
    whole = x | {"logits": Shaped(F32, (16, 248320))}
    yield "target", {"vocab": 248077, "first": 1}, whole
    yield "masked", {"vocab": 248077}, whole | {"mask": Shaped(I32, (16, -(-248077 // 32)))}
    reduced = {"logits": Shaped(F32, (16, 65536)), "id_map": Shaped(I32, (65536,))}
    yield "reduced", {}, x | reduced
    yield (
        "reduced_wide",
        {},
        x | {n: Shaped(s.dtype, (*s.shape[:-1], 131072)) for n, s in reduced.items()},
    )


def _tower_linear_sites() -> Iterator[Full]:
    """Products of the vision tower, over an image of 5120 patches."""
    wide, narrow = 1152, 4304
    for name, n, k, epilogue in (
        ("qkv", 3 * wide, wide, "none"),
        ("proj", wide, wide, "residual"),
        ("fc1", narrow, wide, "gelu_tanh"),
        ("fc2", wide, narrow, "residual"),
    ):
        x = {"x": Shaped(BF16, (5120, k)), "bias0": Shaped(F32, (n,))}
        x |= _weights("bfloat16", (n,), k)
        if epilogue == "residual":
            x["residual"] = Shaped(BF16, (5120, n))
        yield f"tower_{name}", {"epilogue": epilogue}, x
    x = {"x": Shaped(BF16, (1280, 4 * wide)), "bias0": Shaped(F32, (4 * wide,))}
    x |= _weights("bfloat16", (4 * wide,), 4 * wide)
    yield "tower_merger", {"epilogue": "gelu_erf"}, x


def _layer_norm_sites() -> Iterator[Full]:
    x = {"x": Shaped(BF16, (5120, 1152)), "weight": Shaped(BF16, (1152,))}
    x["bias"] = Shaped(F32, (1152,))
    for fold in (1, 4):
        yield f"fold_{fold}", {"rows": 5120, "columns": 1152, "fold": fold}, x


def _image_attention_sites() -> Iterator[Full]:
    for patches in (1280, 5120):
        x = {"qkv": Shaped(BF16, (patches, 3 * 1152)), "count": Shaped(I32, (1,))}
        x |= {axis: Shaped(I32, (patches,)) for axis in ("row", "column")}
        yield f"{patches}_patches", {"heads": 16, "head_dim": 72}, x


def _image_positions_sites() -> Iterator[Full]:
    x = {"table": Shaped(BF16, (2304, 1152)), "taps": Shaped(I32, (5120, 4))}
    yield "5120_patches", {}, x | {"weights": Shaped(F32, (5120, 4))}


def _image_embed_sites() -> Iterator[Full]:
    x = {"x": Shaped(BF16, (512, 5120)), "ids": Shaped(I32, (512,))}
    yield "512_tokens", {}, x | {"image": Shaped(BF16, (512, 5120))}


def _rms_norm_sites() -> Iterator[Full]:
    for rows, dtype in ((512, BF16), (1, F32)):
        x = {"x": Shaped(BF16, (rows, 5120)), "weight": Shaped(dtype, (5120,))}
        yield f"{rows}_rows", {}, x


def _fill_drafts_sites() -> Iterator[Full]:
    yield "16_rows", {"at": 1}, {"ids": Shaped(I32, (16,)), "best": Shaped(I32, (1,))}


_SITES = {
    "linear": _linear_sites,
    "head": _head_sites,
    "verify_attention": _verify_sites,
    "draft_attention": _draft_sites,
    "draft_conv": _conv_sites,
    "selector": _selector_sites,
    "context_kv": _context_sites,
    "gdn": _gdn_sites,
    "accept": _accept_sites,
    "sample": _sample_sites,
    "layer_norm": _layer_norm_sites,
    "image_attention": _image_attention_sites,
    "image_positions": _image_positions_sites,
    "image_embed": _image_embed_sites,
    "rms_norm": _rms_norm_sites,
    "fill_drafts": _fill_drafts_sites,
}
