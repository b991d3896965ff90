"""The client: a planner that talks to a server. Needs pyzmq and msgspec, nothing else.

    with RemotePlanner("tcp://127.0.0.1:5571") as planner:
        plan = planner.plan(PlanRequest(prompt="Bring the cup.", deadline_ms=8000)).plan

A client belongs to one thread. A late reply is never taken for the answer to a later request: every
request has its own id, and the socket drops replies that do not belong to its last request.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import suppress
from typing import Any, Self

import zmq
from msgspec import structs

from thor_dflash.core.errors import PlanError
from thor_dflash.serving.client.connection import (
    MONITORED,
    REFUSED,
    ConnectError,
    client_closed,
    connect,
    event_of,
    next_state,
    prepare,
    reconnect,
    unreachable,
)
from thor_dflash.serving.client.options import Options
from thor_dflash.serving.client.retry import CANCEL_MS, Attempts, Reply
from thor_dflash.serving.protocol import messages


class _Connection:
    """A socket and the monitor of its connection."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], kind: int, endpoint: str, options: Options
    ) -> None:
        self._endpoint = endpoint
        self._socket = context.socket(kind)
        prepare(self._socket, options)
        if kind == zmq.REQ:
            self._socket.setsockopt(zmq.REQ_RELAXED, 1)
            self._socket.setsockopt(zmq.REQ_CORRELATE, 1)
        self._monitor = self._socket.get_monitor_socket(MONITORED)
        self._seen = 0
        self._lost = False
        """Whether the connection was lost since the last message to the server."""
        connect(self._socket, endpoint)

    def send(self, body: bytes, until: float, error: ConnectError = unreachable) -> None:
        """Send as soon as there is a connection.

        Raises:
            PlanError: what `error` returns: the server refused the connection, or there is none by
                `until`, monotonic s.
        """
        self._drain()
        self._lost = False
        if self._seen & REFUSED:
            self._seen = 0
            reconnect(self._socket, self._endpoint)
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLOUT)
        poller.register(self._monitor, zmq.POLLIN)
        while True:
            if self._socket in dict(poller.poll(_ms(until))):
                # Without waiting: the connection may have been lost since the poll. And without an
                # empty delimiter frame; the answer then has none: see protocol.md, section 1.
                with suppress(zmq.Again):
                    self._socket.send(body, zmq.NOBLOCK)
                    return
            self._drain()
            if self._seen & REFUSED or time.monotonic() >= until:
                raise error(self._endpoint, self._seen)

    def receive(self, attempts: Attempts) -> bytes:
        """Return the next body.

        Raises:
            PlanError: the connection was lost, or no answer came in time.
        """
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)
        while self._lost or poller.poll(_ms(attempts.until)):
            # Before reading: once the loss is reported, all that arrived before it can be read.
            self._drain()
            # The message may be a late answer to an earlier request; the socket then drops it.
            with suppress(zmq.Again):
                return self._socket.recv_multipart(zmq.NOBLOCK)[-1]
            if self._lost:
                break
        seen = zmq.EVENT_DISCONNECTED if self._lost else self._seen
        raise attempts.timeout_error(self._endpoint, seen)

    def _drain(self) -> None:
        """Read the pending connection events."""
        while self._monitor.poll(0):
            event = event_of(self._monitor.recv_multipart())
            self._seen = next_state(self._seen, event)
            self._lost = self._lost or self._seen == zmq.EVENT_DISCONNECTED

    def close(self, linger_ms: int = 0) -> None:
        if not self._socket.closed:
            # After a long idle time the monitor's pipe may be full and libzmq's thread blocked on
            # it; `disable_monitor` would then wait for that thread.
            self._drain()
            self._socket.disable_monitor()
            self._monitor.close(0)
            self._socket.close(linger_ms)


def _send_cancel(connection: _Connection, cancel: bytes) -> None:
    # If this fails, the connection is gone, and the server cancels the plan for that reason.
    with suppress(PlanError):
        connection.send(cancel, time.monotonic())


def _ms(until: float) -> int:
    """Return the ms left, at most what ZeroMQ can wait: a C int, 25 days."""
    return round(min(max(0.0, 1e3 * (until - time.monotonic())), 2**31 - 1))


