"""HTTP replies: JSON, and errors as OpenAI's clients read them."""

from __future__ import annotations

import math

import msgspec
from starlette.responses import Response

from thor_dflash.core.errors import Code, PlanError
from thor_dflash.serving.client import LostRequest
from thor_dflash.serving.gateway import openai_api

AGAIN: frozenset[Code] = frozenset({"busy", "not_ready", "unreachable"})
"""Codes after which OpenAI's clients may send the same request again by themselves. They say how a
server is, not what a request does to it: one that ends a server must not end the next."""


def json(value: object, status: int = 200) -> Response:
    """Return a JSON reply."""
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def refused(
    e: PlanError, chat: openai_api.ChatRequest | None = None, *, status: int | None = None
) -> Response:
    """Return an error as an HTTP response."""
    reply = json(openai_api.error(e, chat), status or openai_api.STATUS[e.code])
    again = e.code in AGAIN and e.retryable and not isinstance(e, LostRequest)
    # OpenAI's clients obey this header before they look at the status; without it they retry every
    # 408, 409 and 5xx, so a plan displaced by a newer one would be sent again and displace it.
    reply.headers["x-should-retry"] = "true" if again else "false"
    if again and e.retry_after_ms is not None:
        # Retry-After is in whole seconds, and 0 would make the client retry at once.
        reply.headers["Retry-After"] = str(max(1, math.ceil(e.retry_after_ms / 1e3)))
    return reply


def no_model(name: str, known: set[str]) -> Response:
    """Return the reply to a request for a model that no server has."""
    reply = json(openai_api.no_model(name, known), 404)
    reply.headers["x-should-retry"] = "false"
    return reply


def no_key(*, given: bool) -> Response:
    """Return the reply to a request without a valid API key."""
    reply = json(openai_api.no_key(given=given), 401)
    reply.headers["x-should-retry"] = "false"
    reply.headers["WWW-Authenticate"] = "Bearer"
    return reply
