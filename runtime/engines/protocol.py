"""The protocol that every engine implements. Code above it does not depend on the engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from thor_dflash.core.tensors import Array, Dims, TensorSpec


class Tensor(Protocol):
    """Memory owned by an engine. Opaque to callers, who only pass it back to the engine."""

    @property
    def spec(self) -> TensorSpec:
        """Name, dtype and shape; every size is a number."""
        ...


class Graph(Protocol):
    """A loaded graph: its inputs and outputs by name. Symbolic sizes are names."""

    @property
    def name(self) -> str:
        """The step of the loop that this graph runs."""
        ...

    @property
    def inputs(self) -> Mapping[str, TensorSpec]:
        """The inputs a call must bind."""
        ...

    @property
    def outputs(self) -> Mapping[str, TensorSpec]:
        """The outputs a call must bind."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """One execution of a graph. Equal only to itself, so that engines can keep state by call.

    An output may be bound to a tensor that is also an input: the call reads the old value, and the
    tensor holds the new value once the call has succeeded.
    """

    graph: Graph
    inputs: Mapping[str, Tensor]
    outputs: Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class TensorRows:
    """A tensor, or rows `start` to `stop` of the second axis of one [heads, rows, width]."""

    tensor: Tensor
    start: int = 0
    stop: int = 0
    """0: the whole tensor, of any shape."""

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        whole = self.tensor.spec.nbytes({})
        if not self.stop:
            return whole
        return whole // self.tensor.spec.at({})[1] * (self.stop - self.start)


class Engine(Protocol):
    """Work runs in call order on one stream. All methods but `read` and `busy` return without
    waiting for it.
    """

    @property
    def device(self) -> str:
        """Description of the device."""
        ...

    @property
    def loads_late(self) -> bool:
        """Whether graphs and tensors may also be made after `prepare`, when they are first needed;
        else all calls are known then, as memory is allocated at once.
        """
        ...

    def load(self, name: str) -> Graph:
        """Load a graph of the package.

        Raises:
            EngineError: the graph cannot run here.
        """
        ...

    def empty(self, spec: TensorSpec, dims: Dims) -> Tensor:
        """Return a zeroed tensor, kept until close. Usable once `prepare` has returned."""
        ...

    def reserve(self, nbytes: int) -> None:
        """Count memory for state that is swapped out. Called at most once, before `prepare`."""
        ...

    def prepare(self, calls: Sequence[Call]) -> None:
        """Prepare these calls and no others: count and allocate memory, load weights, compile.
        Called once, after every tensor was made; see `loads_late`.

        Raises:
            EngineError: something does not fit or does not run here.
        """
        ...

    def run(self, calls: Sequence[Call]) -> None:
        """Enqueue calls in order. Every cycle makes the same calls, so an engine may capture them
        the first time and replay them afterwards.

        Raises:
            EngineError: a call failed; the outputs of that call and of later ones are unchanged,
            except for rows past the committed length.
        """
        ...

    def write(self, tensor: Tensor, values: Array) -> None:
        """Copy into the leading corner of a tensor: all of it, or as much as `values` covers."""
        ...

    def clear(self, tensor: Tensor) -> None:
        """Zero a tensor."""
        ...

    def swap_out(
        self, at: int, parts: Sequence[TensorRows], count: int = 1, stride: int = 0
    ) -> None:
        """Copy parts into the reserved memory, one after the other from byte `at`. With a `count`,
        also as many rows of the same tensors that follow, and again, each `stride` bytes further.
        """
        ...

    def swap_in(
        self, at: int, parts: Sequence[TensorRows], count: int = 1, stride: int = 0
    ) -> None:
        """Copy back what `swap_out` copied with the same arguments."""
        ...

    def read(self, tensor: Tensor, shape: tuple[int, ...] | None = None) -> Array:
        """Wait until all enqueued writes to a tensor are done, then copy its leading corner to the
        host. Apart from `busy`, the only method that waits.
        """
        ...

    def busy(self) -> Mapping[str, float]:
        """Seconds spent in each graph, by name, over all runs that have ended. If a result of a run
        was read while the run went on, this waits for the run to end.
        """
        ...

    def close(self) -> None:
        """Free everything. Idempotent."""
        ...
