"""An OpenAI-compatible HTTP front end to plan servers. Holds no model and no state."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from thor_dflash.config.serving import GatewayConfig
from thor_dflash.core.bounds import IMAGES_BYTES
from thor_dflash.core.errors import PlanError
from thor_dflash.core.message_text import cut, visible
from thor_dflash.serving.client.retry import with_time_left
from thor_dflash.serving.gateway import auth, metrics, openai_answers, openai_api, replies
from thor_dflash.serving.gateway.server_pool import PoolEvent, ServerPool
from thor_dflash.serving.protocol import messages
from thor_dflash.serving.protocol.errors import bad_request

LARGE = 16
"""Most bodies longer than max_body that are held at a time, as those with images are; more are
`busy`."""
MOST_IMAGES = 64
"""Most images that are looked for in a body."""
SMALL_BYTES = 1 << 16
"""Size of a body up to which it is decoded at once, in less than 10 ms."""
BODY_S = 10.0
"""Longest time in which a request body must have come."""
DISCARDED = 64 << 20
"""Bytes of a body that is too large that are read all the same: a client that is still sending when
its connection closes may lose the answer."""
LOOK_S = 0.25
"""Interval of the checks whether the client is still connected."""
MODEL = "thor-dflash"
"""Model name to report where that of the server is not known."""


def application(config: GatewayConfig) -> Starlette:
    """Return the ASGI application.

    Raises:
        ConfigError: as `auth.middleware`.
    """
    gateway = Gateway(config)
    return Starlette(
        routes=[
            Route("/v1/chat/completions", gateway.chat, methods=["POST"]),
            Route("/v1/models", gateway.models),
            Route("/v1/models/{id:path}", gateway.model),  # a name may hold a slash
            Route("/health", gateway.health),
            Route("/metrics", gateway.metrics),
        ],
        middleware=auth.middleware(config),
        exception_handlers={404: _not_served, 405: _not_served},
        lifespan=gateway.lifespan,
    )


async def _not_served(request: Request, error: Exception) -> Response:
    """Answer a request for a path or with a method that no route has."""
    assert isinstance(error, HTTPException)
    path, allowed = request.url.path, (error.headers or {}).get("Allow", "")
    if error.status_code == 405:
        return replies.no_method(request.method, path, allowed)
    routes = [route.path for route in request.app.routes if "{" not in route.path]
    return replies.no_path(path, routes)


class Gateway:
    """The handlers of the routes."""

    def __init__(self, config: GatewayConfig) -> None:
        self._config = config
        self._pool: ServerPool | None = None
        self._reading = asyncio.Lock()
        self._large = set[RequestBody]()
        """Bodies longer than max_body that are held."""
        self._salt = secrets.token_bytes(16)

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
        chat, body = None, RequestBody(self._config.max_body, self._large)
        try:
            with closing(body):
                text, arrived = await body.read(request), time.monotonic()
                _check_kind(request)
                chat = await self._read(text)
                plan = openai_api.plan_request(chat, self._caller(request))
            if chat.model and not await self.pool.knows(chat.model):
                return replies.no_model(chat.model, self.pool.known())
            # Other bodies, or a server that has not yet named its model, may have been waited for.
            events = self.pool.stream(with_time_left(plan, arrived), chat.model)
            # Wait for the first event before the status line: a refusal precedes any chunk.
            member, first = await _while_there(request, events)
        except PlanError as e:
            if chat is not None and chat.model and not self.pool.serves(chat.model):
                return replies.no_model(chat.model, self.pool.known())
            reply = replies.refused(e, chat)
            if not body.ended:  # else the connection would wait for the rest of it
                reply.headers["Connection"] = "close"
            return reply
        except ClientDisconnect:
            return Response(status_code=499)
        answer = openai_answers.ResponseHeader(member.model or MODEL)
        if chat.stream:
            usage = chat.stream_options is not None and chat.stream_options.include_usage
            pieces = _pieces(first, events, answer, usage=usage)
            return StreamingResponse(pieces, media_type="text/event-stream")
        assert isinstance(first, messages.Result), first
        await events.aclose()  # else its server counts as busy until garbage collection
        return replies.json(openai_answers.completion(answer, first))

    def _caller(self, request: Request) -> openai_api.Caller:
        """What a request is known by. The scope comes from the API key, never from the body, and
        tells the plan server nothing of the key.
        """
        key = auth.api_key(request.headers.get("authorization", ""))
        return openai_api.Caller(
            session=request.headers.get("x-session-id", ""),
            image_dir=self._config.image_dir,
            scope=hashlib.blake2b(key, key=self._salt, digest_size=16).hexdigest() if key else None,
        )

    async def _read(self, body: bytes) -> openai_api.ChatRequest:
        """Decode a body. Large ones are decoded one at a time, each with a pause as long after it:
        a flood of them leaves half of the time to other requests.

        Raises:
            PlanError: as `openai_api.read`.
        """
        if len(body) <= SMALL_BYTES:
            return openai_api.read(body)
        async with self._reading:
            began = time.monotonic()
            try:
                return openai_api.read(body)
            finally:
                await asyncio.sleep(time.monotonic() - began)

    async def models(self, request: Request) -> Response:
        """GET /v1/models."""
        data = [_model(name) for name in self.pool.models()]
        return replies.json({"object": "list", "data": data})

    async def model(self, request: Request) -> Response:
        """GET /v1/models/NAME: a model of any server, ready or not, as in the list."""
        name = request.path_params["id"]
        if not name:  # the list, with a slash at its end
            return await self.models(request)
        try:
            known = await self.pool.knows(name)
        except PlanError as e:
            return replies.refused(e)
        if not known:
            return replies.no_model(name, self.pool.known())
        return replies.json(_model(name))

    async def health(self, request: Request) -> Response:
        """GET /health: 200 if at least one server is ready, else 503."""
        found = await self.pool.everywhere("health")
        ready = any(health is not None and health["ready"] for _, health in found)
        servers = {member.endpoint: health for member, health in found}
        return replies.json({"ready": ready, "servers": servers}, 200 if ready else 503)

    async def metrics(self, request: Request) -> Response:
        """GET /metrics."""
        found = await self.pool.everywhere("stats")
        text = metrics.render(
            metrics.ServerStats(member.endpoint, member.model, stats) for member, stats in found
        )
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
    answer: openai_answers.ResponseHeader,
    *,
    usage: bool,
) -> AsyncGenerator[bytes]:
    # Starlette closes this when the client disconnects; closing `events` then cancels the plan.
    try:
        # Without content: clients take an empty one before tool calls for a message of its own.
        yield _sse(openai_answers.delta(answer, role="assistant"))
        seq = _check_next(first, 0)
        for piece in _of_event(first, answer, usage=usage):
            yield _sse(piece)
        async for _, event in events:
            seq = _check_next(event, seq)
            for piece in _of_event(event, answer, usage=usage):
                yield _sse(piece)
        yield b"data: [DONE]\n\n"
    except PlanError as e:
        yield _sse(replies.error(e))
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
    event: messages.Event, answer: openai_answers.ResponseHeader, *, usage: bool
) -> list[dict[str, Any]]:
    if isinstance(event, messages.Chunk):
        if event.call is not None:
            return openai_answers.call_deltas(answer, event.call)
        if event.text is None:
            return []
        name = "reasoning_content" if event.kind == "thinking" else "content"
        return [openai_answers.delta(answer, **{name: event.text})]
    last = [openai_answers.ending(answer, event)]
    return [*last, openai_answers.counted(answer, event)] if usage else last


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


@dataclass(slots=True, eq=False)
class RequestBody:
    """The body of a request while it is read."""

    most: int
    """Bytes, beside its images."""
    large: set[RequestBody]
    """Those with more bytes that are held, of all requests."""
    ended: bool = False

    async def read(self, request: Request) -> bytes:
        """Return it when it has come.

        Raises:
            PlanError: it is too large, or does not come in time, or there are too many like it.
        """
        found, size, longest = bytearray(), 0, self.most + IMAGES_BYTES
        try:
            async with asyncio.timeout(BODY_S):
                async for piece in request.stream():
                    size += len(piece)
                    if size <= self.most or (size <= longest and self._held()):
                        found += piece
                    elif size > DISCARDED:
                        break
                else:
                    self.ended = True
        except TimeoutError as e:
            text = f"the body must come within {BODY_S:g} s (got {size} bytes of it)"
            raise bad_request(text) from e
        if len(found) < size <= longest:
            text = f"bodies with images that are read at a time must be <= {LARGE} (got another)"
            raise PlanError("busy", text, retry_after_ms=1e3)
        if size > longest or (size > self.most and size - _image_bytes(found) > self.most):
            rule = f"<= {self.most} bytes without its images, gateway.max_body"
            raise PlanError("too_large", f"the body must be {rule} (got more)")
        return bytes(found)

    def close(self) -> None:
        """Hold it no longer."""
        self.large.discard(self)

    def _held(self) -> bool:
        """Whether a body of this size may be held."""
        if self not in self.large and len(self.large) < LARGE:
            self.large.add(self)
        return self in self.large


def _image_bytes(body: bytearray) -> int:
    """Bytes of the data: URLs in a body. No quote is in one."""
    found, at = 0, 0
    for _ in range(MOST_IMAGES):
        at = body.find(b'"data:image', at)
        end = body.find(b'"', at + 1)
        if min(at, end) < 0:
            break
        found, at = found + end - at, end
    return found


def _sse(value: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def _model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": MODEL}
