"""Translates OpenAI's requests to TDP/1. Unsupported fields are refused."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, cast

import msgspec
from msgspec import Meta, Struct

from thor_dflash.core.errors import PlanError, RequestError
from thor_dflash.core.message_text import cut, show
from thor_dflash.core.strict_records import as_list
from thor_dflash.runtime.text.messages import check_chat
from thor_dflash.serving.gateway.image_urls import image_of
from thor_dflash.serving.protocol import codec
from thor_dflash.serving.protocol import messages as wire
from thor_dflash.serving.protocol.errors import bad_request, refusal

NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "frequency_penalty": (0,), "presence_penalty": (0,), "repetition_penalty": (1,),
    "logit_bias": ({},), "logprobs": (False,), "top_logprobs": (0,), "n": (1,), "stop": ([], [""]),
    "store": (False,), "service_tier": ("auto", "default"), "verbosity": ("medium",),
    "modalities": (["text"],), "functions": ([],), "function_call": ("none", "auto"),
    "stream_options.continuous_usage_stats": (False,),
    "stream_options.include_obfuscation": (True, False),
    "messages.annotations": ([],), "messages.audio": ([],),
    "messages.refusal": ([],), "messages.content.annotations": ([],),
    # vLLM's and SGLang's, which clients of these send with every request
    "best_of": (1,), "use_beam_search": (False,), "length_penalty": (1,), "min_tokens": (0,),
    "early_stopping": (False,), "ignore_eos": (False,), "stop_token_ids": ([],), "bad_words": ([],),
    "include_stop_str_in_output": (False,), "no_stop_trim": (False,), "min_new_tokens": (0,),
    "echo": (False,), "add_generation_prompt": (True,), "continue_final_message": (False,),
    "add_special_tokens": (False,), "return_token_ids": (False,), "typical_p": (1,),
    "include_reasoning": (True,), "separate_reasoning": (True,), "stream_reasoning": (True,),
    "skip_special_tokens": (True,), "spaces_between_special_tokens": (True, False),
}  # fmt: skip
"""Fields of OpenAI's and other servers that this gateway does not support -> the values that ask
for nothing. With these, or null, a field is as if left out; with another it is refused."""
NESTED = (
    "stream_options",
    "response_format",
    "chat_template_kwargs",
    "messages",
    "forced_answer",
    "messages.content",
    "messages.tool_calls",
    "messages.tool_calls.function",
)
"""Objects, and lists of them, in which such fields are looked for. Schemas and arguments, where
null has a meaning, lie deeper."""
BODY = msgspec.json.Decoder(dict[str, Any], float_hook=float)
"""Python's `float` reads 1e308 a hundred times as fast as msgspec."""
NAME = 64
"""Most characters of a name in TDP/1."""
SUPPORTED: Mapping[str, str] = {
    "thinking": "on, off or auto",
    "messages.role": "system, developer, user, assistant or tool",
    "messages.content.type": "text, refusal or image_url",
    "response_format.type": "text, json_object or json_schema",
    "reasoning_effort": "none, minimal, low, medium, high, xhigh or max",
    "tool_choice": "none, auto, required, a function or allowed_tools",
}
"""What a field must be, as error text, where its type alone does not say it."""


class RefusalPart(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="refusal"):
    """A refusal in an earlier answer: text as any other."""

    refusal: str


class ImageUrl(Struct, frozen=True, forbid_unknown_fields=True):
    """Where an image is, and how finely it is to be seen."""

    url: str
    detail: Literal["auto", "low", "high"] | None = None


class ImageUrlPart(
    Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="image_url"
):
    """An image in a user's message."""

    image_url: ImageUrl


