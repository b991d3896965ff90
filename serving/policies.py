"""Which policies a request needs: the one place where serving meets the policies of the runtime."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from thor_dflash.runtime.block import Policy
from thor_dflash.runtime.propose import Proposer
from thor_dflash.runtime.session import Chunk, Request, Session
from thor_dflash.serving import wire
from thor_dflash.serving.backend import Prepared
from thor_dflash.serving.refusal import PlanError

FEATURES: tuple[str, ...] = ("stream", "deadline", "preempt")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shaping:
    """The policies of one request, and what they have to tell afterwards."""

    policies: tuple[Policy, ...]
    dead_end: Callable[[], bool]
    """The grammar left nothing to choose."""
    forced: Callable[[], int]
    """Tokens the grammar put in place of drafts."""


def compose(session: Session, prepared: Prepared, budget: int) -> Shaping:
    """The policies of a request that may think for `budget` tokens."""
    return Shaping(policies=(), dead_end=lambda: False, forced=lambda: 0)


def thinking_tokens(session: Session, budget: int) -> int:
    """Tokens a thinking of `budget` takes, its closing mark included."""
    return budget + 2


def thinking_fits(session: Session, room: int) -> int:
    """Longest thinking that takes no more than `room` tokens."""
    return max(0, room - 2)


class Grammars:
    """Schemas compiled for the session's vocabulary."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def compile(self, schema: Mapping[str, Any]) -> object:
        """A compiled schema."""
        raise PlanError("schema_unsupported", "json_schema must be left out", field="json_schema")

    def warm(self) -> None:
        """Compile and mask once."""


class Pins:
    """Named prefixes."""

    def __init__(self, session: Session, megabytes: int) -> None:
        self._session = session

    def cached(self, prompt: tuple[int, ...], prefix_id: str | None) -> int:
        """Prompt tokens that a pinned prefix holds."""
        if prefix_id is not None:
            raise PlanError("bad_request", "prefix_id must be left out", field="prefix_id")
        return 0

    def run(
        self,
        request: Request,
        proposer: Proposer,
        policies: tuple[Policy, ...],
        prepared: Prepared,
    ) -> Iterator[Chunk]:
        """Answer a request."""
        return self._session.run(request, proposer, policies)

    def put(self, request: wire.PrefixPut, stopped: Callable[[], bool]) -> dict[str, Any]:
        """Pin a prefix."""
        raise PlanError("bad_request", "op must be implemented here", field="op")

    def list(self) -> list[dict[str, Any]]:
        """The pinned prefixes."""
        return []

    def drop(self, prefix_id: str) -> bool:
        """Forget one."""
        return False
