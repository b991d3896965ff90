"""HTTP replies: JSON, and errors as OpenAI's clients read them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
from starlette.responses import Response

from thor_dflash.core.errors import Code, PlanError
from thor_dflash.core.message_text import nearest, visible
from thor_dflash.serving.client import LostRequest
from thor_dflash.serving.gateway.openai_api import ChatRequest, field_as_sent

STATUS: Mapping[Code, int] = {
    "bad_request": 400, "unsupported_version": 400, "schema_invalid": 400,
    "schema_unsupported": 400, "prompt_too_long": 400, "deadline_infeasible": 400,
    "unauthorized": 401, "too_large": 413, "stale": 409, "cancelled": 409, "preempted": 409,
    "busy": 429, "deadline": 408, "not_ready": 503, "draining": 503, "unreachable": 503,
    "engine_fault": 500, "internal": 500,
}  # fmt: skip
"""The HTTP status of each error."""
AGAIN: frozenset[Code] = frozenset({"busy", "not_ready", "unreachable"})
"""Codes after which OpenAI's clients may send the same request again by themselves. They say how a
server is, not what a request does to it: one that ends a server must not end the next."""
SHOWN = 100
"""Most characters of a name or path that an error repeats."""


def json(value: object, status: int = 200) -> Response:
    """Return a JSON reply."""
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def error(e: PlanError, chat: ChatRequest | None = None) -> dict[str, Any]:
    """Return an error in OpenAI's format. Fields are named as the client named them in `chat`."""
    kind = "invalid_request_error" if STATUS[e.code] < 500 else "server_error"
    message, param = e.message, e.field
    if param is not None and chat is not None:
        param = field_as_sent(param, chat)
        message = message.replace(e.field or "", param, 1)
    return {"error": {"message": message, "type": kind, "param": param, "code": e.code}}


def refused(
    e: PlanError, chat: ChatRequest | None = None, *, status: int | None = None
) -> Response:
    """Return an error as an HTTP response."""
    reply = json(error(e, chat), status or STATUS[e.code])
    again = e.code in AGAIN and e.retryable and not isinstance(e, LostRequest)
    # OpenAI's clients obey this header before they look at the status; without it they retry every
    # 408, 409 and 5xx, so a plan displaced by a newer one would be sent again and displace it.
    reply.headers["x-should-retry"] = "true" if again else "false"
    if again and e.retry_after_ms is not None:
        # Retry-After is in whole seconds, and 0 would make the client retry at once.
        reply.headers["Retry-After"] = str(max(1, math.ceil(e.retry_after_ms / 1e3)))
    return reply


def no_model(name: str, known: Iterable[str]) -> Response:
    """Return the reply to a request for a model that no server has. TDP/1 has no such error, as
    each server has one model.
    """
    got = f"{visible(name[:SHOWN])}; {nearest(name[:SHOWN], known)}"
    message = f"model must be one that is served, or empty for any (got {got})"
    return _wrong(404, "model_not_found", message, "model")


def no_key(*, given: bool) -> Response:
    """Return the reply to a request without a valid API key, which it does not repeat."""
    got = "another" if given else "none"
    message = f"Authorization must be Bearer and an API key of the gateway (got {got})"
    reply = _wrong(401, "invalid_api_key", message)
    reply.headers["WWW-Authenticate"] = "Bearer"
    return reply


def no_path(path: str, known: Iterable[str]) -> Response:
    """Return the reply to a request for a path that is not served."""
    got = f"{visible(path[:SHOWN])}; a client's base_url ends with /v1"
    message = f"the path must be one of {', '.join(known)} (got {got})"
    return _wrong(404, "unknown_url", message)


def no_method(method: str, path: str, allowed: str) -> Response:
    """Return the reply to a request with a method that a path does not have."""
    rule = f"the method for {visible(path[:SHOWN])} must be {allowed}"
    reply = _wrong(405, "method_not_supported", f"{rule} (got {visible(method)})")
    reply.headers["Allow"] = allowed
    return reply


def _wrong(status: int, code: str, message: str, param: str | None = None) -> Response:
    kind = "invalid_request_error"
    table = {"error": {"message": message, "type": kind, "param": param, "code": code}}
    reply = json(table, status)
    reply.headers["x-should-retry"] = "false"
    return reply
