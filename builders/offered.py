"""What a build asks of checkpoints, whole ones or hollow."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from thor_dflash.builders.checkpoint.matrix import Matrix
from thor_dflash.dims import DrafterDims, TargetDims
from thor_dflash.tensors import Array


class Weights(Protocol):
    """A checkpoint's tensors."""

    @property
    def directory(self) -> Path:
        """Where it lies."""
        ...

    def matrix(self, name: str) -> Matrix:
        """A linear's weight."""
        ...

    def tensor(self, name: str) -> Array:
        """Any other tensor."""
        ...


class TargetSource(Weights, Protocol):
    """What a build asks of a target checkpoint."""

    @property
    def dims(self) -> TargetDims:
        """Sizes."""
        ...

    @property
    def skipped(self) -> tuple[str, ...]:
        """Tensors no graph uses."""
        ...

    def kv_scales(self, layer: int) -> tuple[float, float] | None:
        """FP8 scales of an attention layer's keys and values, if it has them."""
        ...


class DrafterSource(Weights, Protocol):
    """What a build asks of a drafter checkpoint."""

    @property
    def dims(self) -> DrafterDims:
        """Sizes."""
        ...
