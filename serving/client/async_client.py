"""The client for asyncio: one connection, any number of plans and control operations at once.

async with AsyncPlanner("tcp://127.0.0.1:5571") as planner:
    async for event in planner.stream(Ask(prompt="Bring the cup.", stream="steps")): ...
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator
from types import TracebackType
from typing import Any, Self

import zmq
import zmq.asyncio
from msgspec import structs
from zmq.utils.monitor import parse_monitor_message

from thor_dflash.core.errors import PlanError
from thor_dflash.serving.client import retry
from thor_dflash.serving.client.retry import Options, Reply, Tries
from thor_dflash.serving.protocol import messages

Inbox = asyncio.Queue[tuple[bytes, Reply] | PlanError]

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
        self._endpoint = endpoint
        self._context = zmq.asyncio.Context()
        # Any: pyzmq's type annotations of asyncio sockets are incomplete.
        self._socket: Any = self._context.socket(zmq.DEALER)
        try:
            retry.prepare(self._socket, self.options)
            self._monitor = self._socket.get_monitor_socket(retry.WATCHED)
            retry.connect(self._socket, endpoint)
        except BaseException:
            self._context.destroy(linger=0)  # as in client.py
            raise
        self._seen = 0
        self._inboxes: dict[str, Inbox] = {}
        self._waiting: dict[str, list[Tries]] = {}
        """The asks of each session that no server has taken yet, in the order they began."""
        self._closed = asyncio.Event()
        self._refused = asyncio.Event()
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._watch())]

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def plan(self, ask: messages.PlanRequest) -> messages.Result:
        """Answer an ask with its result.

        Raises:
            PlanError: it was refused or could not be finished.
        """
        async for event in self.stream(structs.replace(ask, stream=False)):
            if isinstance(event, messages.Result):
                return event
        raise AssertionError("a stream ends with its result")

    def stream(self, ask: messages.PlanRequest) -> AsyncIterator[messages.Event]:
        """Answer an ask piece by piece; the last event is the result. Close it to cancel. The
        deadline begins with this call.

        An ask that is to be sent again is `preempted` instead if a later one of its session was
        taken or is on its way: it would displace that one. An ask with `preempt` none displaces
        nothing.
        """
        return self._tried(ask, Tries(self.options, ask))

    async def _tried(
        self, ask: messages.PlanRequest, tries: Tries
    ) -> AsyncGenerator[messages.Event]:
        tries.since = time.monotonic()
        session = self.options.session if ask.session is None else ask.session
        asks = self._waiting.setdefault(session, [])
        asks.append(tries)
        try:
            first, events = await self._begin(tries, asks)
            for older in asks[: asks.index(tries)]:
                older.displaced = True
        finally:
            asks.remove(tries)
            if not asks:
                del self._waiting[session]
        try:
            yield first
            async for event in events:
                yield event
        finally:
            await events.aclose()

    async def _begin(
        self, tries: Tries, asks: list[Tries]
    ) -> tuple[messages.Event, AsyncGenerator[messages.Event]]:
        """Return the first event of an ask and the remaining ones."""
        while True:
            events = self._events(tries)
            try:
                return await anext(events), events
            except PlanError as e:
                await self._wait(tries, e)
                if tries.displaces and (tries.displaced or asks[-1] is not tries):
                    text = "a later plan of its session arrived"
                    raise PlanError("preempted", text) from e

    async def call(self, request: messages.Request) -> dict[str, Any]:
        """Run a control operation.

        Raises:
            PlanError: it was refused, or no server answered.
        """
        tries = Tries(self.options, request)
        while True:
            try:
                return await self._table(tries)
            except PlanError as e:
                await self._wait(tries, e)

    async def simple(self, op: str) -> dict[str, Any]:
        """Run a control operation without arguments: hello, ping, health, stats, ..."""
        return await self.call(messages.Simple(op=op))

    async def _wait(self, tries: Tries, error: PlanError) -> None:
        try:
            async with asyncio.timeout(tries.again(error)):
                await self._closed.wait()
        except TimeoutError:
            return
        raise retry.closed(self._endpoint) from error

    async def _table(self, tries: Tries) -> dict[str, Any]:
        sent = tries.send()
        inbox = self._inboxes[sent.id] = Inbox()
        try:
            await self._send(sent.body, tries.connect_by)
            body, reply = await self._next(inbox, tries)
            return retry.table(self.options, body, reply)
        finally:
            del self._inboxes[sent.id]

    async def _events(self, tries: Tries) -> AsyncGenerator[messages.Event]:
        sent, over = tries.send(), False
        inbox = self._inboxes[sent.id] = Inbox()
        try:
            await self._send(sent.body, tries.connect_by)
            while not over:
                body, reply = await self._next(inbox, tries)
                over = reply.type != "chunk"
                yield retry.event(self.options, body, reply)
                tries.since = time.monotonic()
        finally:
            del self._inboxes[sent.id]
            if not (over or self._closed.is_set()):
                self._farewell(tries.farewell(sent))

    def _farewell(self, cancel: bytes) -> None:
        # Sent at once, before this returns: the event loop may be about to close.
        sent = asyncio.ensure_future(self._socket.send(cancel, zmq.NOBLOCK))
        # If it failed, the connection is gone, and the server cancels the plan for that reason.
        sent.add_done_callback(_heard)

    async def _send(self, body: bytes, until: float) -> None:
        if self._closed.is_set():
            raise retry.closed(self._endpoint)
        if self._refused.is_set():
            self._refused.clear()
            self._seen = 0
            retry.reconnect(self._socket, self._endpoint)
        # Without an empty delimiter frame; the answer then has none: see protocol.md, section 1.
        sending = asyncio.ensure_future(self._socket.send(body))
        refused = asyncio.ensure_future(self._refused.wait())
        try:
            await asyncio.wait(
                [sending, refused],
                timeout=until - time.monotonic(),
                return_when=asyncio.FIRST_COMPLETED,
            )
            if self._closed.is_set():  # closing the client has cancelled the send
                raise retry.closed(self._endpoint)
            if not sending.done():
                raise retry.unreachable(self._endpoint, self._seen)
            sending.result()
        finally:
            sending.cancel()
            refused.cancel()

    async def _next(self, inbox: Inbox, tries: Tries) -> tuple[bytes, Reply]:
        try:
            async with asyncio.timeout(tries.until - time.monotonic()):
                item = await inbox.get()
        except TimeoutError:
            raise tries.late(self._endpoint, self._seen) from None
        if isinstance(item, PlanError):
            raise item
        return item

    async def _read(self) -> None:
        while True:
            frames = await self._socket.recv_multipart()
            try:
                reply = retry.head(self.options, frames[-1])
            except PlanError:
                continue  # not a TDP/1 message, so it answers no request of this client
            inbox = self._inboxes.get(reply.id or "")
            if inbox is not None:
                inbox.put_nowait((frames[-1], reply))

    async def _watch(self) -> None:
        while True:
            event = int(parse_monitor_message(await self._monitor.recv_multipart())["event"])
            self._seen = retry.after(self._seen, event)
            if self._seen & retry.REFUSED:
                self._refused.set()
            if self._seen == zmq.EVENT_DISCONNECTED:
                why, waiting = self._seen, list(self._inboxes.values())
                await asyncio.sleep(GRACE_S)
                for inbox in waiting:
                    inbox.put_nowait(retry.unreachable(self._endpoint, why))

    async def close(self) -> None:
        """Close the connection. Pending requests fail at once as unreachable. Idempotent."""
        if self._closed.is_set():
            return
        self._closed.set()
        for inbox in self._inboxes.values():
            inbox.put_nowait(retry.closed(self._endpoint))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(retry.FAREWELL_MS)
        self._context.term()


def _heard(done: asyncio.Future[None]) -> None:
    if not done.cancelled():
        done.exception()