class RemotePlanner:
    """See planner.Planner. Waits for the server to become ready, within the timeouts."""

    def __init__(self, endpoint: str, options: Options | None = None) -> None:
        """Begin to connect; the server may start later.

        Raises:
            ConfigError: a malformed endpoint, or keys that cannot be read.
        """
        self.options = options or Options()
        self.endpoint = endpoint
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self._control = _Connection(self._context, zmq.REQ, endpoint, self.options)
        except BaseException:
            # The caller cannot do it, and garbage collection of an open context waits for its
            # sockets for ever.
            self._context.destroy(linger=0)
            raise
        self._streams: set[_Connection] = set()
        """The connections of unfinished streams."""
        self._sessions: dict[str, str | None] = {}
        """Id of each unfinished stream -> its session. The server takes a cancel of another
        connection only with the session.
        """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # --- plans

    def plan(self, request: messages.PlanRequest) -> messages.Result:
        """See Planner."""
        reply = self._reply(structs.replace(request, stream=False))
        event = reply.event()
        if not isinstance(event, messages.Result):
            raise PlanError("internal", f"the server must send a result (got {reply.type})")
        return event

    def stream(self, request: messages.PlanRequest) -> Generator[messages.Event]:
        """See Planner. Each stream uses its own connection. The deadline begins with this call."""
        return self._attempt(Attempts(self.options, request))

    def _attempt(self, attempts: Attempts) -> Generator[messages.Event]:
        self._check_open()
        attempts.since = time.monotonic()
        while True:
            events = self._events(attempts)
            try:
                first = next(events)
            except PlanError as e:
                time.sleep(attempts.retry_delay(e))
                continue
            try:
                yield first
                yield from events
            finally:
                events.close()
            return

    def _events(self, attempts: Attempts) -> Generator[messages.Event]:
        sent, over = attempts.send(), False
        connection = _Connection(self._context, zmq.DEALER, self.endpoint, self.options)
        self._streams.add(connection)
        self._sessions[sent.id] = attempts.session
        try:
            connection.send(sent.body, attempts.connect_by, attempts.connect_error)
            while not over:
                self._check_open()
                reply = Reply.read(self.options.codec, connection.receive(attempts))
                if reply.id == sent.id:
                    over = reply.type != "chunk"
                    yield reply.event()
                    attempts.since = time.monotonic()
        finally:
            self._streams.discard(connection)
            del self._sessions[sent.id]
            if not (over or self._context.closed):
                _send_cancel(connection, attempts.cancel_of(sent))
            connection.close(0 if over else CANCEL_MS)

    def _check_open(self) -> None:
        if self._context.closed:
            raise client_closed(self.endpoint)

    # --- control

    def call(self, request: messages.Request) -> dict[str, Any]:
        """Run a control operation.

        Raises:
            PlanError: it was refused, or no server answered.
        """
        return self._reply(request).table()

    def simple(self, op: str) -> dict[str, Any]:
        """Run a control operation without arguments: hello, ping, health, stats, ..."""
        return self.call(messages.Simple(op=op))

    def ping(self) -> dict[str, Any]:
        """Check that a server answers."""
        return self.simple("ping")

    def hello(self) -> dict[str, Any]:
        """Describe the server: model, limits, features."""
        return self.simple("hello")

    def health(self) -> dict[str, Any]:
        """Return the state of the server."""
        return self.simple("health")

    def stats(self) -> dict[str, Any]:
        """Return the server's statistics."""
        return self.simple("stats")

    def cancel(self, target: str, session: str | None = None) -> bool:
        """End a plan by its id. Returns whether there was such a plan. One of another client needs
        its session.
        """
        if session is None:
            session = self._sessions.get(target, self.options.session)
        return bool(self.call(messages.Cancel(target=target, session=session))["cancelled"])

    def validate(self, request: messages.Validate) -> dict[str, Any]:
        """Count tokens and compile a schema, without decoding."""
        return self.call(request)

    def put_prefix(self, prefix_id: str, system: str, *, persist: bool = False) -> dict[str, Any]:
        """Pin the state of a system prompt; with `persist` it outlives the server."""
        return self.call(messages.PrefixPut(prefix_id=prefix_id, system=system, persist=persist))

    def prefixes(self) -> list[dict[str, Any]]:
        """List the pinned prefixes."""
        found: list[dict[str, Any]] = self.simple("prefix.list")["prefixes"]
        return found

    def skipped(self) -> list[str]:
        """One line for each persisted prefix that the server did not restore at its start."""
        found: list[str] = self.simple("prefix.list")["skipped"]
        return found

    def drop_prefix(self, prefix_id: str) -> bool:
        """Drop a pinned prefix. Returns whether it existed."""
        return bool(self.call(messages.PrefixDrop(prefix_id=prefix_id))["dropped"])

    def drop_session(self, session: str, cache_scope: str | None = None) -> int:
        """Free the states kept of a conversation that has ended. Returns how many there were."""
        drop = messages.SessionDrop(session=session, cache_scope=cache_scope)
        return int(self.call(drop)["boundaries"])

    def drain(self) -> None:
        """Make the server finish its accepted work and take no more."""
        self.simple("drain")

    def shutdown(self) -> None:
        """Make the server drain and end."""
        self.simple("shutdown")

    def close(self) -> None:
        """See Planner. Unfinished streams are closed, which cancels their plans."""
        if not self._context.closed:
            for connection in (self._control, *self._streams):
                connection.close()
            # Not `term`, which would wait for the socket of a connection whose constructor failed.
            self._context.destroy(linger=0)

    def _reply(self, request: messages.Request) -> Reply:
        self._check_open()
        attempts = Attempts(self.options, request)
        while True:
            try:
                return self._once(attempts)
            except PlanError as e:
                time.sleep(attempts.retry_delay(e))

    def _once(self, attempts: Attempts) -> Reply:
        sent = attempts.send()
        self._control.send(sent.body, attempts.connect_by, attempts.connect_error)
        try:
            reply = Reply.read(self.options.codec, self._control.receive(attempts))
        except BaseException:
            # The caller no longer waits for this plan: cancel it.
            if isinstance(attempts.request, messages.PlanRequest) and not self._context.closed:
                _send_cancel(self._control, attempts.cancel_of(sent))
            raise
        if reply.type == "error":
            raise reply.error()
        if reply.id != sent.id:
            raise PlanError("unreachable", f"the reply must be to {sent.id} (got {reply.id})")
        return reply
