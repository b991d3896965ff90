"""Checks of plan requests that the types cannot express. Unsupported values are refused, never
ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from thor_dflash.errors import PlanError
from thor_dflash.records import show
from thor_dflash.serving import wire
from thor_dflash.serving.codec import plain

SCHEMA_BYTES = 128 << 10
METADATA_BYTES = 1 << 10
ONE_OF_TWO = "prompt or messages must be given, and one of them only"


def check(ask: wire.Ask) -> None:
    """Refuse a request that contradicts itself or asks for something unsupported.

    Raises:
        PlanError: naming the field.
    """
    if ask.prompt is None and ask.messages is None:
        raise _bad("prompt", ONE_OF_TWO + " (got neither)")
    check_prompt(ask)
    check_deadline(ask)
    if ask.stream is True:
        raise _bad("stream", "stream must be false, steps, text or all (got true)")
    _greedy(ask)
    both = ask.thinking_budget is not None and ask.thinking_token_budget is not None
    if both:
        name = "thinking_token_budget"
        raise _bad(name, f"{name} must be given alone (got thinking_budget, too)")
    if ask.json_schema is not None and ask.response_format is not None:
        raise _bad("response_format", "json_schema must be given once (got both spellings)")


def check_prompt(request: wire.Ask | wire.Validate) -> None:
    """Refuse a request with both prompt and messages, or with an empty one of them.

    Raises:
        PlanError: naming the field.
    """
    if request.prompt is not None and request.messages is not None:
        raise _bad("prompt", ONE_OF_TWO + " (got both)")
    if request.prompt is not None and not request.prompt.strip():
        raise _bad("prompt", "prompt must be some text (got none)")
    if request.messages is not None and not request.messages:
        raise _bad("messages", "messages must be at least one (got none)")


def check_deadline(ask: wire.Ask) -> None:
    """Refuse a deadline below 1 ms, which would count as already passed.

    Raises:
        PlanError: naming the field.
    """
    if ask.deadline_ms is not None and ask.deadline_ms < 1:
        raise _bad("deadline_ms", f"deadline_ms must be an integer >= 1 (got {ask.deadline_ms})")


def _greedy(ask: wire.Ask) -> None:
    rules: dict[str, tuple[object, bool]] = {
        "temperature": (ask.temperature, ask.temperature == 0),
        "top_p": (ask.top_p, ask.top_p == 1),
        "top_k": (ask.top_k, ask.top_k in (None, 0, 1)),
        "seed": (ask.seed, ask.seed is None),
        "stop": (ask.stop, ask.stop is None or len(ask.stop) == 0),
    }
    for name, (value, fine) in rules.items():
        if not fine:
            raise _bad(name, f"{name} must be left out, decoding is greedy (got {show(value)})")


def schema_of(ask: wire.Ask) -> Mapping[str, Any] | None:
    """Return the schema of a request, given as `json_schema` or as `response_format`."""
    if ask.response_format is not None:
        return ask.response_format.json_schema.schema
    return ask.json_schema


def no_object(schema: Mapping[str, Any]) -> PlanError:
    """Return the error for a schema that does not allow an object, which every plan is."""
    text = f"the root of json_schema must be an object (got {show(schema)})"
    return PlanError("schema_unsupported", text, field="json_schema")


def check_values(ask: wire.Ask) -> None:
    """Refuse free-form values that are too large, too deep or not JSON. Slow for large values.

    Raises:
        PlanError: naming the field.
    """
    if (schema := schema_of(ask)) is not None:
        plain(schema, "json_schema", SCHEMA_BYTES)
    if ask.metadata is not None:
        plain(ask.metadata, "metadata", METADATA_BYTES)


def budget_of(ask: wire.Ask, default: int) -> int:
    """Return the most thinking tokens that a request allows, before any deadline is considered."""
    if ask.thinking == "off":
        return 0
    given = ask.thinking_budget if ask.thinking_budget is not None else ask.thinking_token_budget
    return default if given is None else given


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
