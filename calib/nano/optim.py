"""The optimiser: Muon for the matrices of the layers, AdamW for everything else.

Source: Jordan et al., Muon (2024): momentum, then five Newton-Schulz steps that make the update
nearly orthogonal.
"""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor, nn

MUON_LR = 0.02
ADAM_LR = 3e-3


def orthogonalise(update: Tensor) -> Tensor:
    """Newton-Schulz orthogonalisation of stacked matrices [n, rows, cols]: in bf16 on a GPU, in F32
    on a CPU, where bf16 products are slower.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    x = update.bfloat16() if update.is_cuda else update.float()
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if tall else x).float()


class Optimiser:
    """Both optimisers behind one ``step(rate)``; rate scales the learning rates from 0 to 1."""

    def __init__(self, model: nn.Module) -> None:
        groups: dict[torch.Size, list[nn.Parameter]] = defaultdict(list)
        rest: list[nn.Parameter] = []
        for name, param in model.named_parameters():
            if not param.requires_grad:
                continue
            table = "embed" in name or "codebook" in name
            if param.ndim == 2 and min(param.shape) >= 64 and not table:
                groups[param.shape].append(param)
            else:
                rest.append(param)
        self.groups = list(groups.values())
        self.momentum = [torch.zeros(len(g), *g[0].shape, device=g[0].device) for g in self.groups]
        self.adam = torch.optim.AdamW(
            rest, lr=ADAM_LR, betas=(0.9, 0.95), weight_decay=0.0, fused=rest[0].is_cuda
        )

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """Apply and clear the gradients."""
        for group, momentum in zip(self.groups, self.momentum, strict=True):
            grad = torch.stack(
                [p.grad if p.grad is not None else torch.zeros_like(p) for p in group]
            )
            momentum.lerp_(grad, 0.05)
            update = orthogonalise(grad.lerp(momentum, 0.95))
            rows, cols = group[0].shape
            scale = MUON_LR * rate * max(1.0, rows / cols) ** 0.5
            for param, delta in zip(group, update, strict=True):
                param.mul_(1.0 - MUON_LR * rate * 0.05).add_(delta, alpha=-scale)
                param.grad = None
        for entry in self.adam.param_groups:
            entry["lr"] = ADAM_LR * rate
        self.adam.step()
        self.adam.zero_grad(set_to_none=True)


def rate_at(progress: float) -> float:
    """Return the learning-rate factor at a fraction of the run: short warm-up, constant, then
    linear to zero over the last 60 %.
    """
    return min(1.0, progress / 0.01 + 0.02, (1.0 - progress) / 0.6 + 1e-3)
