"""The vision tower of Qwen3.5/3.6 in torch, for pictures of one size, and the target with it.

Dimensions: P pictures, n patches of one in merge order, C columns of the tower, D of the target;
B packed rows of T tokens with at most M pictures each. Parameter names are the checkpoint's.
Source: transformers models/qwen3_5.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thor_dflash.calib.nano.dims import NanoTargetDims, NanoTowerDims
from thor_dflash.calib.nano.pictured_corpus import GRID
from thor_dflash.calib.nano.target import NanoTarget
from thor_dflash.calib.planbench.drawing import PALETTE
from thor_dflash.core.model_dims import MERGE, MERGED, PATCH


class PictureTable(nn.Module):
    """Pictures of palette indices [P, side, side] on a device."""

    def __init__(self, pixels: Tensor) -> None:
        super().__init__()
        self.pixels = pixels
        table = torch.from_numpy((PALETTE.astype(np.float32) - 127.5) / 127.5)
        self.table = table.to(pixels.device)

    def patches(self, index: Tensor) -> Tensor:
        """The patches [.., n, 3 * 16 * 16] of pictures `index` [..], one frame of the two."""
        rows, columns = GRID.merged
        cells = self.pixels[index].unflatten(-1, (columns, MERGE, PATCH))
        cells = cells.unflatten(-4, (rows, MERGE, PATCH))
        first = index.ndim
        # rows, down, y, columns, across, x -> rows, columns, down, across, y, x
        order = [0, 3, 1, 4, 2, 5]
        cells = cells.permute(*range(first), *(first + axis for axis in order)).long()
        colours = self.table[cells].movedim(-1, -3)
        return colours.flatten(first, first + 3).flatten(-3)


def normal_linear(outputs: int, inputs: int) -> nn.Linear:
    """A linear with bias whose results are about as large as its inputs."""
    layer = nn.Linear(inputs, outputs)
    nn.init.normal_(layer.weight, std=inputs**-0.5)
    nn.init.zeros_(layer.bias)
    return layer


class TowerAttention(nn.Module):
    """Attention of an image's patches to each other, rotated by row and column."""

    def __init__(self, dims: NanoTowerDims) -> None:
        super().__init__()
        self.dims = dims
        self.qkv = normal_linear(3 * dims.hidden, dims.hidden)
        self.proj = normal_linear(dims.hidden, dims.hidden)

    def forward(self, x: Tensor, turn: Tensor) -> Tensor:
        """Rows [P, n, C] -> [P, n, C]; `turn` [n, head_dim / 2] are angles."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.dims.heads, -1)).movedim(-2, -4).unbind(-2)
        q, k = (_rotate(u, turn) for u in (q, k))
        out = F.scaled_dot_product_attention(q, k, v)
        return self.proj(out.transpose(-3, -2).flatten(-2))


def _rotate(x: Tensor, turn: Tensor) -> Tensor:
    a, b = x.float().chunk(2, -1)
    cos, sin = turn.cos(), turn.sin()
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


class TowerMlp(nn.Module):
    """GELU, its tanh form."""

    def __init__(self, dims: NanoTowerDims) -> None:
        super().__init__()
        self.linear_fc1 = normal_linear(dims.intermediate, dims.hidden)
        self.linear_fc2 = normal_linear(dims.hidden, dims.intermediate)

    def forward(self, x: Tensor) -> Tensor:
        """Rows [.., C] -> [.., C]."""
        return self.linear_fc2(F.gelu(self.linear_fc1(x), approximate="tanh"))


class TowerBlock(nn.Module):
    """Pre-norm block."""

    def __init__(self, dims: NanoTowerDims) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dims.hidden, dims.eps)
        self.attn = TowerAttention(dims)
        self.norm2 = nn.LayerNorm(dims.hidden, dims.eps)
        self.mlp = TowerMlp(dims)

    def forward(self, x: Tensor, turn: Tensor) -> Tensor:
        """Rows [P, n, C] before -> after the block."""
        x = x + self.attn(self.norm1(x), turn)
        return x + self.mlp(self.norm2(x))


class TowerMerger(nn.Module):
    """Four patches to one row of the target."""

    def __init__(self, dims: NanoTowerDims) -> None:
        super().__init__()
        wide = MERGED * dims.hidden
        self.norm = nn.LayerNorm(dims.hidden, dims.eps)
        self.linear_fc1 = normal_linear(wide, wide)
        self.linear_fc2 = normal_linear(dims.out, wide)

    def forward(self, x: Tensor) -> Tensor:
        """Rows [P, n, C] -> [P, n / 4, D]."""
        y = self.norm(x).unflatten(-2, (-1, MERGED)).flatten(-2)
        return self.linear_fc2(F.gelu(self.linear_fc1(y)))


class PatchEmbed(nn.Module):
    """A Conv3d whose steps are as large as its kernel: a product. Both frames of a still picture
    are the same, so their weights are added.
    """

    def __init__(self, dims: NanoTowerDims) -> None:
        super().__init__()
        self.proj = nn.Conv3d(3, dims.hidden, (2, PATCH, PATCH))

    def forward(self, patches: Tensor) -> Tensor:
        """Patches [.., 768] -> [.., C]."""
        return F.linear(patches, self.proj.weight.sum(2).flatten(1), self.proj.bias)


class NanoTower(nn.Module):
    """The tower for pictures of GRID's size."""

    taps: Tensor
    weights: Tensor
    turn: Tensor

    def __init__(self, dims: NanoTowerDims) -> None:
        super().__init__()
        self.dims = dims
        self.patch_embed = PatchEmbed(dims)
        self.pos_embed = nn.Embedding(dims.positions**2, dims.hidden)
        self.blocks = nn.ModuleList(TowerBlock(dims) for _ in range(dims.depth))
        self.merger = TowerMerger(dims)
        taps, weights = GRID.taps(dims.positions)
        row, column = torch.from_numpy(GRID.places()).float()
        half = dims.head_dim // 2
        freq = dims.theta ** (-2 * torch.arange(half // 2).float() / half)
        turn = torch.cat([row[:, None] * freq, column[:, None] * freq], -1)
        self.register_buffer("taps", torch.from_numpy(taps).long(), persistent=False)
        self.register_buffer("weights", torch.from_numpy(weights), persistent=False)
        self.register_buffer("turn", turn, persistent=False)

    def forward(self, patches: Tensor) -> Tensor:
        """Patches [P, n, 768] -> rows [P, n / 4, D] that take the place of embeddings."""
        places = (self.pos_embed(self.taps) * self.weights[..., None]).sum(1)
        x = self.patch_embed(patches) + places
        for block in self.blocks:
            x = block(x, self.turn)
        return self.merger(x)


@dataclass(frozen=True)
class ImageRows:
    """The images of packed rows."""

    slot: Tensor
    """[B, T] row of `values` that takes the place of a token's embedding, or -1."""
    values: Tensor
    """[B, M * n / 4, D]."""


class SeeingTarget(nn.Module):
    """The target with a vision tower. Checkpoint names get the prefix `model.`."""

    def __init__(self, dims: NanoTargetDims, tower: NanoTowerDims) -> None:
        super().__init__()
        self.language_model = NanoTarget(dims)
        self.visual = NanoTower(tower)

    def embed(self, ids: Tensor, slot: Tensor, patches: Tensor) -> Tensor:
        """Rows [B, T, D] of tokens; those of images are the tower's for patches [B, M, n, 768]."""
        rows = self.visual(patches.flatten(0, 1)).unflatten(0, patches.shape[:2]).flatten(1, 2)
        return replaced(self.language_model.embed(ids), ImageRows(slot, rows))


def replaced(x: Tensor, images: ImageRows) -> Tensor:
    """Embedded tokens [B, T, D] with the rows of images in their places."""
    index = images.slot.clamp(min=0).long()[..., None].expand(*images.slot.shape, x.shape[-1])
    return torch.where(images.slot[..., None] >= 0, images.values.to(x.dtype).gather(1, index), x)
