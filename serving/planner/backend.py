"""The backend interface: prepares requests and runs them step by step for a server."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from thor_dflash.runtime.text.tool_calls import Tool
from thor_dflash.serving.planner.latency_model import LatencyModel
from thor_dflash.serving.planner.plan_format import PlanFormat
from thor_dflash.serving.protocol import messages
from thor_dflash.serving.protocol.replies import ModelReply, ReuseCounts

if TYPE_CHECKING:
    from thor_dflash.runtime.decoding.block import Sampling
    from thor_dflash.runtime.session.admission import Admitted
    from thor_dflash.runtime.vision.picture import Picture

StopReason = Literal["cancelled", "preempted", "deadline"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A request that was checked: it fits, its prompt is tokenised and its schema compiled."""

    ask: messages.PlanRequest
    prompt: tuple[int, ...]
    cached: int
    """Prompt tokens that a pinned prefix covers."""
    max_tokens: int
    budget: int
    """Most thinking tokens."""
    thinks: bool
    """Whether the prompt opens the thinking block."""
    format: PlanFormat
    """Reads the answer."""
    tools: tuple[Tool, ...] = ()
    """Those that the answer may call."""
    pictures: Mapping[str, Picture] = field(default_factory=dict[str, "Picture"])
    """The request's images by their ids."""
    admitted: Admitted | None
    """The request as the session has admitted it; None without a session."""
    grammar_ms: float
    min_ms: float
    """Least time this request takes, ms."""

    @property
    def sampling(self) -> Sampling | None:
        """How the tokens are drawn; None: greedy, or without a session."""
        return self.admitted.sampling if self.admitted else None


class PlanRun(Protocol):
    """One request while it runs."""

    @property
    def done(self) -> bool:
        """Whether it ended by itself."""
        ...

    @property
    def phase(self) -> messages.Phase:
        """The phase of the last step."""
        ...

    def step(self) -> Sequence[messages.Chunk]:
        """Run one decoding cycle or one prefill chunk.

        Raises:
            ThorError: the engine or the model failed.
        """
        ...

    def result(self, stop: StopReason | None) -> messages.Result:
        """End the run and return its result; `stop` says why it was ended early, if it was."""
        ...

    def close(self) -> None:
        """End the run. Idempotent."""
        ...


class Backend(Protocol):
    """Prepares requests on any thread; runs them one at a time on one thread."""

    @property
    def about(self) -> ModelReply:
        """Its description for `hello`."""
        ...

    @property
    def rates(self) -> LatencyModel:
        """The measured speed of its steps."""
        ...

    @property
    def reuse(self) -> ReuseCounts:
        """What turns reused of earlier ones. May be read by any thread."""
        ...

    def warm(self) -> None:
        """Run everything once and check that it computes correctly.

        Raises:
            ThorError: the check failed.
        """
        ...

    def read_images(self, ask: messages.PlanRequest, scope: str = "") -> Mapping[str, Picture]:
        """Decode and resize the images of a request from the client `scope`, by their names. May
        take a second.

        Raises:
            PlanError: one of them cannot be shown.
        """
        ...

    def prepare(
        self,
        ask: messages.PlanRequest,
        left_ms: float | None,
        scope: str = "",
        pictures: Mapping[str, Picture] | None = None,
    ) -> Prepared:
        """Check a request that has `left_ms` until its deadline, from the client `scope`, and whose
        images are read (`pictures`; None: read them now).

        Raises:
            PlanError: the request cannot be served.
        """
        ...

    def start(self, prepared: Prepared, left_ms: float | None) -> PlanRun:
        """Begin a request.

        Raises:
            PlanError: the prefix named by its prefix_id was dropped while it waited.
        """
        ...

    def validate(self, request: messages.Validate) -> dict[str, Any]:
        """Count tokens and compile a schema.

        Raises:
            PlanError: the request cannot be served.
        """
        ...

    def pin(self, request: messages.PrefixPut, stopped: Callable[[], bool]) -> dict[str, Any]:
        """Prefill a prefix and hold its state. Engine thread only.

        Raises:
            PlanError: it does not fit, or `stopped` returned True.
        """
        ...

    def keep(self, request: messages.PrefixPut) -> None:
        """Write the file of a pinned prefix, or remove it, as `request.persist` says. Waits for the
        disk; `keep` and `drop` may be called by one thread at a time.

        Raises:
            PlanError: the file cannot be written or removed, or the prefix was dropped before.
        """
        ...

    def prefixes(self) -> list[dict[str, Any]]:
        """Describe the pinned prefixes."""
        ...

    @property
    def skipped(self) -> tuple[str, ...]:
        """One line for each persisted prefix that was not restored, with the reason."""
        ...

    def drop(self, prefix_id: str) -> bool:
        """Drop a prefix and its file. Returns whether it existed.

        Raises:
            PlanError: its file cannot be removed.
        """
        ...

    def drop_session(self, request: messages.SessionDrop, scope: str = "") -> int:
        """Forget the states of a conversation of the client `scope`; return how many."""
        ...

    def idle(self, stopped: Callable[[], bool]) -> float | None:
        """Do what can be done without a request, until `stopped`, which is called before every
        step. Returns in how many seconds there is more to do, if any. Engine thread only.

        Raises:
            ThorError: the engine failed.
        """
        ...

    def close(self) -> None:
        """Release all resources. Idempotent."""
        ...


def deadline_of(request: messages.PlanRequest, arrived: float) -> float | None:
    """Return when a request that arrived at `arrived` must be answered; monotonic, s."""
    return None if request.deadline_ms is None else arrived + 1e-3 * request.deadline_ms


def left_ms(deadline: float | None) -> float | None:
    """Return the ms until a deadline (monotonic, s); None without one."""
    return None if deadline is None else 1e3 * (deadline - time.monotonic())


def drive(
    run: PlanRun,
    deadline: float | None = None,
    stopped: Callable[[], StopReason | None] = lambda: None,
    stepped: Callable[[messages.Phase], None] = lambda phase: None,
) -> Generator[messages.Chunk | messages.Result]:
    """Take a run to its end: yield its chunks, then its result. Close the iterator to end it early.

    Args:
        run: Closed at the end, however it comes.
        deadline: Monotonic, s.
        stopped: Called before every step; why the run is to end now, if it is.
        stepped: Called after every step.

    Raises:
        ThorError: the engine or the model failed.
    """
    try:
        while not run.done:
            why = stopped()
            if why is None and deadline is not None and time.monotonic() >= deadline:
                why = "deadline"
            if why is not None:
                yield run.result(why)
                return
            chunks = run.step()
            stepped(run.phase)
            yield from chunks
        yield run.result(None)
    finally:
        run.close()
