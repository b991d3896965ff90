"""Checks of plan requests that the types cannot express. Unsupported values are refused, never
ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from thor_dflash.config.serving import ServeConfig
from thor_dflash.core.errors import PlanError, RequestError
from thor_dflash.core.message_text import cut, show, visible
from thor_dflash.serving.protocol import messages as wire
from thor_dflash.serving.protocol.codec import check_plain, convert

SCHEMA_BYTES = 128 << 10
METADATA_BYTES = 1 << 10
MESSAGE = 500
"""Maximum characters of a refusal by the floors below."""
ONE_OF_TWO = "prompt or messages must be given, and one of them only"


def check(ask: wire.PlanRequest) -> None:
    """Refuse a request that contradicts itself or asks for something unsupported.

    Raises:
        PlanError: naming the field.
    """
    if ask.prompt is None and ask.messages is None:
        raise _bad("prompt", ONE_OF_TWO + " (got neither)")
    check_prompt(ask)
    check_reckoned(ask)
    if ask.stream is True:
        raise _bad("stream", "stream must be false, steps, text or all (got true)")
    _greedy(ask)
    both = ask.thinking_budget is not None and ask.thinking_token_budget is not None
    if both:
        name = "thinking_token_budget"
        raise _bad(name, f"{name} must be left out where thinking_budget is given (got both)")
    if ask.json_schema is not None and ask.response_format is not None:
        raise _bad(
            "response_format",
            "response_format must be left out where json_schema is given (got both)",
        )


def check_prompt(request: wire.PlanRequest | wire.Validate) -> None:
    """Refuse a request with both prompt and messages, or with an empty one of them.

    Raises:
        PlanError: naming the field.
    """
    if request.prompt is not None and request.messages is not None:
        raise _bad("prompt", ONE_OF_TWO + " (got both)")
    if request.prompt is not None and not request.prompt.strip():
        raise _bad(
            "prompt", f"prompt must be a text that is not empty (got {show(request.prompt)})"
        )
    if request.messages is not None and not request.messages:
        raise _bad("messages", "messages must hold at least one message (got none)")


def check_reckoned(ask: wire.PlanRequest) -> None:
    """Refuse a deadline or a session of a wrong type or value as the decoding of a request does: in
    a program's own process these two are used without it, or before it.

    Raises:
        PlanError: naming the field.
    """
    given = {"deadline_ms": ask.deadline_ms, "session": ask.session}
    convert(given, wire.PlanRequest)


def _greedy(ask: wire.PlanRequest) -> None:
    greedy = "as decoding is greedy"
    rules: dict[str, tuple[object, bool, str]] = {
        "temperature": (ask.temperature, ask.temperature == 0, f"0 or left out, {greedy}"),
        "top_p": (ask.top_p, ask.top_p == 1, f"1 or left out, {greedy}"),
        "top_k": (ask.top_k, ask.top_k in (None, 0, 1), f"0, 1 or left out, {greedy}"),
        "seed": (ask.seed, ask.seed is None, f"left out, {greedy}"),
        "stop": (ask.stop, not ask.stop, "left out, as the model itself ends its answer"),
    }
    for name, (value, fine, rule) in rules.items():
        if not fine:
            raise _bad(name, f"{name} must be {rule} (got {show(value)})")


def refusal(error: RequestError) -> str:
    """Return a refusal as text for a client, who may have sent names of any length and content."""
    return visible(cut(str(error), MESSAGE))


def too_long(limit: int, prompt: int, max_tokens: int, closing: int = 0) -> PlanError:
    """Return the error for a plan that does not fit the context, in tokens. `closing`: those of the
    message that closes the thinking, 0 without thinking.
    """
    what, got = "prompt and max_tokens", f"{prompt} + {max_tokens}"
    if closing:
        what = "prompt, max_tokens and the message that closes the thinking"
        got += f" + {closing}"
    text = (
        f"{what} together must be <= {limit} tokens (got {got} = {prompt + max_tokens + closing})"
    )
    return PlanError("prompt_too_long", text, field="prompt")


def schema_of(ask: wire.PlanRequest) -> Mapping[str, Any] | None:
    """Return the schema of a request, given as `json_schema` or as `response_format`."""
    if ask.response_format is not None:
        return ask.response_format.json_schema.schema
    return ask.json_schema


def no_object(schema: Mapping[str, Any]) -> PlanError:
    """Return the error for a schema that does not allow an object, which every plan is."""
    text = f"json_schema must allow an object, as every plan is one (got {show(schema)})"
    return PlanError("schema_unsupported", text, field="json_schema")


def dropped() -> PlanError:
    """Return the error for a `prefix.put` whose prefix was dropped before the answer."""
    return PlanError("cancelled", "the prefix was dropped before its put was answered")


def check_values(ask: wire.PlanRequest) -> None:
    """Refuse free-form values that are too large, too deep or not JSON. Slow for large values.

    Raises:
        PlanError: naming the field.
    """
    if (schema := schema_of(ask)) is not None:
        check_plain(schema, "json_schema", SCHEMA_BYTES)
    if ask.metadata is not None:
        check_plain(ask.metadata, "metadata", METADATA_BYTES)


def budget_of(ask: wire.PlanRequest, config: ServeConfig) -> int:
    """Return the most thinking tokens that a request allows, before any deadline is considered."""
    if (ask.thinking or config.thinking) == "off":
        return 0
    given = ask.thinking_budget if ask.thinking_budget is not None else ask.thinking_token_budget
    return config.thinking_budget if given is None else given


def messages_of(prompt: str | None, messages: tuple[wire.Message, ...] | None) -> list[object]:
    """Convert a prompt or a chat to the messages that the chat template takes."""
    if messages is None:
        return [{"role": "user", "content": prompt}]
    return [_turn(message) for message in messages]


def _turn(message: wire.Message) -> dict[str, str]:
    turn = {"role": message.role, "content": message.content}
    if message.reasoning_content is not None:
        turn["reasoning_content"] = message.reasoning_content
    return turn


def _bad(field: str, message: str) -> PlanError:
    return PlanError("bad_request", message, field=field)
