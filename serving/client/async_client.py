"""The client for asyncio: one connection, any number of plans and control operations at once.

async with AsyncPlanner("tcp://127.0.0.1:5571") as planner:
    async for event in planner.stream(PlanRequest(prompt="Bring it.", stream="steps")): ...
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from typing import Any, Self

import zmq
import zmq.asyncio
from msgspec import structs

from thor_dflash.core.errors import PlanError
from thor_dflash.serving.client.connection import (
    MONITORED,
    REFUSED,
    client_closed,
    connect,
    event_of,
    next_state,
    prepare,
    reconnect,
    unreachable,
)
from thor_dflash.serving.client.options import Options
from thor_dflash.serving.client.retry import CANCEL_MS, Attempts, EncodedRequest, Reply
from thor_dflash.serving.protocol import messages

Inbox = asyncio.Queue[Reply | PlanError]

GRACE_S = 0.01
"""Wait after a lost connection, s, so that messages that arrived before the loss can be read: the
loss may be reported first."""


class AsyncPlanner:
    """See client.RemotePlanner. Make and use it on one event loop."""

    def __init__(self, endpoint: str, options: Options | None = None) -> None:
        """Begin to connect; the server may start later. An event loop must be running.

        Raises:
            ConfigError: a malformed endpoint, or keys that cannot be read.
        """
        self.options = options or Options()
        self.endpoint = endpoint
        self._context = zmq.asyncio.Context()
        # Any: pyzmq's type annotations of asyncio sockets are incomplete.
        self._socket: Any = self._context.socket(zmq.DEALER)
        try:
            prepare(self._socket, self.options)
            self._monitor = self._socket.get_monitor_socket(MONITORED)
            connect(self._socket, endpoint)
        except BaseException:
            self._context.destroy(linger=0)  # as in client.py
            raise
        self._seen = 0
        self._inboxes: dict[str, Inbox] = {}
        self._waiting: dict[str, list[Attempts]] = {}
        """The plans of each session that no server has taken yet, in the order they began."""
        self._closed = asyncio.Event()
        self._refused = asyncio.Event()
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._watch())]

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def plan(self, request: messages.PlanRequest) -> messages.Result:
        """Answer a request with its result.

        Raises:
            PlanError: it was refused or could not be finished.
        """
        async for event in self.stream(structs.replace(request, stream=False)):
            if isinstance(event, messages.Result):
                return event
        raise AssertionError("a stream ends with its result")

    def stream(self, request: messages.PlanRequest) -> AsyncGenerator[messages.Event]:
        """Answer a request piece by piece; the last event is the result. Close it to cancel. The
        deadline begins with this call.

        A plan that is to be sent again is `preempted` instead if a later one of its session was
        taken or is on its way: it would displace that one. A plan with `preempt` none
        displaces nothing.
        """
        return self._attempt(request, Attempts(self.options, request))

    async def _attempt(
        self, request: messages.PlanRequest, attempts: Attempts
    ) -> AsyncGenerator[messages.Event]:
        attempts.since = time.monotonic()
        session = attempts.session or ""
        waiting = self._waiting.setdefault(session, [])
        waiting.append(attempts)
        try:
            first, events = await self._begin(attempts, waiting)
            for older in waiting[: waiting.index(attempts)]:
                older.displaced = True
        finally:
            waiting.remove(attempts)
            if not waiting:
                del self._waiting[session]
        try:
            yield first
            async for event in events:
                yield event
        finally:
            await events.aclose()

    async def _begin(
        self, attempts: Attempts, waiting: list[Attempts]
    ) -> tuple[messages.Event, AsyncGenerator[messages.Event]]:
        """Return the first event of a plan and the remaining ones."""
        while True:
            events = self._events(attempts)
            try:
                return await anext(events), events
            except PlanError as e:
                await self._wait(attempts, e)
                if attempts.displaces and (attempts.displaced or waiting[-1] is not attempts):
                    text = "a later plan of its session arrived"
                    raise PlanError("preempted", text) from e

    async def call(self, request: messages.Request) -> dict[str, Any]:
        """Run a control operation.

        Raises:
            PlanError: it was refused, or no server answered.
        """
        attempts = Attempts(self.options, request)
        while True:
            try:
                return await self._table(attempts)
            except PlanError as e:
                await self._wait(attempts, e)

    async def simple(self, op: str) -> dict[str, Any]:
        """Run a control operation without arguments: hello, ping, health, stats, ..."""
        return await self.call(messages.Simple(op=op))

    async def ping(self) -> dict[str, Any]:
        """Check that a server answers."""
        return await self.simple("ping")

    async def hello(self) -> dict[str, Any]:
        """Describe the server: model, limits, features."""
        return await self.simple("hello")

    async def health(self) -> dict[str, Any]:
        """Return the state of the server."""
        return await self.simple("health")

    async def stats(self) -> dict[str, Any]:
        """Return the server's statistics."""
        return await self.simple("stats")

    async def cancel(self, target: str, session: str | None = None) -> bool:
        """End a plan by its id. Returns whether there was such a plan. One of another client needs
        its session.
        """
        session = self.options.session if session is None else session
        answer = await self.call(messages.Cancel(target=target, session=session))
        return bool(answer["cancelled"])

    async def validate(self, request: messages.Validate) -> dict[str, Any]:
        """Count tokens and compile a schema, without decoding."""
        return await self.call(request)

    async def put_prefix(
        self, prefix_id: str, system: str, *, persist: bool = False
    ) -> dict[str, Any]:
        """Pin the state of a system prompt; with `persist` it outlives the server."""
        put = messages.PrefixPut(prefix_id=prefix_id, system=system, persist=persist)
        return await self.call(put)

    async def prefixes(self) -> list[dict[str, Any]]:
        """List the pinned prefixes."""
        found: list[dict[str, Any]] = (await self.simple("prefix.list"))["prefixes"]
        return found

    async def skipped(self) -> list[str]:
        """One line for each persisted prefix that the server did not restore at its start."""
        found: list[str] = (await self.simple("prefix.list"))["skipped"]
        return found

    async def drop_prefix(self, prefix_id: str) -> bool:
        """Drop a pinned prefix. Returns whether it existed."""
        return bool((await self.call(messages.PrefixDrop(prefix_id=prefix_id)))["dropped"])

    async def drop_session(self, session: str, cache_scope: str | None = None) -> int:
        """Free the states kept of a conversation that has ended. Returns how many there were."""
        drop = messages.SessionDrop(session=session, cache_scope=cache_scope)
        return int((await self.call(drop))["boundaries"])

    async def drain(self) -> None:
        """Make the server finish its accepted work and take no more."""
        await self.simple("drain")

    async def shutdown(self) -> None:
        """Make the server drain and end."""
        await self.simple("shutdown")

    async def _wait(self, attempts: Attempts, error: PlanError) -> None:
        try:
            async with asyncio.timeout(attempts.retry_delay(error)):
                await self._closed.wait()
        except TimeoutError:
            return
        raise client_closed(self.endpoint) from error

    async def _table(self, attempts: Attempts) -> dict[str, Any]:
        sent = attempts.send()
        inbox = self._inboxes[sent.id] = Inbox()
        try:
            await self._send(sent, attempts)
            return (await self._next(inbox, attempts)).table()
        finally:
            del self._inboxes[sent.id]

    async def _events(self, attempts: Attempts) -> AsyncGenerator[messages.Event]:
        sent, over = attempts.send(), False
        inbox = self._inboxes[sent.id] = Inbox()
        try:
            await self._send(sent, attempts)
            while not over:
                reply = await self._next(inbox, attempts)
                over = reply.type != "chunk"
                yield reply.event()
                attempts.since = time.monotonic()
        finally:
            del self._inboxes[sent.id]
            if not (over or self._closed.is_set()):
                self._send_cancel(attempts.cancel_of(sent))

    def _send_cancel(self, cancel: bytes) -> None:
        # Sent at once, before this returns: the event loop may be about to close.
        sent = asyncio.ensure_future(self._socket.send(cancel, zmq.NOBLOCK))
        # If it failed, the connection is gone, and the server cancels the plan for that reason.
        sent.add_done_callback(_ignore_failure)

    async def _send(self, sent: EncodedRequest, attempts: Attempts) -> None:
        if self._closed.is_set():
            raise client_closed(self.endpoint)
        if self._refused.is_set():
            self._refused.clear()
            self._seen = 0
            reconnect(self._socket, self.endpoint)
        # Without an empty delimiter frame; the answer then has none: see protocol.md, section 1.
        sending = asyncio.ensure_future(self._socket.send(sent.body))
        refused = asyncio.ensure_future(self._refused.wait())
        try:
            await asyncio.wait(
                [sending, refused],
                timeout=attempts.connect_by - time.monotonic(),
                return_when=asyncio.FIRST_COMPLETED,
            )
            if self._closed.is_set():  # closing the client has cancelled the send
                raise client_closed(self.endpoint)
            if not sending.done():
                raise attempts.connect_error(self.endpoint, self._seen)
            sending.result()
        finally:
            sending.cancel()
            refused.cancel()

    async def _next(self, inbox: Inbox, attempts: Attempts) -> Reply:
        try:
            async with asyncio.timeout(attempts.until - time.monotonic()):
                item = await inbox.get()
        except TimeoutError:
            raise attempts.timeout_error(self.endpoint, self._seen) from None
        if isinstance(item, PlanError):
            raise item
        return item

    async def _read(self) -> None:
        while True:
            frames = await self._socket.recv_multipart()
            try:
                reply = Reply.read(self.options.codec, frames[-1])
            except PlanError:
                continue  # not a TDP/1 message, so it answers no request of this client
            inbox = self._inboxes.get(reply.id or "")
            if inbox is not None:
                inbox.put_nowait(reply)

    async def _watch(self) -> None:
        while True:
            event = event_of(await self._monitor.recv_multipart())
            self._seen = next_state(self._seen, event)
            if self._seen & REFUSED:
                self._refused.set()
            if self._seen == zmq.EVENT_DISCONNECTED:
                seen, inboxes = self._seen, list(self._inboxes.values())
                await asyncio.sleep(GRACE_S)
                for inbox in inboxes:
                    inbox.put_nowait(unreachable(self.endpoint, seen, sent=True))

    async def close(self) -> None:
        """Close the connection. Pending requests fail at once as unreachable. Idempotent."""
        if self._closed.is_set():
            return
        self._closed.set()
        for inbox in self._inboxes.values():
            inbox.put_nowait(client_closed(self.endpoint))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(CANCEL_MS)
        self._context.term()


def _ignore_failure(done: asyncio.Future[None]) -> None:
    if not done.cancelled():
        done.exception()
