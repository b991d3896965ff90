"""Small random checkpoints on disk, a pure function of geometry, seed and dialect.

Written and read back here without thor_dflash, so that its readers are checked independently.
Names of tensors are given here without the checkpoint's prefix.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import ml_dtypes
import numpy as np
import safetensors
from numpy.typing import NDArray

Array = NDArray[Any]
Floats = NDArray[np.float32]
Dialect = Literal["bf16", "f32", "f16", "modelopt", "compressed-tensors", "fp8", "mixed"]
DIALECTS: tuple[Dialect, ...] = get_args(Dialect)

_NAMES = ("F32", "F16", "BF16", "F8_E4M3", "U8", "I8", "I32")
_TYPES = (np.float32, np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, "u1", "i1", "i4")
DTYPES: dict[str, np.dtype[Any]] = {n: np.dtype(t) for n, t in zip(_NAMES, _TYPES, strict=True)}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
ABSENT = object()
ATTENTION_MLP = ("attention", "mlp")
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
PREFIXES = ("model.language_model.", "language_model.model.", "model.")
KEYS = """
    vocab_size=vocab hidden_size=hidden intermediate_size=intermediate num_hidden_layers=layers
    num_attention_heads=heads num_key_value_heads=kv_heads head_dim=head_dim
    linear_num_key_heads=key_heads linear_num_value_heads=value_heads
    linear_key_head_dim=key_dim linear_value_head_dim=value_dim linear_conv_kernel_dim=conv_kernel
    max_position_embeddings=max_position rms_norm_eps=eps tie_word_embeddings=tied"""
"""Keys of config.json, each with the field of a geometry that it holds."""


@dataclass(frozen=True, kw_only=True)
class TowerGeometry:
    """Sizes of a vision tower, and how its images are resized."""

    depth: int = 2
    hidden: int = 144
    heads: int = 2
    intermediate: int = 112
    positions: int = 7
    shortest: int = 4096
    longest: int = 65536


IMAGE_TOKENS = {"image": 241, "vision_start": 240, "vision_end": 242, "video": 243}


@dataclass(frozen=True, kw_only=True)
class TargetGeometry:
    """Sizes and packaging of a target checkpoint. Every interval-th layer is attention."""

    vocab: int = 256
    hidden: int = 64
    intermediate: int = 96
    layers: int = 4
    interval: int = 4
    heads: int = 4
    kv_heads: int = 1
    head_dim: int = 64
    rotary: int = 16
    key_heads: int = 2
    value_heads: int = 2
    key_dim: int = 32
    value_dim: int = 32
    conv_kernel: int = 4
    max_position: int = 4096
    rope_theta: float = 1e7
    eps: float = 1e-6
    tied: bool = False
    mix: str = "mlp.=modelopt lm_head=modelopt self_attn.=fp8"
    prefix: str = "model."
    wrapper: bool = False
    """config.json is the multimodal model's, and there is an MTP tensor."""
    tower: TowerGeometry | None = None
    """A vision tower, in a file of its own; needs `wrapper`."""
    mtp: bool = False
    """The MTP layer is whole."""
    flat_rope: bool = False
    """config.json has no rope_parameters, but their keys at the top level, and no layer_types."""
    shards: int = 1

    @property
    def channels(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def kinds(self) -> tuple[str, ...]:
        kind = ("full_attention", *["linear_attention"] * (self.interval - 1))
        return tuple(kind[(i + 1) % self.interval] for i in range(self.layers))


GEOMETRIES: dict[str, TargetGeometry] = {
    "0.8b": TargetGeometry(tied=True),
    "gqa2": TargetGeometry(kv_heads=2, value_heads=4, hidden=80, flat_rope=True),
    "4b": TargetGeometry(
        heads=8, kv_heads=2, value_heads=4, tied=True, prefix=PREFIXES[0], wrapper=True
    ),
    "27b": TargetGeometry(
        heads=12, kv_heads=2, value_heads=6, vocab=512, prefix=PREFIXES[0], wrapper=True
    ),
    "sharded": TargetGeometry(layers=8, heads=6, value_heads=4, shards=3),
    "nested": TargetGeometry(heads=2, prefix=PREFIXES[1], key_dim=64, value_dim=64),
    "seeing": TargetGeometry(
        tower=TowerGeometry(), wrapper=True, prefix=PREFIXES[0], kv_heads=2, value_heads=4
    ),
    "heads27b": TargetGeometry(
        heads=6, head_dim=256, rotary=64, key_heads=1, value_heads=3, key_dim=128, value_dim=128
    ),
}


@dataclass(frozen=True, kw_only=True)
class DrafterGeometry:
    """Sizes of a drafter; vocabulary and hidden size are the target's."""

    layer_types: tuple[str, ...] = ("sliding_attention", "full_attention")
    window: int = 32
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    intermediate: int = 96
    block: int = 16
    taps: tuple[int, ...] = (0, 1, 3)
    mask_token: int = 250
    second: bool = False
    """Whether it is a DFlash2 drafter: no layer is causal, and these sizes count."""
    conv: tuple[int, int] = (2, 16)
    """Taps; channels of a group."""
    rank: int = 16
    top_k: int = 16
    scale: float = 1
    softcap: float = 0


def nvfp4_quantise(w: Floats) -> tuple[Array, Array, np.float32]:
    """w [N, K] -> codes uint8 [N, K/2], block_scale float8_e4m3fn [N, K/16], scale2.

    Source: nvidia-modelopt NVFP4QTensor.quantize.
    """
    groups = w.astype(np.float32).reshape(len(w), -1, 16)
    amax = np.abs(groups).max(axis=2)
    scale2 = np.float32(amax.max()) / np.float32(6 * 448) or np.float32(1)
    scale = amax / (np.float32(6) * scale2)
    scale = np.clip(np.where(scale == 0, np.float32(1), scale), 2**-9, 448)
    block_scale = scale.astype(ml_dtypes.float8_e4m3fn)
    scaled = groups / (block_scale.astype(np.float32) * scale2)[:, :, None]
    # A tie goes to the even code: down at 0.25, 1.25, 2.5 and 5, up at 0.75, 1.75 and 3.5.
    code = np.searchsorted([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5], np.abs(scaled))
    code += np.isin(np.abs(scaled), [0.75, 1.75, 3.5])
    code = (code + 8 * (scaled < 0)).reshape(w.shape).astype(np.uint8)
    return code[:, 0::2] | code[:, 1::2] << 4, block_scale, scale2


def _encode(name: str, w: Floats, how: str) -> Iterator[tuple[str, Array]]:
    if how in ("modelopt", "compressed-tensors"):
        codes, block_scale, scale2 = nvfp4_quantise(w)
        packed = how == "compressed-tensors"
        yield f"{name}.weight{'_packed' * packed}", codes
        yield f"{name}.weight_scale", block_scale
        if packed:
            yield f"{name}.weight_global_scale", np.array([1 / scale2], np.float32)
            yield f"{name}.input_global_scale", np.array([77], np.float32)
        else:
            yield f"{name}.weight_scale_2", np.array(scale2, np.float32)
            yield f"{name}.input_scale", np.array(0.01, np.float32)
    elif how.startswith("fp8"):
        # Two linears have a scale per row, in the two shapes that exist: [N, 1] and [N].
        axis = 1 if name.endswith(("k_proj", "up_proj")) else None
        scale = np.abs(w).max(axis=axis, keepdims=axis is not None).astype(np.float32) / 448
        yield f"{name}.weight", (w / scale).clip(-448, 448).astype(DTYPES["F8_E4M3"])
        yield f"{name}.weight_scale", scale[:, 0] if name.endswith("up_proj") else scale
    else:
        yield f"{name}.weight", w.astype(DTYPES[how.upper()])


def _how(name: str, dialect: Dialect, mix: str = TargetGeometry.mix) -> str:
    if dialect in ("bf16", "f32", "f16"):
        return dialect
    if name.endswith(("in_proj_a", "in_proj_b")) and "in_proj_a" not in mix:
        return "bf16"
    if dialect == "mixed":
        kinds = (pair.split("=") for pair in mix.split())
        return next((how for part, how in kinds if part in name), "bf16")
    return "bf16" if name == "lm_head" and dialect != "modelopt" else dialect


def _plain(name: str, dialect: Dialect) -> np.dtype[Any]:
    """The type of a tensor that is never quantised. "mixed" stores A_log and dt_bias in F32."""
    if dialect in ("bf16", "f32", "f16"):
        return DTYPES[dialect.upper()]
    return DTYPES["F32" if dialect == "mixed" and name.endswith(("A_log", "dt_bias")) else "BF16"]


class _Draws:
    """Draws random tensors, call by call. A linear maps unit variance to variance `size`**2."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.linears: dict[str, Floats] = {}
        self.tensors: dict[str, Floats] = {}

    def linear(self, name: str, rows: int, columns: int, size: float = 1) -> None:
        w = self.rng.standard_normal((rows, columns), np.float32) * (size / columns**0.5)
        self.linears[name] = w.astype(np.float32)

    def around(self, name: str, centre: float, *shape: int, spread: float = 0.2) -> None:
        w = centre + spread * self.rng.standard_normal(shape, np.float32)
        self.tensors[name] = w.astype(np.float32)

    def mlp(self, stem: str, hidden: int, intermediate: int) -> None:
        self.linear(f"{stem}.gate_proj", intermediate, hidden)
        self.linear(f"{stem}.up_proj", intermediate, hidden)
        self.linear(f"{stem}.down_proj", hidden, intermediate)

    def attention(self, stem: str, hidden: int, g: Any, *, gate: int, centre: float) -> None:
        self.linear(f"{stem}.q_proj", gate * g.heads * g.head_dim, hidden)
        self.linear(f"{stem}.k_proj", g.kv_heads * g.head_dim, hidden)
        self.linear(f"{stem}.v_proj", g.kv_heads * g.head_dim, hidden)
        self.linear(f"{stem}.o_proj", hidden, g.heads * g.head_dim)
        self.around(f"{stem}.q_norm.weight", centre, g.head_dim)
        self.around(f"{stem}.k_norm.weight", centre, g.head_dim)

    def gdn(self, stem: str, g: TargetGeometry) -> None:
        heads, value = g.value_heads, g.value_heads * g.value_dim
        for part, n in (("qkv", g.channels), ("z", value), ("b", heads), ("a", heads)):
            self.linear(f"{stem}.in_proj_{part}", n, g.hidden)
        self.linear(f"{stem}.out_proj", g.hidden, value)
        # transformers draws conv from +-1/2 and A evenly from 0..16. With such an A nearly every
        # head forgets its state within a token, which hides errors: here log A is spread evenly.
        place = (np.arange(heads) + self.rng.random(heads)) / heads
        self.tensors[f"{stem}.A_log"] = np.log(0.01 * 1600**place).astype(np.float32)
        self.around(f"{stem}.dt_bias", 1, heads)
        conv = self.rng.uniform(-0.5, 0.5, (g.channels, 1, g.conv_kernel))
        self.tensors[f"{stem}.conv1d.weight"] = conv.astype(np.float32)
        self.around(f"{stem}.norm.weight", 1, g.value_dim)


def _target_draws(g: TargetGeometry, seed: int) -> _Draws:
    draws = _Draws(seed)
    # A tied head is 3 times as large as other linears: logits have a standard deviation of 3.
    draws.around("embed_tokens.weight", 0, g.vocab, g.hidden, spread=3 / g.hidden**0.5)
    draws.around("norm.weight", 0, g.hidden)
    for i, kind in enumerate(g.kinds):
        layer = f"layers.{i}"
        draws.around(f"{layer}.input_layernorm.weight", 0, g.hidden)
        draws.around(f"{layer}.post_attention_layernorm.weight", 0, g.hidden)
        draws.mlp(f"{layer}.mlp", g.hidden, g.intermediate)
        if kind == "full_attention":
            draws.attention(f"{layer}.self_attn", g.hidden, g, gate=2, centre=0)
        else:
            draws.gdn(f"{layer}.linear_attn", g)
    if not g.tied:
        draws.linear("lm_head", g.vocab, g.hidden, size=3)
    return draws


def _target_tensors(g: TargetGeometry, seed: int, dialect: Dialect) -> dict[str, Array]:
    draws = _target_draws(g, seed)
    out = {g.prefix + n: w.astype(_plain(n, dialect)) for n, w in draws.tensors.items()}
    for name, w in draws.linears.items():
        prefix = "" if name == "lm_head" else g.prefix
        out |= {prefix + part: t for part, t in _encode(name, w, _how(name, dialect, g.mix))}
    if g.wrapper:
        bf16 = DTYPES["BF16"]
        out["mtp.fc.weight"] = draws.rng.normal(size=(g.hidden, 2 * g.hidden)).astype(bf16)
    return out | (_mtp_tensors(g, seed, dialect) if g.mtp else {})


def _mtp_tensors(g: TargetGeometry, seed: int, dialect: Dialect) -> dict[str, Array]:
    """The MTP layer, which no dialect quantises."""
    draws, kind = _Draws(1000 + seed), dialect if dialect in ("f32", "f16") else "bf16"
    draws.linear("fc", g.hidden, 2 * g.hidden)
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        draws.around(f"{name}.weight", 0, g.hidden, spread=0.4)
    for name in ("input_layernorm", "post_attention_layernorm"):
        draws.around(f"layers.0.{name}.weight", 0, g.hidden)
    draws.mlp("layers.0.mlp", g.hidden, g.intermediate)
    # Sharp attention, so that a position off by one shows in the drafts.
    draws.attention("layers.0.self_attn", g.hidden, g, gate=2, centre=0.8)
    draws.linear("layers.0.self_attn.o_proj", g.hidden, g.heads * g.head_dim, size=3)
    tensors = draws.tensors | {f"{name}.weight": w for name, w in draws.linears.items()}
    return {f"mtp.{name}": w.astype(DTYPES[kind.upper()]) for name, w in tensors.items()}


def _named(g: TargetGeometry | DrafterGeometry) -> dict[str, object]:
    fields = asdict(g)
    pairs = [pair.split("=") for pair in KEYS.split()]
    return {key: fields[name] for key, name in pairs if name in fields}


def target_config(g: TargetGeometry) -> dict[str, object]:
    """The config.json of a target."""
    text = _named(g)
    text |= {"model_type": "qwen3_5_text", "hidden_act": "silu", "attention_bias": False}
    text |= {"attn_output_gate": True, "full_attention_interval": g.interval, "dtype": "bfloat16"}
    rope: dict[str, object] = {
        "rope_theta": g.rope_theta,
        "partial_rotary_factor": g.rotary / g.head_dim,
    }
    if g.flat_rope:
        text |= rope
    else:
        text |= {"layer_types": list(g.kinds), "output_gate_type": "swish"}
        pairs = g.rotary // 2
        sections = [pairs - pairs // 3 * 2, pairs // 3, pairs // 3]
        every = rope | ({"mrope_section": sections} if g.tower else {})
        text["rope_parameters"] = {"rope_type": "default", "mrope_interleaved": True, **every}
    if not g.wrapper:
        return {"architectures": ["Qwen3_5ForCausalLM"], **text}
    outer = {"model_type": "qwen3_5", "tie_word_embeddings": g.tied, "text_config": text}
    if g.tower is not None:
        outer |= {f"{name}_token_id": token for name, token in IMAGE_TOKENS.items()}
        outer["vision_config"] = _vision_config(g, g.tower)
    return {"architectures": ["Qwen3_5ForConditionalGeneration"], "vision_config": {}, **outer}


def _vision_config(g: TargetGeometry, t: TowerGeometry) -> dict[str, object]:
    return {
        "model_type": "qwen3_5",
        "depth": t.depth,
        "hidden_size": t.hidden,
        "num_heads": t.heads,
        "intermediate_size": t.intermediate,
        "num_position_embeddings": t.positions**2,
        "out_hidden_size": g.hidden,
        "hidden_act": "gelu_pytorch_tanh",
        "in_channels": 3,
        "patch_size": 16,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
        "deepstack_visual_indexes": [],
    }


def write_tower(
    directory: Path, g: TargetGeometry, t: TowerGeometry, seed: int, dtype: str = "BF16"
) -> None:
    """Adds a vision tower to a target's directory, and its preprocessor_config.json."""
    draws = _Draws(seed)
    draws.around("patch_embed.proj.weight", 0, t.hidden, 3, 2, 16, 16, spread=1536**-0.5)
    draws.around("patch_embed.proj.bias", 0, t.hidden)
    draws.around("pos_embed.weight", 0, t.positions**2, t.hidden, spread=0.5)
    linears = {"merger.linear_fc1": (4 * t.hidden, 4 * t.hidden)}
    linears["merger.linear_fc2"] = g.hidden, 4 * t.hidden
    for i in range(t.depth):
        block = f"blocks.{i}"
        linears |= {f"{block}.attn.qkv": (3 * t.hidden, t.hidden)}
        linears |= {f"{block}.attn.proj": (t.hidden, t.hidden)}
        linears |= {f"{block}.mlp.linear_fc1": (t.intermediate, t.hidden)}
        linears |= {f"{block}.mlp.linear_fc2": (t.hidden, t.intermediate)}
        for norm in (f"{block}.norm1", f"{block}.norm2"):
            draws.around(f"{norm}.weight", 1, t.hidden)
            draws.around(f"{norm}.bias", 0, t.hidden)
    draws.around("merger.norm.weight", 1, t.hidden)
    draws.around("merger.norm.bias", 0, t.hidden)
    for name, (rows, columns) in linears.items():
        draws.linear(name, rows, columns, size=2)
        draws.around(f"{name}.bias", 0, rows)
    tensors = {f"{name}.weight": w for name, w in draws.linears.items()} | draws.tensors
    stored = {f"model.visual.{name}": w.astype(DTYPES[dtype]) for name, w in tensors.items()}
    write_safetensors(directory / "model_visual.safetensors", stored)
    size = {"shortest_edge": t.shortest, "longest_edge": t.longest}
    processor = {
        "size": size,
        "patch_size": 16,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }
    (directory / "preprocessor_config.json").write_text(json.dumps(processor))


def write_target(
    directory: Path, geometry: TargetGeometry, seed: int, dialect: Dialect = "bf16"
) -> Path:
    """Writes a target checkpoint and returns its directory."""
    directory.mkdir(parents=True, exist_ok=True)
    write_config(directory, target_config(geometry))
    if geometry.tower is not None:
        dtype = dialect.upper() if dialect in ("bf16", "f32", "f16") else "BF16"
        write_tower(directory, geometry, geometry.tower, seed, dtype)
    tensors = _target_tensors(geometry, seed, dialect)
    if geometry.shards == 1:
        write_safetensors(directory / "model.safetensors", tensors)
        return directory
    places: dict[str, str] = {}
    for i in range(geometry.shards):
        file = f"model-{i + 1:05}-of-{geometry.shards:05}.safetensors"
        part = {n: tensors[n] for n in list(tensors)[i :: geometry.shards]}
        write_safetensors(directory / file, part)
        places |= dict.fromkeys(part, file)
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return directory


def write_drafter(
    directory: Path,
    target: TargetGeometry,
    drafter: DrafterGeometry,
    seed: int,
    dialect: Dialect = "bf16",
) -> Path:
    """Writes a DFlash drafter for a target of that geometry and returns its directory."""
    directory.mkdir(parents=True, exist_ok=True)
    g, hidden, draws = drafter, target.hidden, _Draws(seed)
    draws.linear("fc", hidden, len(g.taps) * hidden)
    for name in ("hidden_norm.weight", "norm.weight"):
        draws.around(name, 1, hidden)
    for i in range(len(g.layer_types)):
        layer = f"layers.{i}"
        draws.around(f"{layer}.input_layernorm.weight", 1, hidden)
        draws.around(f"{layer}.post_attention_layernorm.weight", 1, hidden)
        draws.attention(f"{layer}.self_attn", hidden, g, gate=1, centre=1)
        draws.mlp(f"{layer}.mlp", hidden, g.intermediate)
    if g.second:
        _second_draws(draws, target, g)
    tensors = {name: w.astype(_plain(name, dialect)) for name, w in draws.tensors.items()}
    for name, w in draws.linears.items():
        tensors |= dict(_encode(name, w, _how(name, dialect)))
    write_safetensors(directory / "model.safetensors", tensors)
    write_config(directory, _drafter_config(target, drafter))
    return directory


def _second_draws(draws: _Draws, target: TargetGeometry, g: DrafterGeometry) -> None:
    """Kernels far from the identity; edges of the selector as large as the logits."""
    (taps, group), hidden = g.conv, target.hidden
    for stem in (f"layers.{i}.{n}_conv" for i in range(len(g.layer_types)) for n in ATTENTION_MLP):
        draws.linear(f"{stem}.kernel_projection", 2 * taps * (hidden // group), hidden, size=0.5)
        draws.around(f"{stem}.base_kernel", 0, 2, taps, hidden, spread=0.7)
    stem = "candidate_selector"
    draws.linear(f"{stem}.hidden_projection", g.rank, hidden)
    for name in ("predecessor", "successor"):
        spread = 1.7 / g.rank**0.25
        draws.around(f"{stem}.{name}_codebook", 0, target.vocab, g.rank, spread=spread)


def _drafter_config(target: TargetGeometry, g: DrafterGeometry) -> dict[str, object]:
    flash = {"mask_token_id": g.mask_token, "target_layer_ids": list(g.taps), "block_size": g.block}
    config = _named(target) | _named(g)
    config = {key: value for key, value in config.items() if not key.startswith("linear_")}
    config |= {"architectures": ["DFlashDraftModel"], "model_type": "qwen3", "hidden_act": "silu"}
    config |= {"num_hidden_layers": len(g.layer_types), "num_target_layers": target.layers}
    config |= {"layer_types": list(g.layer_types), "rope_theta": target.rope_theta}
    sliding = "sliding_attention" in g.layer_types
    config |= {"use_sliding_window": sliding, "sliding_window": g.window if sliding else None}
    if g.second:
        flash |= {"conv_kernel_size": g.conv[0], "conv_group_size": g.conv[1]}
        flash |= {"selector_rank": g.rank, "selector_top_k": g.top_k}
        flash |= {"output_multiplier": g.scale, "final_logit_softcapping": g.softcap or None}
        config |= {"architectures": ["DFlash2DraftModel"], "is_causal": False}
    return config | {"tie_word_embeddings": False, "dflash_config": flash}


def write_config(directory: Path, config: Mapping[str, object]) -> None:
    (directory / "config.json").write_text(json.dumps(config, indent=1))


def read_config(directory: Path) -> dict[str, Any]:
    return dict(json.loads((directory / "config.json").read_text()))


def edit(directory: Path, *changes: tuple[str, object]) -> Path:
    """Sets values of dotted keys of config.json; removes those whose value is ABSENT."""
    config = read_config(directory)
    for key, value in changes:
        *path, last = key.split(".")
        inner: dict[str, Any] = config
        for part in path:
            inner = inner[part]
        inner[last] = value
        if value is ABSENT:
            del inner[last]
    write_config(directory, config)
    return directory


def write_safetensors(file: Path, tensors: Mapping[str, Array]) -> None:
    """Writes one safetensors file, ml_dtypes' types included, in the order of `tensors`."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, t in tensors.items():
        entry = {"dtype": DTYPE_NAMES[t.dtype], "shape": list(t.shape)}
        header[name] = {**entry, "data_offsets": [at, at + t.nbytes]}
        at += t.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    parts = [np.ascontiguousarray(t).tobytes() for t in tensors.values()]
    file.write_bytes(b"".join([len(text).to_bytes(8, "little"), text, *parts]))


def write_hollow(file: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Writes one safetensors file of BF16 tensors without content, which takes no space."""
    header: dict[str, object] = {}
    at = 0
    for name, shape in shapes.items():
        end = at + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        stream.truncate(8 + len(text) + at)


def read_safetensors(file: Path) -> dict[str, Array]:
    """Reads one safetensors file whole."""
    return {
        name: np.frombuffer(entry["data"], DTYPES[entry["dtype"]]).reshape(entry["shape"])
        for name, entry in safetensors.deserialize(file.read_bytes())
    }


def change_tensors(directory: Path, change: Callable[[dict[str, Array]], object]) -> None:
    """Rewrites `model.safetensors` after `change` has edited its tensors."""
    file = directory / "model.safetensors"
    tensors = read_safetensors(file)
    change(tensors)
    write_safetensors(file, tensors)


def dequantised(directory: Path) -> dict[str, Floats]:
    """The weights of a written checkpoint in float32, under the names of its text-only HF class.

    A target's are those of Qwen3_5ForCausalLM ("model.layers...", "lm_head.weight", the latter
    also where tied), without vision and MTP. A drafter's have no prefix.
    """
    stored: dict[str, Array] = {}
    for file in sorted(directory.glob("*.safetensors")):
        stored |= read_safetensors(file)
    out: dict[str, Floats] = {}
    for name, t in stored.items():
        stem, _, part = name.rpartition(".")
        hf = re.sub(r"^(model\.language_model|language_model\.model)\.", "model.", stem)
        if part in ("weight", "weight_packed"):
            out[f"{hf}.weight"] = _decode(stored, stem, t)
        elif part in ("A_log", "dt_bias", "base_kernel") or part.endswith("_codebook"):
            out[f"{hf}.{part}"] = t.astype(np.float32)
    if "model.embed_tokens.weight" in out:
        out.setdefault("lm_head.weight", out["model.embed_tokens.weight"])
    return {name: w for name, w in out.items() if not name.startswith(("mtp.", "model.visual."))}


def _decode(stored: Mapping[str, Array], stem: str, t: Array) -> Array:
    if t.dtype == np.uint8:
        code = np.stack([t & 15, t >> 4], axis=2).reshape(len(t), -1)
        value: Array = E2M1[code & 7] * np.where(code < 8, np.float32(1), np.float32(-1))
        scale = np.repeat(stored[f"{stem}.weight_scale"].astype(np.float32), 16, axis=1)
        if f"{stem}.weight_scale_2" in stored:
            return value * scale * stored[f"{stem}.weight_scale_2"]
        return value * scale * (np.float32(1) / stored[f"{stem}.weight_global_scale"])
    w = t.astype(np.float32)
    if f"{stem}.weight_scale" not in stored:
        return w
    scale = stored[f"{stem}.weight_scale"]
    return w * (scale[:, None] if scale.ndim == 1 and scale.size > 1 else scale)
