"""The state of one sequence: everything that must advance together, in one place.

The committed state is the tensors up to `length`, plus the first `accepted` records of the last
verify, which the next step folds into the recurrent states. Only `commit` (and `advance`, for
prefill) moves it: a step that is not committed leaves rows past the length and records that no
later step folds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from thor_dflash.core.errors import TransactionError
from thor_dflash.core.tensors import Array, Dims, TensorSpec
from thor_dflash.plugins.contract import NEXT
from thor_dflash.runtime.decoding.kv_log import KVLog
from thor_dflash.runtime.engines.protocol import Engine, Graph, Tensor
from thor_dflash.runtime.vision.prompt_images import PromptImages


def is_record(name: str) -> bool:
    """Whether a state tensor is a record: waiting to be folded, void when nothing was accepted."""
    return name.startswith("gdn.") and not name.endswith((".state", ".tail"))


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A copy of one sequence's committed state, without records that no step will fold."""

    length: int
    accepted: int
    arrays: Mapping[str, Array]
    first: int = 0
    """As in SequenceState: the drafter has not seen positions before it."""
    behind: tuple[Array, ...] = ()
    """As in SequenceState: taps the drafter has yet to take in."""
    images: PromptImages | None = None
    """As in SequenceState."""


class SequenceState:
    """The tensors of one sequence, made once and reused for every request in turn."""

    def __init__(self, engine: Engine, graphs: list[Graph], dims: Dims) -> None:
        self._engine = engine
        self.tensors: dict[str, Tensor] = {}
        for graph in graphs:
            for name in graph.outputs:
                if name.startswith(NEXT):
                    state = name.removeprefix(NEXT)
                    if state not in self.tensors:
                        spec = replace(graph.outputs[name], name=state)
                        self.tensors[state] = engine.empty(spec, dims)
        self.length = 0
        """Committed rows."""
        self.accepted = 0
        """Rows of the last verify that the next step folds."""
        self.first = 0
        """First position in the drafter's rings; earlier ones were never written there."""
        self.behind: list[Array] = []
        """Taps of the newest committed rows, which the drafter has yet to take in."""
        self.taps: Tensor | None = None
        """Where a verify leaves its taps, if they may stay there after a commit."""
        self.fresh = 0
        """Rows there that were committed and that the drafter has yet to take in."""
        self.images: PromptImages | None = None
        """Those of the prompt; never those of the sequence before."""
        self._verified = 0
        """Rows of the last verify that may still be committed."""
        self._open = False
        """A step began and has not ended."""
        self.log = KVLog()
        self.begun = 0
        """Count of sequences begun. A sequence that finds it changed has lost the state to a later
        one."""

    def begin(self, rows: int) -> None:
        """Mark that a step is about to run, which writes `rows` from `length` on.

        Raises:
            TransactionError: the previous step failed half way, so tensors and counters disagree.
        """
        if self._open:
            raise TransactionError(
                "a step must follow a finished one, a reset or a restore "
                "(got a state whose last step failed)"
            )
        self._open = True
        self.log.writing(self.length, rows)

    def reset(self) -> None:
        """Begin an empty sequence. Caches and rings are not cleared: nothing reads past length."""
        self.resume(0)
        for name, tensor in self.tensors.items():
            if name.startswith("gdn."):
                self._engine.clear(tensor)

    def resume(self, length: int) -> None:
        """Begin a sequence of which the tensors hold the first `length` tokens, all prefilled."""
        self.length, self.accepted, self._verified, self.first = length, 0, 0, 0
        self.behind, self.fresh, self.images = [], 0, None
        self._open = False
        self.begun += 1
        self.log.forget()

    def verified(self, rows: int) -> None:
        """Note that a verify ran: it folded the accepted records, and `rows` may be committed."""
        self.accepted = self.fresh = 0
        self._verified = rows
        self._open = False

    def commit(self, count: int) -> None:
        """Commit the first `count` rows of the last verify.

        Raises:
            TransactionError: no verify ran since the last commit, or it had fewer rows.
        """
        if not 1 <= count <= self._verified:
            raise TransactionError(
                f"rows to commit must be 1..{self._verified} of the last verify (got {count})"
            )
        self.length += count
        self.accepted = count
        self._verified = 0

    def advance(self, count: int) -> None:
        """Note that a prefill step ran: its rows are already in the state."""
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
        behind = tuple(self.behind) + ((self.read_fresh(),) if self.fresh else ())
        return Snapshot(self.length, self.accepted, arrays, self.first, behind, self.images)

    def read_fresh(self) -> Array:
        """Copy the `fresh` rows."""
        assert self.taps is not None, "fresh rows without taps"
        return self._engine.read(self.taps, (self.fresh, *self.taps.spec.at({})[1:]))

    def restore(self, snapshot: Snapshot) -> None:
        """Continue from a snapshot, exactly as its sequence would have."""
        self.begun += 1  # first: also if a write fails, the earlier sequence has lost the state
        self.log.forget()
        self.log.writing(0, snapshot.length)
        for name, array in snapshot.arrays.items():
            self._engine.write(self.tensors[name], array)
        self.length, self.accepted, self._verified = snapshot.length, snapshot.accepted, 0
        self.first, self.behind, self.fresh = snapshot.first, list(snapshot.behind), 0
        self.images = snapshot.images
        self._open = False

    def layout(self, length: int) -> dict[str, TensorSpec]:
        """The arrays of a snapshot at this length when no records are left to fold."""
        return {
            name: TensorSpec(name, tensor.spec.dtype, self._shape(name, tensor, length))
            for name, tensor in self.tensors.items()
            if not is_record(name)
        }

    @staticmethod
    def _shape(name: str, tensor: Tensor, length: int) -> tuple[int, ...]:
        shape = tensor.spec.at({})
        if name.startswith("gdn.") or len(shape) < 3:
            return shape
        heads, rows, width = shape  # caches and rings are [heads, rows, width]
        return heads, min(rows, length), width
