"""Greedy generation for many prompts at once, one token per step. With a GPU, a step is one CUDA
graph.

Dimensions: B prompts, T longest length. Every row is at the same position; a row still inside its
prompt takes the prompt's next token instead of the generated one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from thor_dflash.calib.nano.dims import NanoTargetDims
from thor_dflash.calib.nano.target import Attention, Gdn, NanoTarget, norm1
from thor_dflash.calib.nano.vision import ImageRows, replaced

GRAPH_WARMUP = 3
CHECK_EVERY = 32
"""Steps between checks whether all rows have ended."""


@dataclass
class RolloutState:
    """The tensors that a step reads and writes, at fixed addresses for the CUDA graph."""

    ids: Tensor
    """[B, T] prompts, then generated tokens."""
    prompt: Tensor
    """[B] prompt lengths."""
    at: Tensor
    """[1] position of the newest token."""
    ended: Tensor
    """[B] whether an end token was generated."""
    caches: list[tuple[Tensor, Tensor]]
    """Per layer: (K, V) [B, Hkv, T, 256], or (conv tail [B, 3, channels], F32 state [B, Hv, 128,
    128]).
    """
    images: RolloutImages | None


@dataclass(frozen=True)
class RolloutImages:
    """The images of prompts."""

    rows: ImageRows
    """Its slots are [B, T]."""
    turn: Tensor
    """[B, T, 3] positions by which heads turn."""


def rollout(
    model: NanoTarget,
    prompts: list[list[int]],
    longest: int,
    usable: int,
    ends: tuple[int, ...],
    images: RolloutImages | None = None,
) -> list[list[int]]:
    """Return greedy continuations, end token included. Only the first ``usable`` ids are chosen,
    never padded rows of the vocabulary.

    The model's weights are used as they are; nothing is quantised here.
    """
    device = model.embed_tokens.weight.device
    state = _start(model.dims, prompts, longest, device, images)
    stops = torch.tensor(ends, device=device)

    def step() -> None:
        _step(model, state, usable, stops)

    with (
        torch.no_grad(),
        torch.autocast(
            device.type, torch.bfloat16, enabled=device.type == "cuda", cache_enabled=False
        ),
    ):
        replay = CapturedStep(step, state) if device.type == "cuda" else step
        for number in range(longest - 1):
            replay()
            if number % CHECK_EVERY == CHECK_EVERY - 1 and bool(state.ended.all()):
                break
    return _cut(state, ends)


def _start(
    dims: NanoTargetDims,
    prompts: list[list[int]],
    longest: int,
    device: torch.device,
    images: RolloutImages | None,
) -> RolloutState:
    batch = len(prompts)
    ids = torch.zeros(batch, longest, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = torch.tensor(prompt)
    kept = torch.bfloat16 if device.type == "cuda" else torch.float32
    caches: list[tuple[Tensor, Tensor]] = []
    for layer in range(dims.layers):
        if dims.is_full(layer):
            shape = (batch, dims.kv_heads, longest, dims.head_dim)
            caches.append(
                (
                    torch.zeros(shape, device=device, dtype=kept),
                    torch.zeros(shape, device=device, dtype=kept),
                )
            )
        else:
            tail = torch.zeros(batch, dims.conv - 1, dims.conv_channels, device=device, dtype=kept)
            states = torch.zeros(batch, dims.gdn_v_heads, dims.gdn_dim, dims.gdn_dim, device=device)
            caches.append((tail, states))
    lengths = torch.tensor([len(p) for p in prompts], device=device)
    at = torch.zeros(1, dtype=torch.long, device=device)
    ended = torch.zeros(batch, dtype=torch.bool, device=device)
    return RolloutState(ids.to(device), lengths, at, ended, caches, images)


def _step(model: NanoTarget, state: RolloutState, usable: int, stops: Tensor) -> None:
    x, turn = model.embed(state.ids.index_select(1, state.at)), state.at.expand(len(state.ids), 1)
    if state.images is not None:
        rows, turn = state.images.rows, state.images.turn.index_select(1, state.at)
        x = replaced(x, ImageRows(rows.slot.index_select(1, state.at), rows.values))
    for layer, cache in zip(model.layers, state.caches, strict=True):
        h = norm1(x, layer.input_layernorm.weight, layer.eps)
        mixed = (
            _attention(layer.self_attn, h, state.at, turn, cache)
            if layer.full
            else _gdn(layer.linear_attn, h, cache)
        )
        x = x + mixed
        x = x + layer.mlp(norm1(x, layer.post_attention_layernorm.weight, layer.eps), False)
    scores = model.logits(norm1(x, model.norm.weight, model.dims.eps))[:, 0, :usable]
    following = (state.at + 1).clamp(max=state.ids.shape[1] - 1)
    given = state.ids.index_select(1, following)[:, 0]
    own = following >= state.prompt
    token = torch.where(own, scores.argmax(-1), given)
    state.ids.index_copy_(1, following, token[:, None])
    state.ended.logical_or_(own & torch.isin(token, stops))
    state.at.copy_(following)


def _attention(
    layer: Attention, h: Tensor, at: Tensor, turn: Tensor, cache: tuple[Tensor, Tensor]
) -> Tensor:
    keys, values = cache
    q, gate, k, v = layer.project(h, turn, False)
    keys.index_copy_(2, at, k.to(keys.dtype))
    values.index_copy_(2, at, v.to(values.dtype))
    seen = (torch.arange(keys.shape[2], device=at.device) <= at)[None, None, None]
    d = layer.dims
    grouped = q.view(q.shape[0], d.kv_heads, -1, d.head_dim)
    out = F.scaled_dot_product_attention(
        grouped, keys.to(q.dtype), values.to(q.dtype), attn_mask=seen
    )
    gated = out.reshape(q.shape) * torch.sigmoid(gate)
    return F.linear(gated.transpose(1, 2).flatten(2), layer.o_proj.weight)


def _gdn(layer: Gdn, h: Tensor, cache: tuple[Tensor, Tensor]) -> Tensor:
    tail, state = cache
    d = layer.dims
    raw = F.linear(h, layer.in_proj_qkv.weight)
    window = torch.cat([tail, raw.to(tail.dtype)], dim=1)
    mixed = (window * layer.conv1d.weight[:, 0].T.to(window.dtype)).sum(1, keepdim=True)
    q, k, v = (u[:, :, 0] for u in layer.heads(F.silu(mixed)))
    g, beta = (u[:, 0] for u in layer.gates(h))
    with torch.autocast(h.device.type, enabled=False):
        flat = state.flatten(0, 1)
        flat.mul_(g.exp().flatten()[:, None, None])
        q, k, v = (u.flatten(0, 1)[:, None] for u in (q, k, v))
        error = beta.flatten()[:, None, None] * (v - k @ flat)
        flat.baddbmm_(k.mT, error)
        o = (q @ flat).view(*beta.shape, d.gdn_dim)
    tail.copy_(window[:, 1:])
    z = F.linear(h, layer.in_proj_z.weight).unflatten(-1, (d.gdn_v_heads, d.gdn_dim))
    return layer.gated_out(o[:, None], z, h.dtype, False)


class CapturedStep:
    """A step as a CUDA graph; changes by the warm-up are undone before the first replay."""

    def __init__(self, step: Callable[[], None], state: RolloutState) -> None:
        first = state.ids.clone()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(GRAPH_WARMUP):
                step()
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            step()
        state.ids.copy_(first)
        for tensor in (state.at, state.ended, *(t for pair in state.caches for t in pair)):
            tensor.zero_()

    def __call__(self) -> None:
        """Run the captured step once."""
        self.graph.replay()


def _cut(state: RolloutState, ends: tuple[int, ...]) -> list[list[int]]:
    found: list[list[int]] = []
    for row, length in zip(state.ids.tolist(), state.prompt.tolist(), strict=True):
        made = row[length:]
        stop = next((i for i, token in enumerate(made) if token in ends), len(made) - 1)
        found.append(made[: stop + 1])
    return found
