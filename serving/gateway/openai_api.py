"""Translates OpenAI chat completions to TDP/1 and back. Unsupported fields are refused."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from typing import Annotated, Any, Literal, cast
from uuid import uuid4

import msgspec
from msgspec import Meta, Struct

from thor_dflash.config.decode import TEMPLATE_EFFORTS
from thor_dflash.core.errors import Code, PlanError
from thor_dflash.core.message_text import cut, nearest, show, visible
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

NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "frequency_penalty": (0,), "presence_penalty": (0,), "repetition_penalty": (1,),
    "logit_bias": ({},), "logprobs": (False,), "top_logprobs": (0,), "n": (1,), "stop": ([],),
    "store": (False,), "service_tier": ("auto", "default"), "verbosity": ("medium",),
    "modalities": (["text"],), "tools": ([],), "functions": ([],),
    "tool_choice": ("none", "auto"), "function_call": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "stream_options.continuous_usage_stats": (False,),
    "stream_options.include_obfuscation": (True, False),
    "messages.tool_calls": ([],), "messages.annotations": ([],), "messages.audio": ([],),
    "messages.refusal": ([],), "messages.content.annotations": ([],),
}  # fmt: skip
"""Fields of OpenAI's and other servers that this gateway does not support -> the values that ask
for nothing. With these, or null, a field is as if left out; with another it is refused."""
NESTED = (
    "stream_options",
    "response_format",
    "chat_template_kwargs",
    "messages",
    "messages.content",
)
"""Objects, and lists of them, in which such fields are looked for. Schemas, where null has a
meaning, lie deeper."""
BODY = msgspec.json.Decoder(dict[str, Any], float_hook=float)
"""Python's `float` reads 1e308 a hundred times as fast as msgspec."""
SUPPORTED: Mapping[str, str] = {
    "thinking": "on, off or auto",
    "messages.role": "system, developer, user, assistant or tool",
    "messages.content.type": "text or refusal",
    "response_format.type": "text or json_schema",
}
"""What a field must be, as error text, where its type alone does not say it."""


class TextPart(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="text"):
    """A text of a message."""

    text: str


class RefusalPart(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="refusal"):
    """A refusal in an earlier answer: text as any other."""

    refusal: str


