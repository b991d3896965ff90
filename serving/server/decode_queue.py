"""The queue of bodies for the decode thread: each client has a share of it, and its turn.

A body of more than MAX_INLINE bytes is decoded by the decode thread, so that the I/O thread goes on
answering. What a client sends after such a body waits behind it: a `cancel` must not overtake its
plan. Bookkeeping only, used by the I/O thread.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable

from thor_dflash.core.errors import PlanError
from thor_dflash.serving.server.lifecycle import RETRY_MS
from thor_dflash.serving.server.scheduler import Peer
from thor_dflash.serving.server.worker_messages import UndecodedRequest

MAX_INLINE = 1024
"""Longest body that the I/O thread decodes itself, bytes: any control operation, and plans of short
prompts. It takes at most 0.1 ms."""
AT_ONCE = 1 << 16
"""Bytes that the decode thread is given before the next body: one long body, or some short ones."""
POOL = 4
"""Bodies of the largest size that may wait, if they are of one connection."""


class DecodeQueue:
    """The bodies that are not decoded yet. `start` gives one to the decode thread."""

    def __init__(self, start: Callable[[UndecodedRequest], None], least: int, largest: int) -> None:
        """`least`: bytes that any connection may have waiting; `largest`: of a body."""
        self._start = start
        self._least, self._largest = least, largest
        self._started: list[UndecodedRequest] = []
        self._waiting: OrderedDict[bytes, deque[UndecodedRequest]] = OrderedDict()
        """By connection; the first one is next."""
        self._bytes: Counter[bytes] = Counter()
        """Of the bodies that wait or are being decoded, by connection."""

    def must_wait(self, peer: Peer, body: bytes) -> bool:
        """Whether a body must go through this queue."""
        return len(body) > MAX_INLINE or peer.routing in self._bytes

    def add(self, peer: Peer, body: bytes) -> None:
        """Add a body.

        Raises:
            PlanError: busy, its connection has its share of the queue.
        """
        request = UndecodedRequest(peer, body)
        # By connection, not by client: a client could send the envelopes of any number of proxies.
        others = len(self._bytes.keys() - {peer.routing})
        share = max(self._least, POOL * self._largest // (others + 1))
        if (held := self._bytes.get(peer.routing, 0) + request.size) > share:
            text = f"requests of one connection that wait to be decoded must be <= {share} bytes"
            raise PlanError("busy", f"{text} (got {held})", retry_after_ms=RETRY_MS)
        self._bytes[peer.routing] += request.size
        self._waiting.setdefault(peer.routing, deque()).append(request)
        self._next()

    def done(self, request: UndecodedRequest) -> bool:
        """Note that a body is decoded. Returns whether its client still waits."""
        self._started.remove(request)
        self._leave(request)
        self._next()
        return not request.abandoned

    def abandon(self, matches: Callable[[Peer], bool] = lambda peer: True) -> None:
        """Mark the bodies of the matching peers as abandoned; those that wait are not decoded."""
        for request in self._requests():
            request.abandoned = request.abandoned or matches(request.peer)

    @property
    def idle(self) -> bool:
        """Whether no client waits."""
        return all(request.abandoned for request in self._requests())

    def _requests(self) -> list[UndecodedRequest]:
        return [*self._started, *(one for requests in self._waiting.values() for one in requests)]

    def _next(self) -> None:
        begun = sum(request.size for request in self._started)
        while self._waiting and begun < AT_ONCE:
            routing, requests = self._waiting.popitem(last=False)
            request = requests.popleft()
            if requests:
                self._waiting[routing] = requests  # now the last in turn
            if request.abandoned:
                self._leave(request)
            else:
                self._started.append(request)
                begun += request.size
                self._start(request)

    def _leave(self, request: UndecodedRequest) -> None:
        routing = request.peer.routing
        self._bytes[routing] -= request.size
        if not self._bytes[routing]:
            del self._bytes[routing]
