"""The backend interface: prepares requests and runs them step by step for a server."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from thor_dflash.serving.planner.latency_model import LatencyModel
from thor_dflash.serving.planner.schema_validator import SchemaValidator
from thor_dflash.serving.protocol import messages

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
    checker: SchemaValidator | None
    """Validates the plan against its schema, if it has one."""
    grammar: object
    """The compiled schema, or None. Its type is known only to the backend that made it."""
    grammar_ms: float
    min_ms: float
    """Least time this request takes, ms."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendInfo:
    """The description of a backend for `hello`."""

    model: str
    engine: str
    quantisation: Mapping[str, Any]
    package_sha256: str | None
    tokenizer_sha256: str | None
    golden_sha256: str | None
    """Hash of the self-test's tokens: equal on two machines that give the same plans."""
    max_context: int
    block: int
    prefill_chunk: int
    """Prompt tokens of a prefill step, the longest step that a cancel has to wait for."""
    features: tuple[str, ...]


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
    def about(self) -> BackendInfo:
        """Its description for `hello`."""
        ...

    @property
    def rates(self) -> LatencyModel:
        """The measured speed of its steps."""
        ...

    def warm(self) -> None:
        """Run everything once and check that it computes correctly.

        Raises:
            ThorError: the check failed.
        """
        ...

    def prepare(self, ask: messages.PlanRequest, left_ms: float | None) -> Prepared:
        """Check a request that has `left_ms` until its deadline.

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

    def close(self) -> None:
        """Release all resources. Idempotent."""
        ...


def drive(
    run: PlanRun,
    stopped: Callable[[], StopReason | None],
    emit: Callable[[messages.Chunk], None],
    stepped: Callable[[messages.Phase], None] = lambda phase: None,
) -> messages.Result:
    """Take a run to its end, calling `stopped` before every step and `stepped` after it.

    Raises:
        ThorError: the engine or the model failed.
    """
    try:
        while not run.done:
            if why := stopped():
                return run.result(why)
            chunks = run.step()
            stepped(run.phase)
            for chunk in chunks:
                emit(chunk)
        return run.result(None)
    finally:
        run.close()
