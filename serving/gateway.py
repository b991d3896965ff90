"""OpenAI-compatible HTTP as a thin client of plan servers. Holds no model and no state."""

from __future__ import annotations

import asyncio
import math
import socket
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from thor_dflash.errors import ConfigError, PlanError
from thor_dflash.serve_config import GatewayConfig
from thor_dflash.serving import metrics, openai, security, wire
from thor_dflash.serving.fleet import Fleet, Said

BODY_BYTES = 1 << 20
"""Largest request body: the plan socket takes no larger message either."""
LOOK_S = 0.25
"""Between two looks whether the client still waits for its answer."""
MODEL = "thor-dflash"
"""Name of the model where its server did not say."""


def listen_at(config: GatewayConfig) -> tuple[str, int]:
    """Host and port to listen at.

    Raises:
        ConfigError: malformed, or open to others without leave.
    """
    host, _, port = config.listen.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"gateway.listen must be HOST:PORT (got {config.listen})")
    if not (security.is_local(f"tcp://{host}:{port}") or config.insecure):
        raise ConfigError(
            f"gateway.listen must be loopback, or have gateway.insecure (got {config.listen})"
        )
    return host.strip("[]"), int(port)


def listener(config: GatewayConfig) -> socket.socket:
    """The socket of HTTP, listening. uvicorn would end the process where it cannot have one.

    Raises:
        ConfigError: as `listen_at`, or the address is taken or not of this machine.
    """
    host, port = listen_at(config)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except (OSError, UnicodeError) as e:
        raise ConfigError(f"gateway.listen must be a free address (got: {e})") from e


def application(config: GatewayConfig) -> Starlette:
    """The ASGI application."""
    gateway = Gateway(config)
    return Starlette(
        routes=[
            Route("/v1/chat/completions", gateway.chat, methods=["POST"]),
            Route("/v1/models", gateway.models),
            Route("/health", gateway.health),
            Route("/metrics", gateway.metrics),
        ],
        exception_handlers={HTTPException: _no_route},
        lifespan=gateway.lifespan,
    )


class Gateway:
    """The routes."""

    def __init__(self, config: GatewayConfig) -> None:
        self._config = config
        self._fleet: Fleet | None = None

    @asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncGenerator[None]:
        """Connected while the application runs."""
        self._fleet = Fleet(self._config)
        try:
            yield
        finally:
            await self._fleet.close()

    @property
    def fleet(self) -> Fleet:
        """The servers."""
        assert self._fleet is not None, "the application has not started"
        return self._fleet

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        asked = None
        try:
            asked = openai.read(await _body(request))
            ask = openai.ask_of(asked)
            if asked.model and not await self.fleet.knows(asked.model):
                return _no_model(asked.model, {member.model for member in self.fleet.members})
            events = self.fleet.stream(ask, asked.model)
            # The first event decides the status line; refusals come before any chunk.
            member, first = await _while_there(request, events)
        except PlanError as e:
            return _refused(e, asked)
        except ClientDisconnect:
            return Response(status_code=499)
        answer = openai.Answer(member.model or MODEL)
        if asked.stream:
            usage = asked.stream_options is not None and asked.stream_options.include_usage
            pieces = _pieces(first, events, answer, usage=usage)
            return StreamingResponse(pieces, media_type="text/event-stream")
        assert isinstance(first, wire.Result), first
        await events.aclose()  # or its server counted as busy until this is collected
        return _json(openai.completion(answer, first))

    async def models(self, request: Request) -> Response:
        """GET /v1/models."""
        data = [
            {"id": name, "object": "model", "created": 0, "owned_by": MODEL}
            for name in self.fleet.models()
        ]
        return _json({"object": "list", "data": data})

    async def health(self, request: Request) -> Response:
        """GET /health: 200 while one server is ready."""
        found = await self.fleet.everywhere("health")
        ready = any(health is not None and health["ready"] for _, health in found)
        servers = {member.endpoint: health for member, health in found}
        return _json({"ready": ready, "servers": servers}, 200 if ready else 503)

    async def metrics(self, request: Request) -> Response:
        """GET /metrics."""
        found = await self.fleet.everywhere("stats")
        text = metrics.render([(member.endpoint, stats) for member, stats in found])
        return Response(text, media_type="text/plain; version=0.0.4")


async def _no_route(request: Request, e: Exception) -> Response:
    # An Exception by starlette's types, and never another than it was registered for.
    assert isinstance(e, HTTPException), e
    text = f"{request.method} {request.url.path} must be a route of the gateway (got: {e.detail})"
    reply = _refused(PlanError("bad_request", text), status=e.status_code)
    reply.headers.update(e.headers or {})
    return reply


async def _while_there(request: Request, events: AsyncIterator[Said]) -> Said:
    """The first event, unless the client leaves before: then the plan is cancelled.

    Raises:
        ClientDisconnect: it left.
    """
    first = asyncio.ensure_future(anext(events))
    while not (await asyncio.wait([first], timeout=LOOK_S))[0]:
        if await request.is_disconnected():
            first.cancel()
            await asyncio.wait([first])
            raise ClientDisconnect
    return first.result()


async def _pieces(
    first: wire.Event, events: AsyncGenerator[Said], answer: openai.Answer, *, usage: bool
) -> AsyncGenerator[bytes]:
    # Closed by starlette when the reader leaves; closing `events` cancels the plan.
    try:
        yield _sse(openai.delta(answer, role="assistant", content=""))
        for piece in _of_event(first, answer, usage=usage):
            yield _sse(piece)
        async for _, event in events:
            for piece in _of_event(event, answer, usage=usage):
                yield _sse(piece)
        yield b"data: [DONE]\n\n"
    except PlanError as e:
        yield _sse(openai.error(e))
    finally:
        await events.aclose()


def _of_event(event: wire.Event, answer: openai.Answer, *, usage: bool) -> list[dict[str, Any]]:
    if isinstance(event, wire.Chunk):
        if event.text is None:
            return []
        name = "reasoning_content" if event.kind == "thinking" else "content"
        return [openai.delta(answer, **{name: event.text})]
    last = [openai.ending(answer, event)]
    return [*last, openai.counted(answer, event)] if usage else last


async def _body(request: Request) -> bytes:
    pieces: list[bytes] = []
    async for piece in request.stream():
        pieces.append(piece)
        if sum(map(len, pieces)) > BODY_BYTES:
            raise PlanError("too_large", f"the body must be <= {BODY_BYTES} bytes (got more)")
    return b"".join(pieces)


def _sse(value: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def _refused(
    e: PlanError, asked: openai.Completion | None = None, *, status: int | None = None
) -> Response:
    """An error as a whole answer."""
    reply = _json(openai.error(e, asked), status or openai.STATUS[e.code])
    # OpenAI's clients obey it before they judge by the status, and try again after any 408 and 409:
    # a plan that made way for a newer one would come back and displace that one.
    reply.headers["x-should-retry"] = "true" if e.retryable else "false"
    if e.retry_after_ms is not None:
        # Whole seconds are all it can say, and 0 would have the client come back at once.
        reply.headers["Retry-After"] = str(max(1, math.ceil(e.retry_after_ms / 1e3)))
    return reply


def _no_model(name: str, known: set[str]) -> Response:
    reply = _json(openai.no_model(name, known), 404)
    reply.headers["x-should-retry"] = "false"
    return reply


def _json(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")
