"""The state of one sequence: everything that must move together, in one place.

Committed state is the tensors up to `length`, with the first `accepted` of the last verify's
records still to be folded. Only `commit` moves it: a step that is dropped leaves rows past the
length and records that nobody was told to fold.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from thor_dflash.errors import TransactionError
from thor_dflash.plugins.op import NEXT
from thor_dflash.runtime.engine import Engine, Graph, Tensor
from thor_dflash.tensors import Array, Dims, TensorSpec


def is_record(name: str) -> bool:
    """Whether a state is there to be folded, and void when nothing was accepted."""
    return name.startswith("gdn.") and not name.endswith((".state", ".tail"))


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A copy of one sequence's committed state. Records that nothing will fold are left out."""

    length: int
    accepted: int
    arrays: Mapping[str, Array]
    first: int = 0
    """As in State: what the drafter was never shown."""
    behind: tuple[Array, ...] = ()
    """As in State: what it has yet to be shown."""


class State:
    """Tensors of one sequence, made once and used for every request in turn."""

    def __init__(self, engine: Engine, graphs: list[Graph], dims: Dims) -> None:
        self._engine = engine
        self.tensors: dict[str, Tensor] = {}
        for graph in graphs:
            for name in graph.outputs:
                if name.startswith(NEXT):
                    state = name.removeprefix(NEXT)
                    if state not in self.tensors:
                        self.tensors[state] = engine.empty(graph.inputs[state], dims)
        self.length = 0
        """Committed rows."""
        self.accepted = 0
        """Rows of the last verify that the next step folds."""
        self.first = 0
        """Positions before it were never put into the drafter's rings."""
        self.behind: list[Array] = []
        """Taps of the newest committed rows, those the drafter has yet to take in."""
        self._verified = 0
        """Rows a commit may still take."""
        self._open = False
        """A step began and did not end."""
        self.begun = 0
        """Sequences so far. One that finds another number has lost the state to a later one."""

    def begin(self) -> None:
        """A step is about to run.

        Raises:
            TransactionError: the step before it failed half way, so tensors and counters disagree.
        """
        if self._open:
            raise TransactionError(
                "a step must follow a finished one, a reset or a restore "
                "(got a state whose last step failed)"
            )
        self._open = True

    def reset(self) -> None:
        """Begin an empty sequence. Caches and rings keep their bytes: nothing reads past length."""
        self.length = self.accepted = self._verified = self.first = 0
        self.behind = []
        self._open = False
        self.begun += 1
        for name, tensor in self.tensors.items():
            if name.startswith("gdn."):
                self._engine.clear(tensor)

    def verified(self, rows: int) -> None:
        """A verify ran: what was accepted before is folded now, and `rows` may be committed."""
        self.accepted = 0
        self._verified = rows
        self._open = False

    def commit(self, count: int) -> None:
        """Take the first `count` rows of the last verify.

        Raises:
            TransactionError: there was no verify since the last commit, or it had fewer rows.
        """
        if not 1 <= count <= self._verified:
            raise TransactionError(
                f"rows to commit must be 1..{self._verified} of the last verify (got {count})"
            )
        self.length += count
        self.accepted = count
        self._verified = 0

    def advance(self, count: int) -> None:
        """A prefill step ran: its rows are in the state already."""
        self.length += count
        self.accepted = self._verified = 0
        self._open = False

    def snapshot(self) -> Snapshot:
        """Copy the committed state."""
        arrays = {
            name: self._engine.read(tensor, self._shape(name, tensor, self.length))
            for name, tensor in self.tensors.items()
            if self.accepted or not is_record(name)
        }
        return Snapshot(self.length, self.accepted, arrays, self.first, tuple(self.behind))

    def restore(self, snapshot: Snapshot) -> None:
        """Go on from a snapshot, exactly as its sequence would have."""
        for name, array in snapshot.arrays.items():
            self._engine.write(self.tensors[name], array)
        self.length, self.accepted, self._verified = snapshot.length, snapshot.accepted, 0
        self.first, self.behind = snapshot.first, list(snapshot.behind)
        self._open = False
        self.begun += 1

    def layout(self, length: int) -> dict[str, TensorSpec]:
        """What a snapshot at this length holds where nothing is left to fold."""
        return {
            name: TensorSpec(name, tensor.spec.dtype, self._shape(name, tensor, length))
            for name, tensor in self.tensors.items()
            if not is_record(name)
        }

    @staticmethod
    def _shape(name: str, tensor: Tensor, length: int) -> tuple[int, ...]:
        shape = tensor.spec.at({})
        if name.startswith("gdn."):
            return shape
        heads, rows, width = shape  # caches and rings are [heads, rows, width]
        return heads, min(rows, length), width
