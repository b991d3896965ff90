"""The interfaces of checkpoints that a build needs, real or synthetic."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from thor_dflash.builders.checkpoint.quantized_matrix import Matrix
from thor_dflash.core.model_dims import DrafterDims, TargetDims, VisionDims
from thor_dflash.core.tensors import Array


class Weights(Protocol):
    """A checkpoint's tensors."""

    @property
    def directory(self) -> Path:
        """The checkpoint's directory."""
        ...

    def matrix(self, name: str) -> Matrix:
        """Return a linear's weight."""
        ...

    def tensor(self, name: str) -> Array:
        """Return any other tensor."""
        ...


class TargetSource(Weights, Protocol):
    """A target checkpoint."""

    @property
    def dims(self) -> TargetDims:
        """The model's sizes."""
        ...

    @property
    def skipped(self) -> tuple[str, ...]:
        """Names of tensors that no graph uses."""
        ...

    def kv_scales(self, layer: int) -> tuple[float, float] | None:
        """Return the FP8 scales of an attention layer's keys and values, if it has them."""
        ...


class DrafterSource(Weights, Protocol):
    """A drafter checkpoint."""

    @property
    def dims(self) -> DrafterDims:
        """The model's sizes."""
        ...


class VisionSource(Weights, Protocol):
    """A target checkpoint's vision tower."""

    @property
    def dims(self) -> VisionDims:
        """The tower's sizes, and how images are prepared for it."""
        ...

    @property
    def names(self) -> frozenset[str]:
        """Stored names of the tower's tensors."""
        ...
