"""NVFP4 in torch: modelopt's quantiser, its straight-through form for training, and the packed
export.

Dimensions: N rows (outputs), K columns (inputs), 16 columns per block.
"""

from __future__ import annotations

import torch
from torch import Tensor

GROUP = 16
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BOUNDS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
_TIES_UP = (False, True, False, True, False, True, False)
"""Ties round to the even code: up at 0.75, 1.75 and 3.5, down at the other bounds."""


def global_scale(*weights: Tensor) -> Tensor:
    """Return ``weight_scale_2`` for weights that read the same input: amax / (6 * 448), an F32
    scalar.
    """
    return (
        torch.stack([w.detach().abs().amax().float() for w in weights]).amax().clamp(min=1e-12)
        / 2688.0
    )


def block_scales(weight: Tensor, scale2: Tensor) -> Tensor:
    """Return the E4M3 block scales as F32 values, [N, K/16]."""
    blocks = weight.detach().float().unflatten(-1, (-1, GROUP))
    amax = blocks.abs().amax(-1)
    scale = (amax / (6.0 * scale2)).clamp(2.0**-9, 448.0)
    scale = torch.where(amax == 0, torch.ones_like(scale), scale)
    return scale.to(torch.float8_e4m3fn).float()


def codes(weight: Tensor, scale: Tensor, scale2: Tensor) -> Tensor:
    """Return the E2M1 codes 0..7 without sign, int32 [N, K]."""
    blocks = weight.detach().float().unflatten(-1, (-1, GROUP)) / (scale.unsqueeze(-1) * scale2)
    size = blocks.abs()
    index = torch.zeros_like(size, dtype=torch.int32)
    for bound, up in zip(_BOUNDS, _TIES_UP, strict=True):
        index += (size >= bound) if up else (size > bound)
    return index.flatten(-2)


def fake_quant(weight: Tensor, scale2: Tensor) -> Tensor:
    """Round a weight to NVFP4, with a straight-through gradient. Same shape and dtype."""
    with torch.no_grad():
        scale = block_scales(weight, scale2)
        index = codes(weight, scale, scale2)
        table = torch.tensor(E2M1, device=weight.device, dtype=torch.float32)
        step = (scale * scale2).repeat_interleave(GROUP, dim=-1)
        value = torch.copysign(table[index] * step, weight.float()).to(weight.dtype)
    return weight + (value - weight).detach()


def pack(weight: Tensor, scale2: Tensor) -> tuple[Tensor, Tensor]:
    """Pack for a checkpoint: U8 [N, K/2] with even k in the low nibble, and F8_E4M3 [N, K/16]."""
    scale = block_scales(weight, scale2)
    index = codes(weight, scale, scale2)
    nibble = (index | (torch.signbit(weight).to(torch.int32) << 3)).to(torch.uint8)
    return nibble[:, 0::2] | (nibble[:, 1::2] << 4), scale.to(torch.float8_e4m3fn)


def unpack(packed: Tensor, scale: Tensor, scale2: Tensor) -> Tensor:
    """Dequantise a packed weight to F32 [N, K]."""
    nibble = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2).to(torch.int64)
    table = torch.tensor(E2M1 + tuple(-v for v in E2M1), device=packed.device)
    return table[nibble] * (scale.float() * scale2).repeat_interleave(GROUP, dim=-1)


def fp8_cache(x: Tensor) -> Tensor:
    """Round K or V as an E4M3 cache with scale 1 does, with a straight-through gradient."""
    with torch.no_grad():
        seen = x.float().clamp(-448.0, 448.0).to(torch.float8_e4m3fn).to(x.dtype)
    return x + (seen - x).detach()
