"""The protocol every engine implements. Everything above it is engine-blind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from thor_dflash.tensors import Array, Dims, TensorSpec


class Tensor(Protocol):
    """Memory an engine owns. Callers hold it and hand it back; they never look inside."""

    @property
    def spec(self) -> TensorSpec:
        """What it holds; every size a number."""
        ...


class Graph(Protocol):
    """A loaded graph: its inputs and outputs by name. Symbolic sizes are letters."""

    @property
    def name(self) -> str:
        """Which step of the loop it is."""
        ...

    @property
    def inputs(self) -> Mapping[str, TensorSpec]:
        """What a call must bind to read."""
        ...

    @property
    def outputs(self) -> Mapping[str, TensorSpec]:
        """What a call must bind to write."""
        ...


@dataclass(frozen=True, slots=True)
class Call:
    """One execution of a graph.

    An output may be bound to the tensor that is also an input: the old value is read, the new one
    is there once the call has succeeded.
    """

    graph: Graph
    inputs: Mapping[str, Tensor]
    outputs: Mapping[str, Tensor]


class Engine(Protocol):
    """All but `read` and `busy` return at once; work happens in call order on one stream."""

    @property
    def device(self) -> str:
        """What it runs on, in words."""
        ...

    def load(self, name: str) -> Graph:
        """Load a graph of the package.

        Raises:
            EngineError: the graph cannot run here.
        """
        ...

    def empty(self, spec: TensorSpec, dims: Dims) -> Tensor:
        """Memory for `spec`, zeroed, kept until close. Usable once `prepare` has returned."""
        ...

    def prepare(self, calls: Sequence[Call]) -> None:
        """Get ready for these calls and no others: count memory and take it, load weights, compile.
        Called once, after every tensor was made.

        Raises:
            EngineError: something does not fit or does not run here.
        """
        ...

    def run(self, calls: Sequence[Call]) -> None:
        """Enqueue calls in order. The same calls come again every cycle, so an engine may capture
        them the first time and replay them after.

        Raises:
            EngineError: a call failed; no output of that call and of later ones has changed, except
            rows past the committed length.
        """
        ...

    def write(self, tensor: Tensor, values: Array) -> None:
        """Copy into the leading corner of a tensor: all of it, or as much as `values` has."""
        ...

    def clear(self, tensor: Tensor) -> None:
        """Zero a tensor."""
        ...

    def read(self, tensor: Tensor, shape: tuple[int, ...] | None = None) -> Array:
        """Wait until what was enqueued so far has made a tensor what it will be; copy its leading
        corner. The only wait.
        """
        ...

    def busy(self) -> Mapping[str, float]:
        """Seconds spent in each graph that was waited for, by name. Work of which something was
        read is waited for to its end.
        """
        ...

    def close(self) -> None:
        """Free everything. Idempotent."""
        ...