class ChatMessage(Struct, frozen=True, forbid_unknown_fields=True):
    """One turn of a chat. `name` is accepted because clients send it, and ignored: chat templates
    have no place for it."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[wire.TextPart | RefusalPart | ImageUrlPart] | None = None
    """May be left out by an assistant only."""
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None


class JsonObjectFormat(
    Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="json_object"
):
    """Response format: any JSON object."""


class TextFormat(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="text"):
    """Response format: free text."""


class JsonSchemaFormat(
    Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="json_schema"
):
    """Response format: JSON that obeys a schema."""

    json_schema: wire.SchemaWrapper


class Prediction(Struct, frozen=True, forbid_unknown_fields=True):
    """A text that the answer may repeat."""

    type: Literal["content"]
    content: str | list[wire.TextPart]

    @property
    def text(self) -> str:
        """The whole text."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class StreamOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """Options of a stream."""

    include_usage: bool = False


class ChatRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """The body of POST /v1/chat/completions, without what is NEUTRAL. The last ten fields
    are TDP/1's own (`extra_body`), those before them have no effect.
    """

    messages: list[ChatMessage]
    model: str = ""
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None
    response_format: JsonObjectFormat | TextFormat | JsonSchemaFormat | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    """-1 is off, as 0."""
    min_p: float | None = None
    reasoning_effort: wire.Effort | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    """`enable_thinking` is the same as `thinking`; the server knows the others."""
    prediction: Prediction | None = None
    prompt_cache_key: str | None = None
    """A name of the conversation."""
    seed: int | None = None
    acceptance: Literal["coupled", "rejection"] | None = None
    """Of the drafts of drawn tokens."""
    user: str | None = None
    safety_identifier: str | None = None
    metadata: dict[str, str] | None = None
    prompt_cache_retention: str | None = None
    thinking: Literal["on", "off", "auto"] | None = None
    thinking_budget: int | None = None
    deadline_ms: int | None = None
    session: str | None = None
    priority: int = 5
    prefix_id: str | None = None
    forced_answer: ChatMessage | None = None
    forced_accept: float | None = None
    skills: dict[str, Any] | None = None
    plan_format: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """What a request is known by, beside its body."""

    session: str = ""
    """Its header X-Session-ID."""
    scope: str | None = None
    """Only requests of the same scope share the state of earlier turns."""
    image_dir: str = ""
    """Below which image URLs may name files; "": none may."""


NOBODY = Caller()


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
        if inner is None or name.startswith("x_"):
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


def plan_request(request: ChatRequest, caller: Caller = NOBODY) -> wire.PlanRequest:
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
    turns, images = _shown(_turns(request.messages), request.messages, caller.image_dir)
    fields: dict[str, Any] = {
        "messages": turns,
        "images": images,
        "stream": "text" if request.stream else False,
        "max_tokens": next(iter(limits), None),
        "thinking_budget": request.thinking_budget,
        "reasoning_effort": request.reasoning_effort,
        "deadline_ms": request.deadline_ms,
        # All chats of a gateway come from one client: without a session they must not preempt
        # each other.
        "session": request.session,
        "preempt": "same_session" if request.session else "none",
        "priority": request.priority,
        "prefix_id": request.prefix_id,
        "drafts": request.prediction.text if request.prediction else None,
        "forced_answer": _forced(request.forced_answer),
        "forced_accept": request.forced_accept,
        "skills": request.skills,
        "plan_format": request.plan_format,
        **_sampling(request),
        "conversation": _name(caller.session or request.prompt_cache_key),
        "cache_scope": caller.scope,
        "json_schema": _schema(request),
        "return": ("plan", "text", "thinking", "timings"),
        **_thinking(request),
        **_tools(request),
    }
    return codec.convert({k: v for k, v in fields.items() if v is not None}, wire.PlanRequest)


def _sampling(request: ChatRequest) -> dict[str, object]:
    """Return the fields that say how tokens are drawn, without those that ask for nothing. With a
    temperature of 0 none has an effect.
    """
    if request.temperature == 0:
        return {}
    nothing = {"top_p": (1,), "top_k": (-1, 0), "min_p": (0,), "acceptance": ("coupled",)}
    given = {name: getattr(request, name) for name in ("temperature", *nothing, "seed")}
    return {name: value for name, value in given.items() if value not in nothing.get(name, ())}


def _schema(request: ChatRequest) -> dict[str, Any] | None:
    form = request.response_format
    if isinstance(form, JsonSchemaFormat):
        return form.json_schema.schema
    return {"type": "object"} if isinstance(form, JsonObjectFormat) else None


def _name(given: str | None) -> str | None:
    """A name of any length as one of TDP/1."""
    if not given or len(given) <= NAME:
        return given or None
    return hashlib.sha256(given.encode(errors="surrogatepass")).hexdigest()[:NAME]


def _tools(request: ChatRequest) -> dict[str, Any]:
    """The fields of tools; without tools, without what then asks for nothing."""
    if request.tools:
        return {
            "tools": request.tools,
            "tool_choice": request.tool_choice,
            "parallel_tool_calls": request.parallel_tool_calls,
        }
    return {} if request.tool_choice in ("none", "auto") else {"tool_choice": request.tool_choice}


def _thinking(request: ChatRequest) -> dict[str, Any]:
    options = dict(request.chat_template_kwargs or {})
    thinking: str | None = request.thinking
    name = "chat_template_kwargs.enable_thinking"
    enabled = options.pop("enable_thinking", None)
    if enabled is not None:
        if not isinstance(enabled, bool):
            raise bad_request(f"{name} must be true or false (got {show(enabled)})", name)
        means = "on" if enabled else "off"
        if thinking not in (None, means):
            rule = f"be left out where thinking is {thinking}"
            raise bad_request(f"{name} must {rule} (got {show(enabled)})", name)
        thinking = means
    return {"thinking": thinking, "chat_template_kwargs": options or None}


def _forced(message: ChatMessage | None) -> dict[str, Any] | None:
    if message is None:
        return None
    try:
        [turn] = check_chat([_turn(message, "forced_answer")])
    except RequestError as e:
        raise bad_request(
            refusal(e).replace("messages[0]", "forced_answer"), "forced_answer"
        ) from e
    return turn


def _turns(messages: list[ChatMessage]) -> list[dict[str, Any]]:
    """Return the turns of a chat. System messages in a row become one: templates take one."""
    given = [_turn(message, f"messages[{i}]") for i, message in enumerate(messages)]
    try:
        # Here too, as a server has only the turns. It orders results: here they keep their indices.
        given = check_chat(given, len(list(_image_urls(messages))))
    except RequestError as e:
        raise bad_request(refusal(e), str(e).partition(" must ")[0]) from e
    return [
        given[run[0]]
        if len(run) == 1
        else {"role": "system", "content": "\n\n".join(given[i]["content"] for i in run)}
        for run in _runs(messages)
    ]


def _runs(messages: list[ChatMessage]) -> list[list[int]]:
    """Indices of the messages that each turn is made of."""
    runs: list[list[int]] = []
    before = False
    for i, message in enumerate(messages):
        system = message.role in ("system", "developer")
        if system and before:
            runs[-1].append(i)
        else:
            runs.append([i])
        before = system
    return runs


def _shown(
    turns: list[dict[str, Any]], messages: list[ChatMessage], image_dir: str
) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
    """Return the turns with the ids of the images that they show, and these images."""
    images: list[dict[str, Any]] = []
    for where, given in _image_urls(messages):
        image = image_of(given.url, given.detail, image_dir, where)
        images.append({"id": f"image{len(images)}", **image})
    ids = iter(image["id"] for image in images)
    for piece in (piece for turn in turns for piece in as_list(turn["content"]) or ()):
        shown = cast("dict[str, str]", piece)
        if shown["type"] == "image":
            shown["image"] = next(ids)
    return turns, images or None


def _image_urls(messages: Iterable[ChatMessage]) -> Iterator[tuple[str, ImageUrl]]:
    """Field and URL of each image, in their order."""
    for i, message in enumerate(messages):
        for j, part in enumerate(message.content if isinstance(message.content, list) else ()):
            if isinstance(part, ImageUrlPart):
                yield f"messages[{i}].content[{j}].image_url", part.image_url


def _parts(
    content: list[wire.TextPart | RefusalPart | ImageUrlPart],
) -> str | list[dict[str, str]]:
    """One text, or texts and images in their order."""
    parts = [
        {"type": "image"}
        if isinstance(part, ImageUrlPart)
        else {
            "type": "text",
            "text": part.text if isinstance(part, wire.TextPart) else part.refusal,
        }
        for part in content
    ]
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return parts


def _turn(message: ChatMessage, where: str) -> dict[str, Any]:
    content: Any = message.content
    if content is None:
        if message.role != "assistant":
            name = f"{where}.content"
            raise bad_request(f"{name} must be present (got nothing)", name)
        content = ""
    if not isinstance(content, str):
        shown = (j for j, part in enumerate(content) if isinstance(part, ImageUrlPart))
        if message.role != "user" and (j := next(shown, None)) is not None:
            name = f"{where}.content[{j}].image_url"
            rule = f"left out of a message of role {message.role}"
            raise bad_request(f"{name} must be {rule} (got one)", name)
        content = _parts(content)
    turn = {
        "role": "system" if message.role == "developer" else message.role,
        "content": content,
        "reasoning_content": message.reasoning_content,
        "tool_calls": message.tool_calls or None,
        "tool_call_id": message.tool_call_id,
    }
    return {key: value for key, value in turn.items() if value is not None}


def field_as_sent(field: str, chat: ChatRequest) -> str:
    """Return the name in a client's request of a field of the request that was made of it."""
    if field == "json_schema":
        plain = isinstance(chat.response_format, JsonObjectFormat)
        return "response_format" if plain else "response_format.json_schema.schema"
    if field in (named := {"prompt": "messages", "drafts": "prediction"}):
        return named[field]
    if field == "max_tokens" and chat.max_tokens is None:
        return "max_completion_tokens"
    if found := re.match(r"images\[(\d+)\]", field):
        return [where for where, _ in _image_urls(chat.messages)][int(found[1])]
    if found := re.match(r"messages\[(\d+)\](.*)", field):
        run = _runs(chat.messages)[int(found[1])]
        last = f"..{run[-1]}" if len(run) > 1 else ""
        return f"messages[{run[0]}{last}]{found[2]}"
    return field
