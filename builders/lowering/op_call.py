"""A program under construction: the operator calls of a graph, and the types of its values."""

from __future__ import annotations

from dataclasses import dataclass

from thor_dflash.core.tensors import DType
from thor_dflash.plugins.contract import Attribute


@dataclass(slots=True)
class ValueType:
    """Type and shape of a value. A size that a session decides is symbolic, a string."""

    dtype: DType
    shape: tuple[int | str, ...]


@dataclass(slots=True)
class OperatorCall:
    """A future program step: passes over the list of calls add, drop and rename its ports."""

    name: str
    op: str
    attributes: dict[str, Attribute]
    inputs: dict[str, str]
    """Port -> value."""
    outputs: dict[str, str]
