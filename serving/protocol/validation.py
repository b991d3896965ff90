"""Checks of plan requests that the types cannot express. Unsupported values are refused, never
ignored.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from msgspec import structs

from thor_dflash.config.decode import COLDEST, SamplingConfig
from thor_dflash.config.serving import ServeConfig
from thor_dflash.core.message_text import show
from thor_dflash.runtime.grammar.schema import MAX_BYTES
from thor_dflash.runtime.text.messages import SEEING, rendered_order
from thor_dflash.serving.protocol import messages as wire
from thor_dflash.serving.protocol.codec import check_fields, check_plain
from thor_dflash.serving.protocol.errors import bad_request

METADATA_BYTES = 1 << 10
MAX_DRAFTS = 16
ONE_OF_TWO = "prompt or messages must be given, and one of them only"


def check(request: wire.PlanRequest) -> None:
    """Refuse a request that contradicts itself or asks for something unsupported.

    Raises:
        PlanError: naming the field.
    """
    if request.prompt is None and request.messages is None:
        raise bad_request(ONE_OF_TWO + " (got neither)", "prompt")
    check_prompt(request)
    check_fields(request, "deadline_ms", "session")
    if request.stream is True:
        raise bad_request("stream must be false, steps, text or all (got true)", "stream")
    _check_sampling(request)
    _check_drafts(request)
    both = request.thinking_budget is not None and request.thinking_token_budget is not None
    if both:
        name = "thinking_token_budget"
        raise bad_request(
            f"{name} must be left out where thinking_budget is given (got both)", name
        )
    effort = request.reasoning_effort
    if effort is not None and request.thinking == ("on" if effort == "none" else "off"):
        rule = f"be left out where thinking is {request.thinking}"
        raise bad_request(f"reasoning_effort must {rule} (got {effort})", "reasoning_effort")
    if effort is not None and "reasoning_effort" in (request.chat_template_kwargs or {}):
        rule = "be left out where chat_template_kwargs has one"
        raise bad_request(f"reasoning_effort must {rule} (got {effort})", "reasoning_effort")
    check_answer(request)
    check_images(request)
    if request.tools and request.plan_format != "json_steps":
        text = f"plan_format must be json_steps where there are tools (got {request.plan_format})"
        raise bad_request(text, "plan_format")


def check_images(request: wire.PlanRequest | wire.Validate) -> None:
    """Refuse images that no message shows, and parts that show none.

    Raises:
        PlanError: naming the field.
    """
    images: tuple[wire.ImageInput | wire.ImageSize, ...] = request.images
    named, ids = dict(named_images(request)), set[str]()
    for i, image in enumerate(images):
        if image.id in ids or image.id in named:
            field = f"images[{i}].id"
            raise bad_request(
                f"{field} must be an id of its own (got {show(image.id)} again)", field
            )
        ids.add(image.id)
    _check_parts(request)
    shown = {part.name: where for where, part in _image_parts(request)}
    for name, where in shown.items():
        if name not in ids and name not in named:
            raise bad_request(f"{where} must be an id of images (got {show(name)})", where)
    for i, name in enumerate(image.id for image in images):
        if name not in shown:
            rule = "shown by a part of a message"
            raise bad_request(
                f"images[{i}] must be {rule} (got {show(name)} unused)", f"images[{i}]"
            )


def _check_parts(request: wire.PlanRequest | wire.Validate) -> None:
    for i, message in enumerate(request.messages or ()):
        if not isinstance(message.content, str) and message.role not in SEEING:
            field, rule = f"messages[{i}].content", f"a text in a message of role {message.role}"
            raise bad_request(f"{field} must be {rule} (got parts)", field)


def _image_parts(
    request: wire.PlanRequest | wire.Validate,
) -> Iterator[tuple[str, wire.ImagePart]]:
    messages = request.messages or ()
    if all(isinstance(message.content, str) for message in messages):
        return
    for i in rendered_order([structs.asdict(message) for message in messages]):
        content = messages[i].content
        for j, part in enumerate(() if isinstance(content, str) else content):
            if isinstance(part, wire.ImagePart):
                yield f"messages[{i}].content[{j}].image", part


def image_names(request: wire.PlanRequest | wire.Validate) -> list[str]:
    """Return the names of the images that the messages show, in the order of the prompt."""
    return [part.name for _, part in _image_parts(request)]


def named_images(request: wire.PlanRequest | wire.Validate) -> Iterator[tuple[str, str]]:
    """Digest and field of each image that the messages name by its digest."""
    for where, part in _image_parts(request):
        if isinstance(part.image, wire.ImageDigest):
            yield part.image.sha256, f"{where}.sha256"


def check_answer(request: wire.PlanRequest | wire.Validate) -> None:
    """Refuse a request that says in two ways what its answer is to be.

    Raises:
        PlanError: naming the field.
    """
    names = ("json_schema", "response_format", "skills")
    given = [name for name in names if getattr(request, name, None) is not None]
    if len(given) > 1:
        text = f"{given[1]} must be left out where {given[0]} is given (got both)"
        raise bad_request(text, given[1])
    if request.plan_format != "json_steps" and request.skills is None:
        text = f"plan_format must be json_steps without skills (got {request.plan_format})"
        raise bad_request(text, "plan_format")


def check_prompt(request: wire.PlanRequest | wire.Validate) -> None:
    """Refuse a request with both prompt and messages, or with an empty one of them.

    Raises:
        PlanError: naming the field.
    """
    if request.prompt is not None and request.messages is not None:
        raise bad_request(ONE_OF_TWO + " (got both)", "prompt")
    if request.prompt is not None and not request.prompt.strip():
        raise bad_request(
            f"prompt must be a text that is not empty (got {show(request.prompt)})", "prompt"
        )
    if request.messages is not None and not request.messages:
        raise bad_request("messages must hold at least one message (got none)", "messages")


def _check_drafts(request: wire.PlanRequest) -> None:
    check_fields(request, "drafts")
    drafts = request.drafts
    if isinstance(drafts, tuple) and len(drafts) > MAX_DRAFTS:
        raise bad_request(
            f"drafts must be at most {MAX_DRAFTS} texts (got {len(drafts)})", "drafts"
        )


def _check_sampling(request: wire.PlanRequest) -> None:
    if request.stop:
        rule = "left out, as the model itself ends its answer"
        raise bad_request(f"stop must be {rule} (got {show(request.stop)})", "stop")
    temperature = request.temperature
    names = ("temperature", "top_p", "top_k", "min_p", "seed", "acceptance")
    check_fields(request, *names)
    if temperature is not None and 0 < temperature < COLDEST:
        rule = f"0, or at least {COLDEST}"
        raise bad_request(f"temperature must be {rule} (got {temperature})", "temperature")
    if temperature and request.acceptance == "rejection" and request.accept_mode != "exact":
        rule = "coupled with accept_mode relaxed_thinking"
        raise bad_request(f"acceptance must be {rule} (got rejection)", "acceptance")
    if temperature is not None:
        return
    neutral: dict[str, tuple[object, tuple[object, ...]]] = {
        "top_p": (request.top_p, (None, 1)),
        "top_k": (request.top_k, (None, 0, 1)),
        "min_p": (request.min_p, (None, 0)),
        "acceptance": (request.acceptance, ("coupled",)),
    }
    for name, (value, nothing) in neutral.items():
        if value not in nothing:
            rule = "given with a temperature: without one the best token is chosen"
            raise bad_request(f"{name} must be {rule} (got {show(value)})", name)


def sampling_of(request: wire.PlanRequest) -> SamplingConfig:
    """Return how a request's tokens are drawn."""
    return SamplingConfig(
        temperature=request.temperature or 0.0,
        top_p=1.0 if request.top_p is None else request.top_p,
        top_k=request.top_k or 0,
        min_p=request.min_p or 0.0,
        seed=-1 if request.seed is None else request.seed,
        acceptance=request.acceptance,
    )


