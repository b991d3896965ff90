"""What a server serves with: something that prepares requests and runs them step by step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from thor_dflash.serving import wire
from thor_dflash.serving.check import Checker
from thor_dflash.serving.rates import Rates

Stop = Literal["cancelled", "preempted", "deadline"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A request that was checked: it fits, and its prompt and schema are understood."""

    ask: wire.Ask
    prompt: tuple[int, ...]
    cached: int
    """Prompt tokens a pinned prefix holds."""
    max_tokens: int
    budget: int
    """Longest thinking, tokens."""
    thinks: bool
    """The prompt opens the thinking block."""
    checker: Checker | None
    """What the plan must obey."""
    grammar: object
    """The compiled schema, or None. Whoever made it knows what it is."""
    grammar_ms: float
    min_ms: float
    """Least time this request takes, ms."""


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """What a backend is, for `hello`."""

    model: str
    engine: str
    quantisation: Mapping[str, Any]
    package_sha256: str | None
    tokenizer_sha256: str | None
    golden_sha256: str | None
    """Of the self-test's tokens: equal on two machines that give the same plans."""
    max_context: int
    block: int
    prefill_chunk: int
    """Prompt tokens of a prefill step: what a cancel waits for, at most."""
    features: tuple[str, ...]


class Run(Protocol):
    """One request under way."""

    @property
    def done(self) -> bool:
        """It ended by itself."""
        ...

    @property
    def phase(self) -> wire.Phase:
        """What the last step did."""
        ...

    def step(self) -> Sequence[wire.Chunk]:
        """Go one cycle or one prefill chunk on.

        Raises:
            ThorError: the engine or the model failed.
        """
        ...

    def result(self, stop: Stop | None) -> wire.Result:
        """What came of it; `stop` says why it was ended early. Ends it."""
        ...

    def close(self) -> None:
        """End it. Idempotent."""
        ...


class Backend(Protocol):
    """Prepares requests on any thread; runs them one at a time, on one thread."""

    @property
    def about(self) -> About:
        """What it is."""
        ...

    @property
    def rates(self) -> Rates:
        """What it costs."""
        ...

    def warm(self) -> None:
        """Run everything once, and check that it computes what it must.

        Raises:
            ThorError: it does not.
        """
        ...

    def prepare(self, ask: wire.Ask, left_ms: float | None) -> Prepared:
        """Check a request that has `left_ms` until its deadline.

        Raises:
            PlanError: it cannot be served.
        """
        ...

    def start(self, prepared: Prepared, left_ms: float | None) -> Run:
        """Begin a request.

        Raises:
            PlanError: the prefix that it insists on was dropped while it waited.
        """
        ...

    def validate(self, request: wire.Validate) -> dict[str, Any]:
        """Count tokens and compile a schema.

        Raises:
            PlanError: it cannot be served.
        """
        ...

    def pin(self, request: wire.PrefixPut, stopped: Callable[[], bool]) -> dict[str, Any]:
        """Prefill a prefix and hold its state. Engine thread only.

        Raises:
            PlanError: it does not fit, or `stopped` said so.
        """
        ...

    def keep(self, request: wire.PrefixPut) -> None:
        """Have a pinned prefix outlive the server, or no longer, as the request says. Takes as long
        as the disk does; one thread at a time, as `drop`.

        Raises:
            PlanError: it cannot be written, or was dropped before.
        """
        ...

    def prefixes(self) -> list[dict[str, Any]]:
        """The pinned prefixes."""
        ...

    @property
    def skipped(self) -> tuple[str, ...]:
        """Why persisted prefixes were not taken in again, a line for each."""
        ...

    def drop(self, prefix_id: str) -> bool:
        """Forget one, its file too; whether it was there.

        Raises:
            PlanError: its file cannot be removed.
        """
        ...

    def close(self) -> None:
        """Free everything. Idempotent."""
        ...


def drive(
    run: Run,
    stopped: Callable[[], Stop | None],
    emit: Callable[[wire.Chunk], None],
    stepped: Callable[[wire.Phase], None] = lambda phase: None,
) -> wire.Result:
    """Take a run to its end, looking at `stopped` before every step and telling `stepped` after.

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
