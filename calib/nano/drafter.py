"""The DFlash drafter in torch, for training on many anchors of packed rows at once.

Dimensions: B packed rows, T tokens, N anchors per row, 16 block rows (8 of DFlash2), D hidden.
Sliding layers are causal inside the block, the last layer is not, nor any of DFlash2. Norms
multiply by w (not 1 + w). Source: spec of the drafter; the forward pass of z-lab's
``DFlashDraftModel``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thor_dflash.calib.nano.dflash2 import CandidateSelector, DraftConv
from thor_dflash.calib.nano.dims import VOCAB, NanoDrafterDims
from thor_dflash.calib.nano.target import Mlp, Norm, linear, rope, shared


@dataclass(frozen=True)
class Blocks:
    """The block rows, their positions, and what each query may see."""

    ids: Tensor
    """[B, N * 16] anchor token, then masks."""
    pos: Tensor
    """[B, N * 16] positions inside the document."""
    sliding: Tensor
    """[B, 1, N * 16, T + N * 16] True where a query may see a key, in sliding layers."""
    full: Tensor
    """The same for the full layer."""


def blocks(
    dims: NanoDrafterDims,
    ids: Tensor,
    pos: Tensor,
    anchors: Tensor,
    mask_id: int,
    unseen: Tensor | None = None,
) -> Blocks:
    """Make the blocks of anchors [B, N] (indices into the packed rows). A block's context is all
    tokens of its document before its anchor, but those that are `unseen` [B, T].
    """
    batch, count = anchors.shape
    size, device = dims.block, ids.device
    time = torch.arange(ids.shape[1], device=device)
    doc = (pos == 0).cumsum(1)
    block_ids = torch.full((batch, count, size), mask_id, device=device, dtype=torch.long)
    block_ids[:, :, 0] = ids.gather(1, anchors)
    row = torch.arange(size, device=device)
    at = (pos.gather(1, anchors)[:, :, None] + row).flatten(1)
    owner = torch.arange(count, device=device).repeat_interleave(size)
    anchor = anchors.repeat_interleave(size, 1)
    past = (doc.gather(1, anchor)[:, :, None] == doc[:, None, :]) & (time < anchor[:, :, None])
    if unseen is not None:
        past = past & ~unseen[:, None, :]
    near = at[:, :, None] - pos[:, None, :] < dims.window
    same = owner[:, None] == owner[None, :]
    slot = row.repeat(count)
    causal = same if dims.second else same & (slot[:, None] >= slot[None, :])
    sliding = torch.cat([past & near, causal.expand(batch, -1, -1)], dim=-1)
    full = torch.cat([past, same.expand(batch, -1, -1)], dim=-1)
    return Blocks(block_ids.flatten(1), at, sliding[:, None], full[:, None])


def norm0(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Plain RMS norm: x / rms(x) * w, computed in F32, returned in x's dtype."""
    y = x.float()
    return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


class DraftAttention(nn.Module):
    """Attention of block rows to context K/V and to their own block."""

    def __init__(self, dims: NanoDrafterDims) -> None:
        super().__init__()
        self.dims = dims
        self.q_proj = linear(dims.q_heads * dims.head_dim, dims.hidden)
        self.k_proj = linear(dims.kv_heads * dims.head_dim, dims.hidden)
        self.v_proj = linear(dims.kv_heads * dims.head_dim, dims.hidden)
        self.o_proj = linear(dims.hidden, dims.q_heads * dims.head_dim)
        self.q_norm = Norm(dims.head_dim, start=1.0)
        self.k_norm = Norm(dims.head_dim, start=1.0)

    def forward(
        self, x: Tensor, context: Tensor, pos: Tensor, at: Tensor, mask: Tensor, quant: bool
    ) -> Tensor:
        """x [B, N * 16, D] block rows at positions ``at``, context [B, T, D] at ``pos``."""
        d = self.dims
        wq, wk, wv = shared(quant, self.q_proj, self.k_proj, self.v_proj)
        both = torch.cat([context.to(x.dtype), x], dim=1)
        places = torch.cat([pos, at], dim=1)
        q, k, v = (
            F.linear(u, w).unflatten(-1, (-1, d.head_dim)).transpose(1, 2)
            for u, w in ((x, wq), (both, wk), (both, wv))
        )
        q = rope(norm0(q, self.q_norm.weight, d.eps), at, d.head_dim, d.theta)
        k = rope(norm0(k, self.k_norm.weight, d.eps), places, d.head_dim, d.theta)
        ratio = d.q_heads // d.kv_heads
        k, v = k.repeat_interleave(ratio, 1), v.repeat_interleave(ratio, 1)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        (wo,) = shared(quant, self.o_proj)
        return F.linear(out.transpose(1, 2).flatten(2), wo)


