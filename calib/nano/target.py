"""The target: the Qwen3.5/3.6 text architecture in torch, for training and for one-token steps.

Dimensions: B rows of packed documents, T tokens, D hidden, H heads, C chunk. Parameter names are
the checkpoint's. A packed row holds several documents; ``pos`` restarts at 0 with each, and state,
convolution and attention never cross from one document to another.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thor_dflash.calib.nano.dims import MROPE, NanoTargetDims
from thor_dflash.calib.nano.quant import fake_quant, fp8_cache, global_scale

CHUNK = 64
"""Tokens per chunk of the delta rule in training."""
RESET = -60.0
"""Log decay at a document's first token: exp(-60) empties the state."""


@dataclass(frozen=True)
class PackedRows:
    """The documents in packed rows."""

    pos: Tensor
    """[B, T] position inside the document."""
    mask: Tensor
    """[B, 1, T, T] True where the query (row) may see the key (column): same document, key not
    later.
    """
    turn: Tensor
    """Positions by which heads turn: [B, T], or [B, T, 3] for time, row and column."""


def packed_rows(pos: Tensor, turn: Tensor | None = None) -> PackedRows:
    """Return the packing of rows whose documents start where ``pos`` is 0."""
    doc = (pos == 0).cumsum(1)
    time = torch.arange(pos.shape[1], device=pos.device)
    mask = (doc[:, :, None] == doc[:, None, :]) & (time[:, None] >= time[None, :])
    return PackedRows(pos, mask[:, None], pos if turn is None else turn)


def norm1(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Zero-centred RMS norm: x / rms(x) * (1 + w), computed in F32, returned in x's dtype."""
    y = x.float()
    return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps) * (1.0 + weight.float())).to(
        x.dtype
    )


def rope(x: Tensor, pos: Tensor, dims: int, theta: float) -> Tensor:
    """Rotate the first ``dims`` features, NeoX style; x is [B, H, T, head], pos [B, T], or
    [B, T, 3] of which each pair takes one (MROPE).
    """
    half = dims // 2
    pairs = torch.arange(half, device=x.device)
    freq = theta ** (-pairs.float() / half)
    if pos.ndim == 3:
        # Pairs t h w t h w ..., h and w as often as their sections say; the rest is t.
        row = (pairs % 3 == 1) & (pairs < 3 * MROPE[1])
        column = (pairs % 3 == 2) & (pairs < 3 * MROPE[2])
        each = pos[..., row.long() + 2 * column]
    else:
        each = pos[..., None]
    angle = each[:, None].float() * freq
    cos, sin = angle.cos(), angle.sin()
    a, b, rest = x[..., :half].float(), x[..., half:dims].float(), x[..., dims:]
    return torch.cat(
        [(a * cos - b * sin).to(x.dtype), (b * cos + a * sin).to(x.dtype), rest], dim=-1
    )


def linear(outputs: int, inputs: int) -> nn.Linear:
    """Make a linear without bias, initialised as the model family: normal, std 0.02."""
    layer = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(layer.weight, std=0.02)
    return layer


class Norm(nn.Module):
    """The weight of a norm; ``start`` is 0 for zero-centred weights and 1 for plain ones."""

    def __init__(self, size: int, start: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((size,), start))


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = linear(inner, hidden)
        self.up_proj = linear(inner, hidden)
        self.down_proj = linear(hidden, inner)

    def forward(self, x: Tensor, quant: bool) -> Tensor:
        """Rows [.., D] -> [.., D]."""
        gate, up = shared(quant, self.gate_proj, self.up_proj)
        (down,) = shared(quant, self.down_proj)
        return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


def shared(quant: bool, *layers: nn.Linear) -> list[Tensor]:
    """Return the weights of linears that read one input; with ``quant``, quantised with one global
    scale.
    """
    weights = [layer.weight for layer in layers]
    if not quant:
        return weights
    scale2 = global_scale(*weights)
    return [fake_quant(w, scale2) for w in weights]


