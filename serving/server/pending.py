"""Bookkeeping of unanswered `validate`, `prefix.drop` and `session.drop` requests, which are no
jobs. Their number is bounded. Used by one thread.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from thor_dflash.core.errors import PlanError
from thor_dflash.serving.server.lifecycle import RETRY_MS
from thor_dflash.serving.server.scheduler import Peer
from thor_dflash.serving.server.worker_messages import PendingMessage, PendingRequest

MAX_TOTAL = 16
"""Limit for all clients together: each request holds a message, and its check may take a second."""
MAX_PER_CLIENT = 4


@dataclass(slots=True)
class PendingRequests:
    """The unanswered requests. Each counts until a thread has finished it, even after its client
    has stopped waiting.
    """

    _requests: list[PendingRequest] = field(default_factory=list[PendingRequest])

    def add(self, peer: Peer, message: PendingMessage) -> PendingRequest:
        """Add a request.

        Raises:
            PlanError: busy.
        """
        own = sum(one.peer.client == peer.client for one in self._requests)
        for whose, most, got in (
            ("all clients", MAX_TOTAL, len(self._requests)),
            ("one client", MAX_PER_CLIENT, own),
        ):
            if got >= most:
                text = (
                    f"validate and drop requests of {whose} must be <= {most} at a time "
                    "(got one more)"
                )
                raise PlanError("busy", text, retry_after_ms=RETRY_MS)
        self._requests.append(request := PendingRequest(peer, message))
        return request

    def remove(self, request: PendingRequest) -> bool:
        """Remove a request that a thread has finished. Returns whether its client still waits."""
        self._requests.remove(request)
        return not request.abandoned

    def abandon(self, matches: Callable[[Peer], bool] = lambda peer: True) -> list[PendingRequest]:
        """Mark the requests of the matching peers as abandoned, and return them."""
        found = [one for one in self._requests if not one.abandoned and matches(one.peer)]
        for one in found:
            one.abandoned = True
        return found

    @property
    def idle(self) -> bool:
        """Whether no client waits for an answer."""
        return all(one.abandoned for one in self._requests)
