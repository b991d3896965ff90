"""What the I/O thread gives the worker threads to do, and the events that they answer with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from thor_dflash.core.errors import PlanError, ThorError
from thor_dflash.serving.planner.backend import Backend, Prepared
from thor_dflash.serving.protocol import messages
from thor_dflash.serving.server.request_reader import DecodedRequest
from thor_dflash.serving.server.scheduler import Job, Peer

LEAST_BYTES = 1024
"""What a body that waits to be decoded counts at least in its client's share, bytes."""


@dataclass(frozen=True, slots=True)
class BackendLoaded:
    """The backend is loaded and runs its self-test."""


@dataclass(frozen=True, slots=True)
class BackendReady:
    """The backend is loaded and has passed its self-test."""

    backend: Backend


@dataclass(frozen=True, slots=True)
class ServerFailed:
    """The backend did not load, was lost, or a thread failed: the server must end."""

    error: ThorError


@dataclass(slots=True, eq=False)
class UndecodedRequest:
    """A body that waits for the decode thread, or is there."""

    peer: Peer
    body: bytes
    abandoned: bool = False
    """Its connection is closed."""

    @property
    def size(self) -> int:
        """The bytes it counts in its client's share."""
        return max(LEAST_BYTES, len(self.body))


@dataclass(frozen=True, slots=True)
class RequestDecoded:
    """The decode thread has read a request."""

    body: UndecodedRequest
    decoded: DecodedRequest


@dataclass(frozen=True, slots=True)
class JobChecked:
    """The check thread has prepared or refused a job."""

    job: Job
    outcome: Prepared | PlanError


PendingMessage = messages.Validate | messages.PrefixDrop | messages.SessionDrop


@dataclass(slots=True, eq=False)
class PendingRequest:
    """A `validate` for the check thread, or a drop for the file thread, unanswered."""

    peer: Peer
    message: PendingMessage
    abandoned: bool = False
    """No client waits for it any more. Written by the I/O thread, read by the worker thread before
    it begins."""


@dataclass(frozen=True, slots=True)
class RequestDone:
    """A thread has finished a `validate` or a drop."""

    request: PendingRequest
    outcome: dict[str, Any] | PlanError | None
    """None if it was abandoned before it began."""


@dataclass(frozen=True, slots=True)
class PrefixPinned:
    """Work for the file thread: a pinned prefix, answered once its file is written or removed."""

    job: Job
    request: messages.PrefixPut
    answer: dict[str, Any]


@dataclass(frozen=True, slots=True)
class FileWritten:
    """The file thread has written or removed the file of a pinned prefix."""

    job: Job
    outcome: dict[str, Any] | PlanError


@dataclass(frozen=True, slots=True)
class ChunkReady:
    """A chunk of the running job."""

    job: Job
    chunk: messages.Chunk


@dataclass(frozen=True, slots=True)
class JobDone:
    """The running job has ended."""

    job: Job
    outcome: messages.Result | dict[str, Any] | PlanError


WorkerEvent = (
    BackendLoaded
    | BackendReady
    | ServerFailed
    | RequestDecoded
    | JobChecked
    | RequestDone
    | FileWritten
    | ChunkReady
    | JobDone
)
FileTask = PendingRequest | PrefixPinned | Callable[[], None]
"""Work for the file thread; a function writes a trace."""
CheckItem = tuple[int, int, Job | PendingRequest | None]
"""An entry of the check thread's priority queue, least first: rank, order of arrival, work item."""


def check_item(order: int, item: Job | PendingRequest | None) -> CheckItem:
    """Rank work for the check thread: plans, then `validate`, then None, which ends the thread."""
    return 2 if item is None else int(isinstance(item, PendingRequest)), order, item
