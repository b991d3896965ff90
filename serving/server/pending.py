"""Bookkeeping of unanswered `validate` and `prefix.drop` requests, which are no jobs. Their number
is bounded. Used by one thread.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from thor_dflash.core.errors import PlanError
from thor_dflash.serving.protocol import messages
from thor_dflash.serving.server.lifecycle import RETRY_MS
from thor_dflash.serving.server.scheduler import Peer
from thor_dflash.serving.server.workers import PendingRequest

MOST = 16
"""Limit for all clients together: each request holds a message and may take the clerk a second."""
EACH = 4
"""Limit for one client."""


@dataclass(slots=True)
class PendingRequests:
    """The unanswered requests. Each counts until a thread has finished it, even after its client
    has stopped waiting.
    """

    _taken: list[PendingRequest] = field(default_factory=list[PendingRequest])

    def take(self, peer: Peer, request: messages.Validate | messages.PrefixDrop) -> PendingRequest:
        """Add a request.

        Raises:
            PlanError: busy.
        """
        for whose, most, got in (
            ("all clients", MOST, len(self._taken)),
            ("one client", EACH, sum(one.peer.client == peer.client for one in self._taken)),
        ):
            if got >= most:
                text = (
                    f"validate and prefix.drop requests of {whose} must be <= {most} at a time "
                    "(got one more)"
                )
                raise PlanError("busy", text, retry_after_ms=RETRY_MS)
        self._taken.append(owed := PendingRequest(peer, request))
        return owed

    def settle(self, owed: PendingRequest) -> bool:
        """Remove a request that a thread has finished. Returns whether its client still waits."""
        self._taken.remove(owed)
        return not owed.given_up

    def give_up(self, hers: Callable[[Peer], bool] = lambda peer: True) -> list[PendingRequest]:
        """Mark the requests of the matching peers as given up, and return them."""
        found = [one for one in self._taken if not one.given_up and hers(one.peer)]
        for one in found:
            one.given_up = True
        return found

    @property
    def idle(self) -> bool:
        """Whether no client waits for an answer."""
        return all(one.given_up for one in self._taken)