def schema_of(request: wire.PlanRequest) -> Mapping[str, Any] | None:
    """Return the schema of a request, given as `json_schema` or as `response_format`."""
    if request.response_format is not None:
        return request.response_format.json_schema.schema
    return request.json_schema


def check_values(request: wire.PlanRequest) -> None:
    """Refuse free-form values that are too large, too deep or not JSON. Slow for large values.

    Raises:
        PlanError: naming the field.
    """
    if (schema := schema_of(request)) is not None:
        check_plain(schema, "json_schema", MAX_BYTES)
    if request.metadata is not None:
        check_plain(request.metadata, "metadata", METADATA_BYTES)
    if request.tools is not None:
        check_plain(list(request.tools), "tools", MAX_BYTES)
    if isinstance(request.tool_choice, dict):
        check_plain(request.tool_choice, "tool_choice", MAX_BYTES)
    if request.chat_template_kwargs is not None:
        check_plain(request.chat_template_kwargs, "chat_template_kwargs", MAX_BYTES)
        _check_thinking(request.chat_template_kwargs, request.thinking)
    _check_calls(request)


def _check_calls(request: wire.PlanRequest) -> None:
    named = {f"messages[{i}]": message for i, message in enumerate(request.messages or ())}
    for where, message in {**named, "forced_answer": request.forced_answer}.items():
        if message is not None and message.tool_calls is not None:
            check_plain(list(message.tool_calls), f"{where}.tool_calls", MAX_BYTES)


