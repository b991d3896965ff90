"""The HTTP server below the application: uvicorn, and the limits of a connection that it lacks.

A connection that brings no request may stay for HEAD_S, or IDLE_S after an answer. When too many
are open, a new one takes the place of the one that has brought none for longest, so that a flood
of connections keeps nobody from getting answers.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
import time
from functools import partial
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from thor_dflash.config.serving import GatewayConfig
from thor_dflash.core.errors import ConfigError
from thor_dflash.serving.gateway import auth
from thor_dflash.serving.gateway.app import application

HEAD_S = 10.0
"""Longest time from the first byte of a request, or from the beginning of the connection, to the
end of its header. What is left of a body after its answer must come within it, too."""
IDLE_S = 130
"""Longest time between an answer and the next request, s. Longer than reverse proxies keep theirs
(Caddy 120, nginx 60): none shall send a request just as the gateway closes."""
STALLED_S = 30
"""Longest time in which a client takes nothing of an answer that waits for it."""
MOST = 4096
"""Most connections, where there are descriptors for so many."""
FEWEST = 256
"""Connections for which there must be descriptors."""
BACKLOG = 64
"""Most connections that asyncio accepts at once."""
QUEUE = 4096
"""Most connections that wait in the kernel. Beyond it, clients try again after a second or more."""
SPARE = 64 + 4 * BACKLOG
"""Descriptors beside the connections: files, and connections accepted before the oldest close."""
OF_SERVER = 16
"""Descriptors of the connection to a plan server."""
REPEAT_S = 60.0
"""A line of the log does not come again within this time."""


def listener(config: GatewayConfig) -> socket.socket:
    """Return the listening HTTP socket. Made here because uvicorn ends the process if it cannot
    bind.

    Raises:
        ConfigError: as `auth.listen_at`, or the address is in use or not local to this machine.
    """
    host, port = auth.listen_at(config)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        found = socket.create_server((host, port), family=family)
    except (OSError, UnicodeError) as e:
        raise ConfigError(f"gateway.listen must be a free address (got: {e})") from e
    # Linux gives accepted connections the option of the listening one.
    found.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, STALLED_S * 1000)
    return found


def http_server(config: GatewayConfig, drain_s: int) -> uvicorn.Server:
    """Return the server of a gateway, which open requests keep alive for up to `drain_s`. It lets
    this process have more descriptors, if it may.

    Raises:
        ConfigError: as `application`, or the process may not have enough descriptors.
    """
    limit = ConnectionLimit(_most_connections(SPARE + OF_SERVER * len(config.servers)))
    for name in ("uvicorn.error", "asyncio"):
        logging.getLogger(name).addFilter(_repeats)
    settings = uvicorn.Config(
        application(config),
        http=partial(LimitedConnection, limit),  # type: ignore[arg-type]
        ws="none",
        log_level="warning",
        access_log=False,
        proxy_headers=False,
        backlog=BACKLOG,
        timeout_keep_alive=IDLE_S,
        timeout_graceful_shutdown=drain_s,
    )
    return HttpServer(settings)


def _most_connections(spare: int) -> int:
    """Return how many connections there may be beside `spare` descriptors.

    Raises:
        ConfigError: less than FEWEST.
    """
    limit, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return MOST
    if limit < MOST + spare:
        limit = MOST + spare if hard == resource.RLIM_INFINITY else min(MOST + spare, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    if limit < (needed := FEWEST + spare):
        raise ConfigError(
            f"the limit of open files must be >= {needed} (got {limit}); ulimit -n {needed}, or "
            f"LimitNOFILE={needed} of systemd"
        )
    return min(MOST, limit - spare)


class HttpServer(uvicorn.Server):
    """uvicorn with a longer queue of connections in the kernel than asyncio accepts at once."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to listen."""
        await super().startup(sockets)
        for one in sockets or ():
            one.listen(QUEUE)