class ChatMessage(Struct, frozen=True, forbid_unknown_fields=True):
    """One turn of a chat. `name` is accepted because clients send it, and ignored: chat templates
    have no place for it."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart | RefusalPart] | None = None
    """May be left out by an assistant only."""
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


class TemplateOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """Variables of the chat template."""

    enable_thinking: bool | None = None
    preserve_thinking: bool | None = None
    reasoning_effort: str | None = None


class ChatRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """The body of POST /v1/chat/completions, without what is NEUTRAL. The last six fields are
    TDP/1's own (`extra_body`), those before them have no effect.
    """

    messages: list[ChatMessage]
    model: str = ""
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None
    response_format: JsonObjectFormat | TextFormat | JsonSchemaFormat | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    """-1 is off, as 0."""
    min_p: float | None = None
    reasoning_effort: str | None = None
    """`none` is `thinking: off`. Others go to a chat template that reads them, as Qwen3.8's does;
    other models have `thinking_budget`."""
    chat_template_kwargs: TemplateOptions | None = None
    seed: int | None = None
    user: str | None = None
    safety_identifier: str | None = None
    metadata: dict[str, str] | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    thinking: Literal["on", "off", "auto"] | None = None
    thinking_budget: int | None = None
    deadline_ms: int | None = None
    session: str | None = None
    priority: int = 5
    prefix_id: str | None = None


def read(body: bytes) -> ChatRequest:
    """Decode the request in a body, without the values that ask for nothing: clients and proxies
    send these by themselves.

    Raises:
        PlanError: bad_request, naming the field.
    """
    try:
        table = BODY.decode(body)
    except (msgspec.DecodeError, ValueError, RecursionError) as e:
        raise bad_request(f"body must be a JSON object (got: {cut(str(e))})") from e
    try:
        return codec.convert(cast("dict[str, Any]", _effective(table)), ChatRequest)
    except PlanError as e:
        raise _plain(e) from e.__cause__


def _effective(value: object, where: str = "", path: str = "") -> object:
    """Return a value without the fields that are null or NEUTRAL. `where` is its name in the
    request and `path` its name here, which has no indices.

    Raises:
        PlanError: bad_request, a field of NEUTRAL has another value.
    """
    if isinstance(value, list):
        items = enumerate(cast("list[object]", value))
        return [
            _effective(cast("object", v), f"{where}[{i}]", path) if isinstance(v, dict) else v
            for i, v in items
        ]
    if not isinstance(value, dict):
        return value
    found: dict[str, object] = {}
    for key, inner in cast("dict[str, object]", value).items():
        named, name = f"{where}.{key}".lstrip("."), f"{path}.{key}".lstrip(".")
        if inner is None:
            continue
        if name in NEUTRAL:
            _check_neutral(inner, named, NEUTRAL[name])
        else:
            found[key] = _effective(inner, named, name) if name in NESTED else inner
    return found


def _check_neutral(value: object, name: str, neutral: tuple[object, ...]) -> None:
    # To Python true is 1.
    if not any(value == v and isinstance(value, bool) == isinstance(v, bool) for v in neutral):
        rule = " or ".join(show(v) for v in neutral)
        raise bad_request(
            f"{name} must be {rule}: the gateway supports nothing else (got {show(value)})", name
        )


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
    limits = {request.max_tokens, request.max_completion_tokens} - {None}
    if len(limits) > 1:
        raise bad_request(
            "max_tokens must be left out where max_completion_tokens is given "
            f"(got {request.max_tokens})",
            "max_tokens",
        )
    options = request.stream_options
    if options is not None and options.include_usage and not request.stream:
        raise bad_request(
            "stream_options must be left out without stream: true (got include_usage)",
            "stream_options",
        )
    format = request.response_format
    if isinstance(format, JsonObjectFormat):
        raise bad_request(
            "response_format.type must be text or json_schema (got json_object)", "response_format"
        )
    fields: dict[str, Any] = {
        "messages": _turns(request.messages),
        "stream": "text" if request.stream else False,
        "max_tokens": next(iter(limits), None),
        "thinking": _thinking(request),
        "thinking_budget": request.thinking_budget,
        "chat_template_kwargs": _template_options(request) or None,
        "deadline_ms": request.deadline_ms,
        # All chats of a gateway come from one client: without a session they must not preempt
        # each other.
        "session": request.session,
        "preempt": "same_session" if request.session else "none",
        "priority": request.priority,
        "prefix_id": request.prefix_id,
        **_sampling(request),
        "json_schema": format.json_schema.schema if isinstance(format, JsonSchemaFormat) else None,
        "return": ("plan", "text", "thinking", "timings"),
    }
    return codec.convert({k: v for k, v in fields.items() if v is not None}, wire.PlanRequest)


def _sampling(request: ChatRequest) -> dict[str, object]:
    """Return the fields that say how tokens are drawn, without those that ask for nothing. With a
    temperature of 0 none has an effect.
    """
    if request.temperature == 0:
        return {}
    nothing = {"top_p": (1,), "top_k": (-1, 0), "min_p": (0,)}
    given = {name: getattr(request, name) for name in ("temperature", *nothing, "seed")}
    return {name: value for name, value in given.items() if value not in nothing.get(name, ())}


def _thinking(request: ChatRequest) -> str | None:
    effort, options = request.reasoning_effort, request.chat_template_kwargs
    effort = effort if effort == "none" else None
    enabled = options.enable_thinking if options is not None else None
    thinking: str | None = request.thinking
    for name, value, means in (
        ("reasoning_effort", effort, "off"),
        ("chat_template_kwargs.enable_thinking", enabled, "on" if enabled else "off"),
    ):
        if value is not None and thinking not in (None, means):
            rule = f"be left out where thinking is {thinking}"
            raise bad_request(f"{name} must {rule} (got {show(value)})", name)
        if value is not None:
            thinking = means
    return thinking


def _template_options(request: ChatRequest) -> dict[str, object]:
    """Variables of the chat template besides enable_thinking. The server refuses those that the
    model's does not read.
    """
    options, effort = request.chat_template_kwargs, request.reasoning_effort
    found: dict[str, object] = {}
    if options is not None and options.preserve_thinking is not None:
        found["preserve_thinking"] = options.preserve_thinking
    if options is not None and options.reasoning_effort is not None:
        found["reasoning_effort"] = options.reasoning_effort
    if effort is None or effort == "none":
        return found
    if effort not in TEMPLATE_EFFORTS:
        rule = f"one of none, {', '.join(TEMPLATE_EFFORTS)}"
        got = visible(effort[:40])
        raise bad_request(f"reasoning_effort must be {rule} (got {got})", "reasoning_effort")
    if found.setdefault("reasoning_effort", TEMPLATE_EFFORTS[effort]) != TEMPLATE_EFFORTS[effort]:
        rule = f"left out where reasoning_effort is {effort}"
        name = "chat_template_kwargs.reasoning_effort"
        raise bad_request(f"{name} must be {rule} (got {show(found['reasoning_effort'])})", name)
    return found


def _turns(messages: list[ChatMessage]) -> list[dict[str, str]]:
    """Return the turns of a chat. System messages in a row become one: templates take one."""
    turns: list[dict[str, str]] = []
    each = (_turn(message, i) for i, message in enumerate(messages))
    for role, same in groupby(each, key=itemgetter("role")):
        if role == "system":
            turns.append({"role": role, "content": "\n\n".join(turn["content"] for turn in same)})
        else:
            turns += same
    return turns


def _turn(message: ChatMessage, index: int) -> dict[str, str]:
    content = message.content
    if content is None:
        if message.role != "assistant":
            name = f"messages[{index}].content"
            raise bad_request(f"{name} must be present (got nothing)", name)
        content = ""
    if not isinstance(content, str):
        content = "".join(p.text if isinstance(p, TextPart) else p.refusal for p in content)
    role = "system" if message.role == "developer" else message.role
    turn = {"role": role, "content": content}
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
    names = ("status", "finish_reason", "plan_valid", "thinking_closed", "seed", "timings", "spec")
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


def no_key(*, given: bool) -> dict[str, Any]:
    """Return OpenAI's error for a request without a valid API key, which it does not repeat."""
    got = "another" if given else "none"
    return {
        "error": {
            "message": f"Authorization must be Bearer and an API key of the gateway (got {got})",
            "type": "invalid_request_error",
            "param": None,
            "code": "invalid_api_key",
        }
    }


def _field_as_sent(field: str, chat: ChatRequest) -> str:
    if field == "json_schema":
        return "response_format.json_schema.schema"
    if field == "prompt":
        return "messages"
    if field == "max_tokens" and chat.max_tokens is None:
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
