"""A DFlash or DFlash2 drafter in plain numpy float64, to test the project's own.

Written from the published forward pass alone, one block at a time and without a cache: the keys and
values of all context rows are computed again for each block. Imports nothing of thor_dflash.

Dimensions: P context rows, R block rows, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Weights = Mapping[str, NDArray[Any]]


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What a drafter's config.json says. With one field replaced, the drafter is wrong in that way,
    which a test must notice.
    """

    block: int
    mask_token: int
    heads: int
    kv_heads: int
    head_dim: int
    causal: tuple[bool, ...]
    """Per layer: whether slot i of the block sees slots 0..i only."""
    windows: tuple[int | None, ...]
    """Per layer: a query sees keys at distances below this; None: at any distance."""
    theta: float
    eps: float
    norm_offset: float = 0.0
    """Added to every norm's weight: 0 in a drafter, 1 in the target, whose weights are around 0."""
    context_input_norm: bool = False
    """Whether context rows, too, go through a layer's input norm. In DFlash they do not."""
    conv: tuple[int, int] | None = None
    """DFlash2: taps, and channels of a group."""
    top_k: int = 0
    scale: float = 1.0
    softcap: float = 0.0
    wrong: str = ""
    """An error of other implementations of DFlash2: see `_kernels`, `_conv` and `walk`."""


def rules(config: Mapping[str, Any]) -> Rules:
    """Read a drafter's config.json."""
    flash = config["dflash_config"]
    sliding = [kind == "sliding_attention" for kind in config["layer_types"]]
    # Unless the config says, sliding layers are causal inside the block and full ones are not.
    flag = config.get("is_causal", flash.get("causal"))
    rope = config.get("rope_parameters", config)
    return Rules(
        block=config.get("block_size", flash.get("block_size")),
        mask_token=flash["mask_token_id"],
        heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        causal=tuple(s if flag is None else flag for s in sliding),
        windows=tuple(config["sliding_window"] if s else None for s in sliding),
        theta=rope["rope_theta"],
        eps=config["rms_norm_eps"],
        conv=(flash["conv_kernel_size"], flash["conv_group_size"]) if _second(config) else None,
        top_k=flash.get("selector_top_k", 0),
        scale=flash.get("output_multiplier") or 1.0,
        softcap=flash.get("final_logit_softcapping") or 0.0,
    )


def _second(config: Mapping[str, Any]) -> bool:
    return bool(config["architectures"] == ["DFlash2DraftModel"])


def logits(
    r: Rules, w: Weights, embedding: NDArray[Any], head: NDArray[Any], taps: NDArray[Any], last: int
) -> Floats:
    """Returns the logits [R, V] of each slot of the block; see `outputs`."""
    out: Floats = outputs(r, w, embedding, taps, last) @ head.astype(np.float64).T
    return out


def outputs(r: Rules, w: Weights, embedding: NDArray[Any], taps: NDArray[Any], last: int) -> Floats:
    """Returns the normed rows [R, H], which the head reads, of the block [last, mask, mask, ...].

    `w` are the drafter's tensors by checkpoint name, `embedding` the target's [V, H],
    `taps` [P, taps * H] the tapped rows of positions 0..P-1; `last` is at position P.
    """
    context = _norm(r, taps.astype(np.float64) @ _of(w, "fc").T, _of(w, "hidden_norm"))
    ids = [last, *[r.mask_token] * (r.block - 1)]
    x = embedding[ids].astype(np.float64)
    for i in range(len(r.causal)):
        layer = f"layers.{i}"
        y = _norm(r, x, _of(w, f"{layer}.input_layernorm"))
        before, behind = _kernels(r, w, f"{layer}.attention_conv", y)
        x = x + _conv(r, _attention(r, w, i, _conv(r, y, before), context), behind)
        y = _norm(r, x, _of(w, f"{layer}.post_attention_layernorm"))
        before, behind = _kernels(r, w, f"{layer}.mlp_conv", y)
        x = x + _conv(r, _mlp(w, layer, _conv(r, y, before)), behind)
    return _norm(r, x, _of(w, "norm"))


def _mlp(w: Weights, layer: str, y: Floats) -> Floats:
    gate, up = (y @ _of(w, f"{layer}.mlp.{n}_proj").T for n in ("gate", "up"))
    out: Floats = (gate / (1 + np.exp(-gate)) * up) @ _of(w, f"{layer}.mlp.down_proj").T
    return out


def _kernels(r: Rules, w: Weights, stem: str, y: Floats) -> tuple[Floats | None, Floats | None]:
    """Returns the kernels [R, taps, H] of both sides of a sublayer, from its normed input `y`."""
    if r.conv is None:
        return None, None
    taps, group = r.conv
    made = y @ _of(w, f"{stem}.kernel_projection").T
    groups = made.reshape(len(y), 2, taps, -1)
    if r.wrong == "groups and taps exchanged":
        groups = made.reshape(len(y), 2, -1, taps).swapaxes(2, 3)
    base = w[f"{stem}.base_kernel"].astype(np.float64)
    kernels = base + np.repeat(groups, group, axis=3)
    if r.wrong == "taps exchanged":
        kernels = kernels[:, :, ::-1]
    if r.wrong == "kernel of the row before":
        kernels[1:, :, 1] = kernels[:-1, :, 1]
    before, behind = kernels[:, 0], kernels[:, 1]
    return (behind, before) if r.wrong == "sides exchanged" else (before, behind)


