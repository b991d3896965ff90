"""An OpenAI-compatible HTTP front end to plan servers. Holds no model and no state."""

from __future__ import annotations

import asyncio
import math
import socket
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import msgspec
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from thor_dflash.config.serving import GatewayConfig
from thor_dflash.core.errors import ConfigError, PlanError
from thor_dflash.core.message_text import cut, visible
from thor_dflash.serving.client.retry import with_time_left
from thor_dflash.serving.gateway import metrics, openai_api
from thor_dflash.serving.gateway.server_pool import PoolEvent, ServerPool
from thor_dflash.serving.protocol import messages
from thor_dflash.serving.protocol.errors import bad_request
from thor_dflash.serving.transport.endpoints import is_local

BODY_BYTES = 1 << 20
"""Largest request body, bytes: as much as a plan server takes by default (serve.max_message)."""
BODY_S = 10.0
"""Longest time in which a request body must have come."""
DISCARDED = 64 << 20
"""Bytes of a body that is too large that are read all the same: a client that is still sending when
its connection closes may lose the answer."""
LOOK_S = 0.25
"""Interval of the checks whether the client is still connected."""
MODEL = "thor-dflash"
"""Model name to report where that of the server is not known."""


def listen_at(config: GatewayConfig) -> tuple[str, int]:
    """Return the host and port to listen on.

    Raises:
        ConfigError: malformed, or not loopback and gateway.insecure is not set.
    """
    host, _, port = config.listen.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"gateway.listen must be HOST:PORT (got {config.listen})")
    if not (is_local(f"tcp://{host}:{port}") or config.insecure):
        raise ConfigError(
            f"gateway.listen must be loopback, or have gateway.insecure (got {config.listen})"
        )
    return host.strip("[]"), int(port)


def listener(config: GatewayConfig) -> socket.socket:
    """Return the listening HTTP socket. Made here because uvicorn ends the process if it cannot
    bind.

    Raises:
        ConfigError: as `listen_at`, or the address is in use or not local to this machine.
    """
    host, port = listen_at(config)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except (OSError, UnicodeError) as e:
        raise ConfigError(f"gateway.listen must be a free address (got: {e})") from e


def application(config: GatewayConfig) -> Starlette:
    """Return the ASGI application."""
    gateway = Gateway(config)
    return Starlette(
        routes=[
            Route("/v1/chat/completions", gateway.chat, methods=["POST"]),
            Route("/v1/models", gateway.models),
            Route("/v1/models/{id:path}", gateway.model),  # a name may hold a slash
            Route("/health", gateway.health),
            Route("/metrics", gateway.metrics),
        ],
        middleware=[] if config.insecure else [Middleware(LoopbackNames)],
        lifespan=gateway.lifespan,
    )


class LoopbackNames:
    """Refuses requests for a host that is not this machine's loopback. A web page may let its own
    name resolve to 127.0.0.1; to the browser the gateway then belongs to that page (DNS rebinding).
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer it with status 421."""
        if scope["type"] == "http":
            host = Headers(scope=scope).get("host")
            if host is not None and not _is_loopback(host):  # a browser always names one
                rule = "the host must be a loopback name without gateway.insecure"
                text = f"{rule} (got {visible(cut(host)) or 'none'})"
                await _refused(bad_request(text), status=421)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _is_loopback(host: str) -> bool:
    """Whether a Host header names this machine's loopback interface."""
    try:
        name = urlsplit(f"//{host}").hostname
    except ValueError:
        return False
    return name is not None and is_local(f"tcp://{name}:0")


class Gateway:
    """The handlers of the routes."""

    def __init__(self, config: GatewayConfig) -> None:
        self._config = config
        self._pool: ServerPool | None = None

    @asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncGenerator[None]:
        """Keep the connections to the servers open while the application runs."""
        self._pool = ServerPool(self._config)
        try:
            yield
        finally:
            await self._pool.close()

    @property
    def pool(self) -> ServerPool:
        """The servers."""
        assert self._pool is not None, "the application has not started"
        return self._pool

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        chat, body = None, RequestBody()
        try:
            text = await body.read(request)
            _check_kind(request)
            chat = openai_api.read(text)
            plan, arrived = openai_api.plan_request(chat), time.monotonic()
            if chat.model and not await self.pool.knows(chat.model):
                return self._no_model(chat.model)
            # A server that has not yet named its model may have been waited for.
            events = self.pool.stream(with_time_left(plan, arrived), chat.model)
            # Wait for the first event before the status line: a refusal precedes any chunk.
            member, first = await _while_there(request, events)
        except PlanError as e:
            if chat is not None and chat.model and not self.pool.serves(chat.model):
                return self._no_model(chat.model)
            reply = _refused(e, chat)
            if not body.ended:  # else the connection would wait for the rest of it
                reply.headers["Connection"] = "close"
            return reply
        except ClientDisconnect:
            return Response(status_code=499)
        answer = openai_api.ResponseHeader(member.model or MODEL)
        if chat.stream:
            usage = chat.stream_options is not None and chat.stream_options.include_usage
            pieces = _pieces(first, events, answer, usage=usage)
            return StreamingResponse(pieces, media_type="text/event-stream")
        assert isinstance(first, messages.Result), first
        await events.aclose()  # else its server counts as busy until garbage collection
        return _json(openai_api.completion(answer, first))

    async def models(self, request: Request) -> Response:
        """GET /v1/models."""
        data = [_model(name) for name in self.pool.models()]
        return _json({"object": "list", "data": data})

    async def model(self, request: Request) -> Response:
        """GET /v1/models/NAME: a model of any server, ready or not, as in the list."""
        name = request.path_params["id"]
        if not name:  # the list, with a slash at its end
            return await self.models(request)
        try:
            known = await self.pool.knows(name)
        except PlanError as e:
            return _refused(e)
        if not known:
            return self._no_model(name)
        return _json(_model(name))

    def _no_model(self, name: str) -> Response:
        known = {member.model for member in self.pool.members}
        reply = _json(openai_api.no_model(name, known), 404)
        reply.headers["x-should-retry"] = "false"
        return reply

    async def health(self, request: Request) -> Response:
        """GET /health: 200 if at least one server is ready, else 503."""
        found = await self.pool.everywhere("health")
        ready = any(health is not None and health["ready"] for _, health in found)
        servers = {member.endpoint: health for member, health in found}
        return _json({"ready": ready, "servers": servers}, 200 if ready else 503)

    async def metrics(self, request: Request) -> Response:
        """GET /metrics."""
        found = await self.pool.everywhere("stats")
        text = metrics.render([(member.endpoint, stats) for member, stats in found])
        return Response(text, media_type="text/plain; version=0.0.4")


