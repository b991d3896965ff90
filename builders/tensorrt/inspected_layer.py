"""A layer of a built engine, as the engine's description stores it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class InspectedLayer:
    """One layer of an engine."""

    name: str
    kind: str
    """Type of the layer; "" if the inspector reports only names."""
    tactic: str
    """The tactic that TensorRT chose."""