def _conv(r: Rules, x: Floats, kernel: Floats | None) -> Floats:
    """Row t of the result mixes rows t, t - 1, ... of the block; nothing comes before row 0."""
    if kernel is None:
        return x
    out = kernel[:, 0] * x
    for tap in range(1, kernel.shape[1]):
        earlier = np.roll(x, tap, axis=0)
        if r.wrong != "row 0 sees the last row":
            earlier[:tap] = 0
        out = out + kernel[:, tap] * earlier
    return np.asarray(out, np.float64)


def walk(
    r: Rules,
    w: Weights,
    out: Floats,
    head: NDArray[Any],
    last: int,
    forced: Mapping[int, int] = MappingProxyType({}),
    ids: NDArray[Any] | None = None,
) -> tuple[list[int], float]:
    """Returns the drafts of DFlash2, slot 1 on, and the smallest lead of a choice over the next
    score or of a candidate over the best logit that is none.

    `out` as `outputs` makes it; `forced` slot -> id; `ids` those that may be drafted, None for all.
    """
    stem, lead, path = "candidate_selector", np.inf, [last]
    a, b = (w[f"{stem}.{n}_codebook"].astype(np.float64) for n in ("predecessor", "successor"))
    if r.wrong == "codebooks exchanged":
        a, b = b, a
    hidden = out @ _of(w, f"{stem}.hidden_projection").T
    allowed = np.arange(len(head)) if ids is None else ids
    for slot in range(1, len(out)):
        raw = head[allowed].astype(np.float64) @ out[slot]
        order = np.argsort(-raw, kind="stable")
        picked, rest = order[: r.top_k], order[r.top_k :]
        unary = raw[picked] * (1 if r.wrong == "multiplier ignored" else r.scale)
        if r.softcap:
            unary = r.softcap * np.tanh(unary / r.softcap)
        before = last if r.wrong == "always after the last" else path[-1]
        at = slot - 1 if r.wrong == "hidden of the row before" else slot
        score = unary + b[allowed[picked]] @ (a[before] * hidden[at])
        if r.wrong == "edges ignored":
            score = unary
        path.append(forced.get(slot, int(allowed[picked[score.argmax()]])))
        if slot not in forced:
            ranked = np.sort(score)[::-1]
            lead = min(lead, *(ranked[:1] - ranked[1:2]), *(raw[picked[-1:]] - raw[rest[:1]]))
    return path[1:], float(lead)


def _of(w: Weights, name: str) -> Floats:
    return w[f"{name}.weight"].astype(np.float64)


def _norm(r: Rules, x: Floats, weight: Floats) -> Floats:
    out: Floats = x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + r.eps)
    return out * (weight + r.norm_offset)


def _attention(r: Rules, w: Weights, i: int, own: Floats, context: Floats) -> Floats:
    """Returns the attention of layer i of the block's rows, which are normed."""
    if r.context_input_norm:
        context = _norm(r, context, _of(w, f"layers.{i}.input_layernorm"))
    layer, start = f"layers.{i}.self_attn", len(context)
    seen_from = np.concatenate([context, own])
    at = np.arange(len(seen_from))
    q = _heads(r, own @ _of(w, f"{layer}.q_proj").T)
    k = _heads(r, seen_from @ _of(w, f"{layer}.k_proj").T)
    v = _heads(r, seen_from @ _of(w, f"{layer}.v_proj").T)
    q = _turn(r, _norm(r, q, _of(w, f"{layer}.q_norm")), at[start:])
    k = _turn(r, _norm(r, k, _of(w, f"{layer}.k_norm")), at)
    group = r.heads // r.kv_heads
    rows = np.empty_like(q)
    for t, h in np.ndindex(rows.shape[:2]):
        rows[t, h] = _look(r, i, q[t, h], k[:, h // group], v[:, h // group], start + t)
    return rows.reshape(len(own), -1) @ _of(w, f"{layer}.o_proj").T


def _heads(r: Rules, x: Floats) -> Floats:
    return x.reshape(len(x), -1, r.head_dim)


def _turn(r: Rules, x: Floats, at: NDArray[np.int64]) -> Floats:
    """Rotary position embedding over the whole head; dimension j is paired with j + D / 2."""
    half = r.head_dim // 2
    angle = at[:, None, None] * r.theta ** -(np.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    return np.concatenate(
        [a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], axis=-1
    )


def _look(r: Rules, i: int, q: Floats, k: Floats, v: Floats, at: int) -> Floats:
    """Returns the attention of one query of one head, at position `at`, over the keys it sees."""
    distance = at - np.arange(len(k))
    seen = np.ones(len(k), bool)
    if r.causal[i]:
        seen &= distance >= 0
    window = r.windows[i]
    if window is not None:
        seen &= np.abs(distance) < window
    score = k[seen] @ q / np.sqrt(r.head_dim)
    weight = np.exp(score - score.max())
    out: Floats = weight @ v[seen] / weight.sum()
    return out