async def _while_there(request: Request, events: AsyncIterator[PoolEvent]) -> PoolEvent:
    """Return the first event. If the client disconnects before it, cancel the plan.

    Raises:
        ClientDisconnect: the client disconnected.
    """
    first = asyncio.ensure_future(anext(events))
    try:
        while not (await asyncio.wait([first], timeout=LOOK_S))[0]:
            if await request.is_disconnected():
                raise ClientDisconnect
    except BaseException:  # also a shutdown that cancels this request
        first.cancel()
        await asyncio.wait([first])
        raise
    return first.result()


async def _pieces(
    first: messages.Event,
    events: AsyncGenerator[PoolEvent],
    answer: openai_api.ResponseHeader,
    *,
    usage: bool,
) -> AsyncGenerator[bytes]:
    # Starlette closes this when the client disconnects; closing `events` then cancels the plan.
    try:
        yield _sse(openai_api.delta(answer, role="assistant", content=""))
        seq = _check_next(first, 0)
        for piece in _of_event(first, answer, usage=usage):
            yield _sse(piece)
        async for _, event in events:
            seq = _check_next(event, seq)
            for piece in _of_event(event, answer, usage=usage):
                yield _sse(piece)
        yield b"data: [DONE]\n\n"
    except PlanError as e:
        yield _sse(openai_api.error(e))
    finally:
        await events.aclose()


def _check_next(event: messages.Event, seq: int) -> int:
    """Return the number of the event after this one, which must have the number `seq`.

    Raises:
        PlanError: others before it were dropped, as a server does for a slow reader.
    """
    if event.seq != seq:
        rule = "the gateway must keep up with its plan server, which dropped pieces of the stream"
        raise PlanError("cancelled", f"{rule} (got {event.seq - seq} less)")
    return seq + 1


def _of_event(
    event: messages.Event, answer: openai_api.ResponseHeader, *, usage: bool
) -> list[dict[str, Any]]:
    if isinstance(event, messages.Chunk):
        if event.text is None:
            return []
        name = "reasoning_content" if event.kind == "thinking" else "content"
        return [openai_api.delta(answer, **{name: event.text})]
    last = [openai_api.ending(answer, event)]
    return [*last, openai_api.counted(answer, event)] if usage else last


def _check_kind(request: Request) -> None:
    """Refuse a body that any web page could send: for JSON a browser first asks whether pages of
    other sites may send it, and no answer of this gateway allows that.

    Raises:
        PlanError: bad_request.
    """
    kind = request.headers.get("content-type", "nothing")
    if kind.partition(";")[0].strip().lower() != "application/json":
        text = f"content-type must be application/json (got {visible(cut(kind))})"
        raise bad_request(text)


@dataclass(slots=True)
class RequestBody:
    """The body of a request while it is read."""

    ended: bool = False

    async def read(self, request: Request) -> bytes:
        """Return it when it has come.

        Raises:
            PlanError: it is too large, or does not come in time.
        """
        found, size = bytearray(), 0
        try:
            async with asyncio.timeout(BODY_S):
                async for piece in request.stream():
                    size += len(piece)
                    if size <= BODY_BYTES:
                        found += piece
                    elif size > DISCARDED:
                        break
                else:
                    self.ended = True
        except TimeoutError as e:
            text = f"the body must come within {BODY_S:g} s (got {size} bytes of it)"
            raise bad_request(text) from e
        if size > BODY_BYTES:
            raise PlanError("too_large", f"the body must be <= {BODY_BYTES} bytes (got more)")
        return bytes(found)


def _sse(value: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def _refused(
    e: PlanError, chat: openai_api.ChatRequest | None = None, *, status: int | None = None
) -> Response:
    """Return an error as an HTTP response."""
    reply = _json(openai_api.error(e, chat), status or openai_api.STATUS[e.code])
    # OpenAI's clients obey this header before they look at the status; without it they retry every
    # 408 and 409, so a plan displaced by a newer one would be sent again and displace the newer.
    reply.headers["x-should-retry"] = "true" if e.retryable else "false"
    if e.retry_after_ms is not None:
        # Retry-After is in whole seconds, and 0 would make the client retry at once.
        reply.headers["Retry-After"] = str(max(1, math.ceil(e.retry_after_ms / 1e3)))
    return reply


def _model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": MODEL}


def _json(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")