class DraftLayer(nn.Module):
    """Pre-norm layer of the drafter."""

    def __init__(self, dims: NanoDrafterDims) -> None:
        super().__init__()
        self.eps = dims.eps
        self.attention_conv = DraftConv(dims) if dims.second else None
        self.mlp_conv = DraftConv(dims) if dims.second else None
        self.self_attn = DraftAttention(dims)
        self.mlp = Mlp(dims.hidden, dims.intermediate)
        self.input_layernorm = Norm(dims.hidden, start=1.0)
        self.post_attention_layernorm = Norm(dims.hidden, start=1.0)

    def forward(
        self, x: Tensor, context: Tensor, pos: Tensor, at: Tensor, mask: Tensor, quant: bool
    ) -> Tensor:
        """Block rows [B, N * 16, D] before -> after the layer."""
        h = norm0(x, self.input_layernorm.weight, self.eps)
        if self.attention_conv is None or self.mlp_conv is None:
            x = x + self.self_attn(h, context, pos, at, mask, quant)
            return x + self.mlp(norm0(x, self.post_attention_layernorm.weight, self.eps), quant)
        conv = self.attention_conv
        before, behind = conv.kernels(h)
        x = x + conv(self.self_attn(conv(h, before), context, pos, at, mask, quant), behind)
        h, conv = norm0(x, self.post_attention_layernorm.weight, self.eps), self.mlp_conv
        before, behind = conv.kernels(h)
        return x + conv(self.mlp(conv(h, before), quant), behind)


class NanoDrafter(nn.Module):
    """The drafter without embedding and head: it uses the target's."""

    def __init__(self, dims: NanoDrafterDims) -> None:
        super().__init__()
        self.dims = dims
        self.fc = linear(dims.hidden, dims.taps * dims.hidden)
        self.hidden_norm = Norm(dims.hidden, start=1.0)
        self.layers = nn.ModuleList(DraftLayer(dims) for _ in range(dims.layers))
        self.norm = Norm(dims.hidden, start=1.0)
        self.candidate_selector = CandidateSelector(dims, VOCAB) if dims.second else None

    def forward(
        self, table: Tensor, taps: Tensor, pos: Tensor, rows: Blocks, quant: bool
    ) -> Tensor:
        """Return normed block rows [B, N * 16, D]. ``table`` is the target's embedding; taps are
        [B, T, 3 * D].
        """
        (fc,) = shared(quant, self.fc)
        context = norm0(F.linear(taps, fc), self.hidden_norm.weight, self.dims.eps)
        x = F.embedding(rows.ids, table)
        last = len(self.layers) - 1
        for index, layer in enumerate(self.layers):
            full = index == last and not self.dims.second
            mask = rows.full if full else rows.sliding
            x = layer(x, context, pos, rows.pos, mask, quant)
        return norm0(x, self.norm.weight, self.dims.eps)


@dataclass(frozen=True)
class ContextRows:
    """Packed rows that a drafter learns from."""

    ids: Tensor
    """[B, T]."""
    pos: Tensor
    """[B, T] positions inside the document."""
    answer: Tensor
    """[B, T] True where a draft may start."""
    taps: Tensor
    """[B, T, 3 * D] of the target."""


def draw_anchors(answer: Tensor, count: int) -> Tensor:
    """Draw indices [B, N] of packed rows where a draft may start."""
    return torch.topk(torch.rand(answer.shape, device=answer.device) * answer, count, dim=1).indices


def block_loss(
    model: NanoDrafter,
    table: Tensor,
    rows: ContextRows,
    anchors: Tensor,
    mask_id: int,
    entropy: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor],
) -> Tensor:
    """Loss of the blocks behind anchors [B, N], later rows weighted less. ``table`` is the target's
    embedding, ``entropy`` the weighted mean cross entropy of hidden rows.
    """
    ids, answer, size = rows.ids, rows.answer, model.dims.block
    decay = torch.exp(-torch.arange(size - 1, device=ids.device) / model.dims.gamma)
    placed = blocks(model.dims, ids, rows.pos, anchors, mask_id)
    out = model(table, rows.taps, rows.pos, placed, True)
    hidden = out.unflatten(1, (-1, size))[:, :, 1:]
    ahead = anchors[:, :, None] + torch.arange(1, size, device=ids.device)
    inside = (ahead < ids.shape[1]) & answer.gather(
        1, (ahead - 1).clamp(max=ids.shape[1] - 1).flatten(1)
    ).view(ahead.shape)
    wanted = ids.gather(1, ahead.clamp(max=ids.shape[1] - 1).flatten(1))
    # The first False in `answer` ends the document; later tokens belong to the next one.
    weight = inside.int().cumprod(-1) * decay * answer.gather(1, anchors)[..., None]
    value = entropy(hidden, table, wanted, weight)
    if model.candidate_selector is None:
        return value
    before = ids.gather(1, (ahead - 1).clamp(max=ids.shape[1] - 1).flatten(1))
    chosen = (before.view(ahead.shape), wanted.view(ahead.shape), weight)
    return value + model.candidate_selector.loss(hidden, table, *chosen)