def check_forced(request: wire.PlanRequest, *, allowed: bool) -> None:
    """Refuse a forced answer that this server does not commit.

    Raises:
        PlanError: naming the field.
    """
    answer, name = request.forced_answer, "forced_answer"
    if answer is None:
        if request.forced_accept is not None:
            raise bad_request(
                f"forced_accept must go with forced_answer (got {request.forced_accept:g} alone)",
                "forced_accept",
            )
    elif not allowed:
        rule = "left out: this server forces no answers, which needs serve.allow_forced"
        raise bad_request(f"{name} must be {rule} (got one)", name)
    elif answer.role != "assistant":
        raise bad_request(f"{name}.role must be assistant (got {answer.role})", name)


def _check_thinking(options: Mapping[str, object], thinking: str | None) -> None:
    """A prompt that opens the thinking against `thinking` would have no budget for it."""
    name = "enable_thinking"
    given = options.get(name)
    if name in options and given is not {"on": True, "off": False}.get(thinking or ""):
        text = f"{name} must be left out, as the field thinking decides (got {show(given)})"
        raise bad_request(f"chat_template_kwargs.{text}", "chat_template_kwargs")


def thinking_of(request: wire.PlanRequest, config: ServeConfig) -> Literal["on", "off", "auto"]:
    """Return whether a request is to think: an effort asks for it, whatever the default."""
    if request.reasoning_effort == "none":
        return "off"
    if request.thinking is None and request.reasoning_effort and config.thinking == "off":
        return "on"
    return request.thinking or config.thinking


def budget_of(request: wire.PlanRequest, config: ServeConfig, tier: int | None = None) -> int:
    """Return the most thinking tokens that a request allows, before any deadline is considered.
    `tier`: those of its effort, instead of the server's default.
    """
    if thinking_of(request, config) == "off":
        return 0
    given = (
        request.thinking_budget
        if request.thinking_budget is not None
        else request.thinking_token_budget
    )
    limits = [limit for limit in (given, tier) if limit is not None]
    return min(limits, default=config.thinking_budget)


def messages_of(prompt: str | None, messages: tuple[wire.Message, ...] | None) -> list[object]:
    """Convert a prompt or a chat to the messages that the chat template takes."""
    if messages is None:
        return [{"role": "user", "content": prompt}]
    return [turn_of(message) for message in messages]


def turn_of(message: wire.Message) -> dict[str, Any]:
    """Convert one message, as `messages_of`."""
    fields = structs.asdict(message)
    if message.tool_calls is not None:
        fields["tool_calls"] = list(message.tool_calls)
    if not isinstance(message.content, str):
        fields["content"] = [
            {"type": "text", "text": part.text}
            if isinstance(part, wire.TextPart)
            else {"type": "image"}
            for part in message.content
        ]
    return {key: value for key, value in fields.items() if value is not None}
