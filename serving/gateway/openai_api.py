"""Translates OpenAI chat completions to TDP/1 and back. Unsupported fields are refused."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, cast
from uuid import uuid4

import msgspec
from msgspec import Meta, Struct

from thor_dflash.core.errors import Code, PlanError
from thor_dflash.core.message_text import nearest, visible
from thor_dflash.serving.protocol import codec
from thor_dflash.serving.protocol import messages as wire
from thor_dflash.serving.protocol.errors import bad_request

STATUS: Mapping[Code, int] = {
    "bad_request": 400, "unsupported_version": 400, "schema_invalid": 400,
    "schema_unsupported": 400, "prompt_too_long": 400, "deadline_infeasible": 400,
    "unauthorized": 401, "too_large": 413, "stale": 409, "cancelled": 409, "preempted": 409,
    "busy": 429, "deadline": 408, "not_ready": 503, "draining": 503, "unreachable": 503,
    "engine_fault": 500, "internal": 500,
}  # fmt: skip
FINISH: Mapping[str, str] = {"stop": "stop", "grammar_dead_end": "content_filter"}
"""OpenAI's finish reason for ours; all others become `length`: the text is incomplete."""

SUPPORTED: Mapping[str, str] = {
    "n": "1",
    "logprobs": "false",
    "stop": "left out: the end of an answer is the model's",
    "thinking": "on, off or auto",
    "messages.role": "system, developer, user, assistant or tool",
    "messages.content.type": "text",
    "response_format.type": "text or json_schema",
}
"""What a field must be, as error text, where its type alone does not say it."""


class ContentPart(Struct, frozen=True, forbid_unknown_fields=True):
    """A part of a message; only text is supported."""

    type: Literal["text"]
    text: str


class ChatMessage(Struct, frozen=True, forbid_unknown_fields=True):
    """One turn of a chat. `name` is accepted because clients send it, and ignored: chat templates
    have no place for it."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart]
    name: str | None = None
    reasoning_content: str | None = None


class JsonObjectFormat(
    Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="json_object"
):
    """Response format: any JSON object. Refused by `plan_request`."""


class TextFormat(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="text"):
    """Response format: free text."""


class JsonSchemaFormat(
    Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="json_schema"
):
    """Response format: JSON that obeys a schema."""

    json_schema: wire.SchemaWrapper


class StreamOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """Options of a stream."""

    include_usage: bool = False


class ChatRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """The body of POST /v1/chat/completions. The last six fields are TDP/1's own (`extra_body`)."""

    messages: list[ChatMessage]
    model: str = ""
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None
    response_format: JsonObjectFormat | TextFormat | JsonSchemaFormat | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: Literal[1] | None = None
    seed: int | None = None
    stop: None = None
    logprobs: Literal[False] | None = None
    user: str | None = None
    reasoning_effort: str | None = None
    """Only `none` is accepted, as `thinking: off`. Other efforts are given as `thinking_budget`."""
    thinking: Literal["on", "off", "auto"] | None = None
    thinking_budget: int | None = None
    deadline_ms: int | None = None
    session: str | None = None
    priority: int = 5
    prefix_id: str | None = None


def read(body: bytes) -> ChatRequest:
    """Decode the request in a body. OpenAI's clients send null for omitted fields, also for
    unsupported ones: an assistant message sent back in the next request has `tool_calls` null.

    Raises:
        PlanError: bad_request, naming the field.
    """
    try:
        return codec.convert(_without_nulls(codec.JSON.decode(body, dict[str, Any])), ChatRequest)
    except PlanError as e:
        raise _plain(e) from e.__cause__


def _without_nulls(table: dict[str, Any]) -> dict[str, Any]:
    """Drop the null fields of a body, of its direct objects and of its messages. Schemas, where
    null has a meaning, lie deeper.
    """
    given = {name: _given(value) for name, value in table.items() if value is not None}
    messages: object = given.get("messages")
    if isinstance(messages, list):
        given["messages"] = [_given(message) for message in cast("list[object]", messages)]
    return given


def _given(value: object) -> object:
    if not isinstance(value, dict):
        return value
    table = cast("dict[str, object]", value)
    return {name: inner for name, inner in table.items() if inner is not None}


def _plain(e: PlanError) -> PlanError:
    """Rephrase an error for users who know OpenAI's API but not TDP/1."""
    name = e.field or ""
    rule = SUPPORTED.get(re.sub(r"\[.*?\]", "", name))
    if codec.UNKNOWN in e.message:
        rule = "left out: the gateway does not support it"
    if rule is None:
        return e
    _, got, value = e.message.partition(" (got ")
    return PlanError(e.code, f"{name} must be {rule}{got}{value}", field=name)


def plan_request(request: ChatRequest) -> wire.PlanRequest:
    """Translate a request to TDP/1.

    Raises:
        PlanError: bad_request.
    """
    for name, value, fine in (("temperature", request.temperature, 0), ("top_p", request.top_p, 1)):
        if value not in (None, fine):
            raise bad_request(f"{name} must be {fine}: decoding is greedy (got {value})", name)
    if request.max_tokens and request.max_completion_tokens:
        raise bad_request(
            "max_tokens must be left out where max_completion_tokens is given "
            f"(got {request.max_tokens})",
            "max_tokens",
        )
    if request.stream_options is not None and not request.stream:
        raise bad_request("stream_options must go with stream: true (got false)", "stream_options")
    thinking = _thinking(request)
    format = request.response_format
    if isinstance(format, JsonObjectFormat):
        raise bad_request(
            "response_format.type must be text or json_schema (got json_object)", "response_format"
        )
    fields: dict[str, Any] = {
        "messages": [_turn(message) for message in request.messages],
        "stream": "text" if request.stream else False,
        "max_tokens": request.max_completion_tokens or request.max_tokens,
        "thinking": thinking,
        "thinking_budget": request.thinking_budget,
        "deadline_ms": request.deadline_ms,
        # All chats of a gateway come from one client: without a session they must not preempt
        # each other.
        "session": request.session,
        "preempt": "same_session" if request.session else "none",
        "priority": request.priority,
        "prefix_id": request.prefix_id,
        "json_schema": format.json_schema.schema if isinstance(format, JsonSchemaFormat) else None,
        "return": ("plan", "text", "thinking", "timings"),
    }
    return codec.convert({k: v for k, v in fields.items() if v is not None}, wire.PlanRequest)