class Attention(nn.Module):
    """Gated attention with GQA, per-head norms, partial rope, and K and V rounded as by an FP8
    cache.
    """

    def __init__(self, dims: NanoTargetDims) -> None:
        super().__init__()
        self.dims = dims
        self.fp8_cache = True
        self.q_proj = linear(2 * dims.q_heads * dims.head_dim, dims.hidden)
        self.k_proj = linear(dims.kv_heads * dims.head_dim, dims.hidden)
        self.v_proj = linear(dims.kv_heads * dims.head_dim, dims.hidden)
        self.o_proj = linear(dims.hidden, dims.q_heads * dims.head_dim)
        self.q_norm = Norm(dims.head_dim)
        self.k_norm = Norm(dims.head_dim)

    def project(self, x: Tensor, pos: Tensor, quant: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return q, gate [B, Hq, T, 256] and k, v [B, Hkv, T, 256]: q and k normed and rotated, k
        and v rounded as by the cache.
        """
        d = self.dims
        wq, wk, wv = shared(quant, self.q_proj, self.k_proj, self.v_proj)
        q, gate = (
            F.linear(x, wq).unflatten(-1, (d.q_heads, 2, d.head_dim)).transpose(1, 2).unbind(3)
        )
        k = F.linear(x, wk).unflatten(-1, (d.kv_heads, d.head_dim)).transpose(1, 2)
        v = F.linear(x, wv).unflatten(-1, (d.kv_heads, d.head_dim)).transpose(1, 2)
        q = rope(norm1(q, self.q_norm.weight, d.eps), pos, d.rotary, d.theta)
        k = rope(norm1(k, self.k_norm.weight, d.eps), pos, d.rotary, d.theta)
        return (q, gate, fp8_cache(k), fp8_cache(v)) if self.fp8_cache else (q, gate, k, v)

    def attend(
        self, q: Tensor, gate: Tensor, k: Tensor, v: Tensor, mask: Tensor, quant: bool
    ) -> Tensor:
        """Softmax attention under a mask, gated and projected: [B, T, D]."""
        ratio = self.dims.q_heads // self.dims.kv_heads
        k, v = k.repeat_interleave(ratio, 1), v.repeat_interleave(ratio, 1)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask) * torch.sigmoid(gate)
        (wo,) = shared(quant, self.o_proj)
        return F.linear(out.transpose(1, 2).flatten(2), wo)

    def forward(self, x: Tensor, rows: PackedRows, quant: bool) -> Tensor:
        """Rows [B, T, D] -> [B, T, D]."""
        q, gate, k, v = self.project(x, rows.turn, quant)
        return self.attend(q, gate, k, v, rows.mask, quant)


class Conv(nn.Module):
    """The depthwise causal convolution's weight, [channels, 1, 4]."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(channels, 1, width) * 0.3)


class Gdn(nn.Module):
    """Gated delta net."""

    def __init__(self, dims: NanoTargetDims) -> None:
        super().__init__()
        self.dims = dims
        values = dims.gdn_v_heads * dims.gdn_dim
        self.in_proj_qkv = linear(dims.conv_channels, dims.hidden)
        self.in_proj_z = linear(values, dims.hidden)
        self.in_proj_b = linear(dims.gdn_v_heads, dims.hidden)
        self.in_proj_a = linear(dims.gdn_v_heads, dims.hidden)
        self.conv1d = Conv(dims.conv_channels, dims.conv)
        self.A_log = nn.Parameter(torch.log(torch.linspace(0.5, 4.0, dims.gdn_v_heads)))
        self.dt_bias = nn.Parameter(torch.full((dims.gdn_v_heads,), -3.0))
        self.norm = Norm(dims.gdn_dim, start=1.0)
        self.out_proj = linear(dims.hidden, values)

    def gates(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return log decay g <= 0 and step size beta, both F32 [B, T, Hv]."""
        b = F.linear(x, self.in_proj_b.weight).float()
        a = F.linear(x, self.in_proj_a.weight).float()
        return -self.A_log.float().exp() * F.softplus(a + self.dt_bias.float()), torch.sigmoid(b)

    def heads(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Split convolved channels into q, k (normalised, repeated to value heads) and v: F32
        [B, Hv, T, 128].
        """
        d = self.dims
        keys = d.gdn_k_heads * d.gdn_dim
        q, k, v = mixed.float().split([keys, keys, d.gdn_v_heads * d.gdn_dim], dim=-1)
        q, k, v = (u.unflatten(-1, (-1, d.gdn_dim)).transpose(1, 2) for u in (q, k, v))
        ratio = d.gdn_v_heads // d.gdn_k_heads
        q = q * torch.rsqrt(q.square().sum(-1, keepdim=True) + 1e-6) * d.gdn_dim**-0.5
        k = k * torch.rsqrt(k.square().sum(-1, keepdim=True) + 1e-6)
        return q.repeat_interleave(ratio, 1), k.repeat_interleave(ratio, 1), v

    def gated_out(self, o: Tensor, z: Tensor, dtype: torch.dtype, quant: bool) -> Tensor:
        """Per-head norm, silu(z) gate, output projection; o and z are [B, T, Hv, 128]."""
        y = (
            o
            * torch.rsqrt(o.square().mean(-1, keepdim=True) + self.dims.eps)
            * self.norm.weight.float()
        )
        (wo,) = shared(quant, self.out_proj)
        return F.linear((y * F.silu(z.float())).flatten(2).to(dtype), wo)

    def forward(self, x: Tensor, rows: PackedRows, quant: bool) -> Tensor:
        """Rows [B, T, D] -> [B, T, D]."""
        wqkv, wz = shared(quant, self.in_proj_qkv, self.in_proj_z)
        raw = F.linear(x, wqkv)
        width = self.dims.conv
        taps = self.conv1d.weight[:, 0].to(raw.dtype)
        mixed = raw * taps[:, width - 1]
        for back in range(1, width):
            shifted = F.pad(raw, (0, 0, back, 0))[:, : raw.shape[1]]
            mixed = mixed + shifted * (rows.pos >= back)[..., None] * taps[:, width - 1 - back]
        q, k, v = self.heads(F.silu(mixed))
        g, beta = self.gates(x)
        g = torch.where(rows.pos[..., None] == 0, torch.full_like(g, RESET), g)
        # The state needs more precision than bf16, to which autocast would round every product.
        with torch.autocast(x.device.type, enabled=False):
            o = delta_rule(q, k, v, g.transpose(1, 2), beta.transpose(1, 2)).transpose(1, 2)
        z = F.linear(x, wz).unflatten(-1, (self.dims.gdn_v_heads, self.dims.gdn_dim))
        return self.gated_out(o, z, x.dtype, quant)


def delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """The gated delta rule in chunks (UT transform), all F32: q, k, v [B, H, T, 128], g, beta
    [B, H, T].

    Source: spec of the block form, (I + A) U = diag(beta) (V - diag(e^G) K S0).
    """
    q, k, v = (u.unflatten(2, (-1, CHUNK)) for u in (q, k, v))
    g, beta = g.unflatten(2, (-1, CHUNK)), beta.unflatten(2, (-1, CHUNK))
    total = g.cumsum(-1)
    lower = torch.ones(CHUNK, CHUNK, device=q.device, dtype=torch.bool).tril()
    gap = total[..., :, None] - total[..., None, :]
    decay = torch.where(lower, gap, torch.full_like(gap, -1e4)).exp()
    a = (beta[..., None] * decay * (k @ k.mT)).tril(-1)
    eye = torch.eye(CHUNK, device=q.device)
    grown = total.exp()[..., None]
    rhs = torch.cat([v, k * grown], dim=-1) * beta[..., None]
    solved = torch.linalg.solve_triangular(eye + a, rhs, upper=False, unitriangular=True)
    u, w = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    inner = (q @ k.mT) * decay
    left = q * grown
    right = k * (total[..., -1:] - total).exp()[..., None]
    state = torch.zeros(*q.shape[:2], q.shape[-1], v.shape[-1], device=q.device)
    outs: list[Tensor] = []
    for c in range(q.shape[2]):
        new = u[:, :, c] - w[:, :, c] @ state
        outs.append(left[:, :, c] @ state + inner[:, :, c] @ new)
        state = state * grown[:, :, c, -1:] + right[:, :, c].mT @ new
    return torch.stack(outs, dim=2).flatten(2, 3)


class NanoLayer(nn.Module):
    """Pre-norm layer: attention or GDN, then MLP."""

    def __init__(self, dims: NanoTargetDims, index: int) -> None:
        super().__init__()
        self.eps = dims.eps
        self.full = dims.is_full(index)
        self.input_layernorm = Norm(dims.hidden)
        self.post_attention_layernorm = Norm(dims.hidden)
        if self.full:
            self.self_attn = Attention(dims)
        else:
            self.linear_attn = Gdn(dims)
        self.mlp = Mlp(dims.hidden, dims.intermediate)

    def forward(self, x: Tensor, rows: PackedRows, quant: bool) -> Tensor:
        """Residual stream [B, T, D] before -> after the layer."""
        mixer = self.self_attn if self.full else self.linear_attn
        x = x + mixer(norm1(x, self.input_layernorm.weight, self.eps), rows, quant)
        return x + self.mlp(norm1(x, self.post_attention_layernorm.weight, self.eps), quant)


class NanoTarget(nn.Module):
    """The whole target; the tied head is not stored separately. Checkpoint names get the prefix
    ``model.``.
    """

    def __init__(self, dims: NanoTargetDims) -> None:
        super().__init__()
        self.dims = dims
        self.embed_tokens = nn.Embedding(dims.vocab, dims.hidden)
        nn.init.normal_(self.embed_tokens.weight, std=0.02)
        self.layers = nn.ModuleList(NanoLayer(dims, i) for i in range(dims.layers))
        self.norm = Norm(dims.hidden)

    def forward(
        self, x: Tensor, rows: PackedRows, quant: bool, taps: tuple[int, ...] = ()
    ) -> tuple[Tensor, list[Tensor]]:
        """Embedded tokens [B, T, D] -> hidden rows after the final norm [B, T, D], and the residual
        stream after the tapped layers.
        """
        kept: list[Tensor] = []
        for index, layer in enumerate(self.layers):
            x = layer(x, rows, quant)
            if index in taps:
                kept.append(x)
        return norm1(x, self.norm.weight, self.dims.eps), kept

    def embed(self, ids: Tensor) -> Tensor:
        """Rows [B, T, D] of tokens [B, T]."""
        return F.embedding(ids, self.embed_tokens.weight)

    def cache_as_fp8(self, rounded: bool) -> None:
        """Choose whether K and V are rounded as by an FP8 cache."""
        for module in self.modules():
            if isinstance(module, Attention):
                module.fp8_cache = rounded

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits over the padded vocabulary, [.., VOCAB]."""
        return F.linear(hidden, self.embed_tokens.weight)