class ConnectionLimit:
    """The open connections, and which of them bring no request."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._open: set[H11Protocol] = set()
        self._idle: dict[H11Protocol, None] = {}
        """Those without a whole request, in the order in which they became so."""
        self._full = False

    def opened(self, connection: H11Protocol) -> None:
        """Count a connection; if there are too many, abort the one idle for longest."""
        self._open.add(connection)
        self.set_idle(connection, True)
        if len(self._open) <= self._most:
            return
        if not self._full:
            self._full = True
            text = f"{self._most} connections are open, the most"
            _log.warning(f"{text}: new ones replace those that bring no request")
        oldest = next(iter(self._idle))  # the new one, if the others have requests
        self.closed(oldest)
        oldest.transport.abort()

    def set_idle(self, connection: H11Protocol, idle: bool) -> None:
        """Record whether a connection has brought no whole request that is still to be answered."""
        if not idle:
            self._idle.pop(connection, None)
        elif connection in self._open:
            self._idle.setdefault(connection)

    def closed(self, connection: H11Protocol) -> None:
        """Forget a connection."""
        self._open.discard(connection)
        self._idle.pop(connection, None)
        if self._full and len(self._open) <= self._most // 2:
            self._full = False
            _log.warning(f"{len(self._open)} connections are open: none is replaced")


class LimitedConnection(H11Protocol):
    """A connection with a time limit for its next request, and one of a limited number."""

    def __init__(self, limit: ConnectionLimit, **uvicorn: Any) -> None:
        super().__init__(**uvicorn)
        self._limit = limit
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See asyncio.Protocol."""
        super().connection_made(transport)
        self._limit.opened(self)
        self._update()

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        super().data_received(data)  # stops uvicorn's timer between two requests
        self._update()

    def on_response_complete(self) -> None:
        """Let uvicorn wait for the next request, or begin it if it has come already."""
        self._limit.set_idle(self, True)
        super().on_response_complete()
        self._limit.set_idle(self, self._unread or not self._requested)

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        self._stop()
        self._limit.closed(self)
        super().connection_lost(exc)

    @property
    def _cycle(self) -> RequestResponseCycle | None:
        return self.cycle  # None before the first request, which its type does not say

    @property
    def _requested(self) -> bool:
        """Whether the header of a request has come whose answer is not complete."""
        return self._cycle is not None and not self._cycle.response_complete

    @property
    def _unread(self) -> bool:
        """Whether a part of the body of the last request has not come."""
        return self._cycle is not None and self._cycle.more_body

    def _update(self) -> None:
        self._limit.set_idle(self, self._unread or not self._requested)
        if self._requested:
            self._stop()
        elif self._timer is None:
            self._timer = self.loop.call_later(HEAD_S, self.transport.abort)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class Repeats(logging.Filter):
    """Keeps back lines of the log that came within REPEAT_S, and what is no news."""

    def __init__(self) -> None:
        super().__init__()
        self._kinds: dict[tuple[str, Any], tuple[float, int]] = {}
        """Beginning and exception of a line -> when it was logged, how often it was not since."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether to log a record."""
        error = record.exc_info[1] if record.exc_info else None
        message = record.getMessage()
        # The tracebacks of requests cancelled by a shutdown are no errors. A request's is an
        # exception; the application's own is only a text.
        if isinstance(error, asyncio.CancelledError) or asyncio.CancelledError.__name__ in message:
            return False
        first = message.partition("\n")[0]
        kind = (first, type(error))
        now = time.monotonic()
        last, kept = self._kinds.get(kind, (-REPEAT_S, 0))
        if now - last < REPEAT_S:
            self._kinds[kind] = (last, kept + 1)
            return False
        self._kinds[kind] = (now, 0)
        if isinstance(error, OSError):  # of the system, such as a lack of descriptors
            record.exc_info, message = None, f"{first}: {error}"
        record.msg, record.args = message + (f" ({kept} times more)" if kept else ""), None
        return True


_log = logging.getLogger("uvicorn.error")
_repeats = Repeats()