def _thinking(request: ChatRequest) -> str | None:
    effort = request.reasoning_effort
    if effort is None:
        return request.thinking
    if effort != "none":
        rule = "be none; thinking_budget limits the thinking instead, in tokens"
    elif request.thinking not in (None, "off"):
        rule = f"be left out where thinking is {request.thinking}"
    else:
        return "off"
    raise bad_request(
        f"reasoning_effort must {rule} (got {visible(effort[:40])})", "reasoning_effort"
    )


def _turn(message: ChatMessage) -> dict[str, str]:
    content = message.content
    text = content if isinstance(content, str) else "".join(part.text for part in content)
    turn = {"role": "system" if message.role == "developer" else message.role, "content": text}
    if message.reasoning_content is not None:
        turn["reasoning_content"] = message.reasoning_content
    return turn


@dataclass(frozen=True, slots=True)
class ResponseHeader:
    """The fields that are equal in all pieces of an answer."""

    model: str
    id: str = field(default_factory=lambda: f"chatcmpl-{uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))
    """Seconds since 1970. Equal in all pieces, by which clients may group them."""


def completion(answer: ResponseHeader, result: wire.Result) -> dict[str, Any]:
    """Return a complete answer. `thor_dflash` holds what OpenAI's format has no field for."""
    message = {"role": "assistant", "content": result.text, "reasoning_content": result.thinking}
    return {
        **_frame(answer, "chat.completion"),
        "choices": [
            {"index": 0, "message": message, "finish_reason": _finish(result), "logprobs": None}
        ],
        "usage": usage(result),
        "thor_dflash": telemetry(result),
    }


def delta(answer: ResponseHeader, **fields: str) -> dict[str, Any]:
    """Return a piece of a streamed answer."""
    return {
        **_frame(answer, "chat.completion.chunk"),
        "choices": [{"index": 0, "delta": fields, "finish_reason": None}],
    }


def ending(answer: ResponseHeader, result: wire.Result) -> dict[str, Any]:
    """Return the last piece of a streamed answer."""
    return {
        **_frame(answer, "chat.completion.chunk"),
        "choices": [{"index": 0, "delta": {}, "finish_reason": _finish(result)}],
        "thor_dflash": telemetry(result),
    }


def counted(answer: ResponseHeader, result: wire.Result) -> dict[str, Any]:
    """Return the piece with the usage, sent after the last one if requested."""
    return {**_frame(answer, "chat.completion.chunk"), "choices": [], "usage": usage(result)}


def usage(result: wire.Result) -> dict[str, Any]:
    """Return the token counts. As OpenAI counts, thinking tokens are completion tokens."""
    u = result.usage
    output = u.thinking_tokens + u.output_tokens
    return {
        "prompt_tokens": u.prompt_tokens,
        "completion_tokens": output,
        "total_tokens": u.prompt_tokens + output,
        "prompt_tokens_details": {"cached_tokens": u.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": u.thinking_tokens},
    }


def telemetry(result: wire.Result) -> dict[str, Any]:
    """Return the fields of the result that OpenAI's format lacks."""
    table: dict[str, Any] = msgspec.to_builtins(result)
    names = ("status", "finish_reason", "plan_valid", "thinking_closed", "timings", "spec")
    return {name: table[name] for name in names}


def error(e: PlanError, chat: ChatRequest | None = None) -> dict[str, Any]:
    """Return an error in OpenAI's format. Fields are named as the client named them in `chat`."""
    kind = "invalid_request_error" if STATUS[e.code] < 500 else "server_error"
    message, param = e.message, e.field
    if param is not None and chat is not None:
        param = _field_as_sent(param, chat)
        message = message.replace(e.field or "", param, 1)
    return {"error": {"message": message, "type": kind, "param": param, "code": e.code}}


def no_model(name: str, known: Iterable[str]) -> dict[str, Any]:
    """Return OpenAI's error for an unknown model. TDP/1 has none, as each server has one model."""
    got = f"{visible(name[:100])}; {nearest(name[:100], known)}"
    message = f"model must be one that is served, or empty for any (got {got})"
    return {
        "error": {
            "message": message,
            "type": "invalid_request_error",
            "param": "model",
            "code": "model_not_found",
        }
    }


def _field_as_sent(field: str, chat: ChatRequest) -> str:
    if field == "json_schema":
        return "response_format.json_schema.schema"
    if field == "prompt":
        return "messages"
    if field == "max_tokens" and chat.max_tokens is None and chat.max_completion_tokens:
        return "max_completion_tokens"
    return field


def _finish(result: wire.Result) -> str:
    return FINISH.get(result.finish_reason, "length")


def _frame(answer: ResponseHeader, kind: str) -> dict[str, Any]:
    return {
        "id": answer.id,
        "object": kind,
        "created": answer.created,
        "model": answer.model,
    }
