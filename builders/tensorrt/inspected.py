"""A layer of a built engine, as its description keeps it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer of an engine."""

    name: str
    kind: str
    """Empty where the inspector tells no more than names."""
    tactic: str
    """What TensorRT chose."""
