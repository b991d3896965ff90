"""What a DFlash2 drafter has besides a DFlash drafter, in torch, for training.

Dimensions: B packed rows, N anchors per row, R block rows, D hidden, G groups, K candidates.
Source: the forward pass of z-lab's ``DFlash2DraftModel``; the selector's loss of SpecForge.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thor_dflash.calib.nano.dims import NanoDrafterDims
from thor_dflash.calib.nano.target import linear


class DraftConv(nn.Module):
    """The convolution of two taps around one sublayer. It begins as the identity."""

    def __init__(self, dims: NanoDrafterDims) -> None:
        super().__init__()
        self.dims = dims
        base = torch.zeros(2, dims.conv_taps, dims.hidden)
        base[:, 0] = 1
        self.base_kernel = nn.Parameter(base)
        groups = dims.hidden // dims.conv_group
        self.kernel_projection = linear(2 * dims.conv_taps * groups, dims.hidden)
        nn.init.zeros_(self.kernel_projection.weight)

    def kernels(self, h: Tensor) -> tuple[Tensor, Tensor]:
        """Kernels [B, N * R, taps, D] before and behind the sublayer, from its normed input."""
        made = self.kernel_projection(h).unflatten(-1, (2, self.dims.conv_taps, -1))
        both = self.base_kernel.to(h.dtype) + made.repeat_interleave(self.dims.conv_group, -1)
        return both[:, :, 0], both[:, :, 1]

    def forward(self, x: Tensor, kernel: Tensor) -> Tensor:
        """Convolve block rows [B, N * R, D]; no block sees another."""
        rows = x.unflatten(1, (-1, self.dims.block))
        y = kernel[:, :, 0] * x
        for tap in range(1, self.dims.conv_taps):
            earlier = F.pad(rows[:, :, :-tap], (0, 0, tap, 0)).flatten(1, 2)
            y = y + kernel[:, :, tap] * earlier
        return y


class CandidateSelector(nn.Module):
    """Scores of candidates by the token before them. It begins without a preference."""

    def __init__(self, dims: NanoDrafterDims, vocab: int) -> None:
        super().__init__()
        self.top_k = dims.top_k
        self.hidden_projection = linear(dims.rank, dims.hidden)
        self.predecessor_codebook = nn.Parameter(torch.randn(vocab, dims.rank))
        self.successor_codebook = nn.Parameter(torch.zeros(vocab, dims.rank))

    def candidates(self, hidden: Tensor, table: Tensor, usable: int) -> tuple[Tensor, Tensor]:
        """The largest logits [.., K] of rows [.., D], and their ids."""
        found = F.linear(hidden, table)[..., :usable].float().topk(self.top_k, -1)
        return found.values, found.indices

    def scores(self, hidden: Tensor, before: Tensor, unary: Tensor, ids: Tensor) -> Tensor:
        """Scores [.., K] of candidates after the tokens `before` [..]."""
        edge = self.predecessor_codebook[before] * self.hidden_projection(hidden)
        return unary + (self.successor_codebook[ids] * edge[..., None, :]).sum(-1).float()

    def loss(
        self, hidden: Tensor, table: Tensor, before: Tensor, wanted: Tensor, weight: Tensor
    ) -> Tensor:
        """Weighted mean cross entropy of wanted ids among the candidates that contain them. Logits
        are taken as they are: their own loss trains them.
        """
        with torch.no_grad():
            unary, ids = self.candidates(hidden, table, table.shape[0])
        scores = self.scores(hidden, before, unary, ids)
        hit = ids == wanted[..., None]
        each = scores.logsumexp(-1) - (scores * hit).sum(-1)
        used = weight * hit.any(-1)
        return (each * used).sum() / used.sum().clamp(min=1e-6)

    def walk(self, hidden: Tensor, table: Tensor, anchor: Tensor, usable: int) -> Tensor:
        """Greedy drafts [B, N, R - 1] from rows [B, N, R - 1, D] behind anchors' tokens [B, N]."""
        before, made = anchor, list[Tensor]()
        for row in hidden.unbind(2):
            unary, ids = self.candidates(row, table, usable)
            best = self.scores(row, before, unary, ids).argmax(-1, keepdim=True)
            before = ids.gather(-1, best)[..., 0]
            made.append(before)
        return torch.stack(made, 2)
