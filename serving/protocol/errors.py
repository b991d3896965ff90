"""The errors that more than one part of the protocol raises, and their message on the wire."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from thor_dflash.core.errors import PlanError, RequestError
from thor_dflash.core.message_text import cut, show, visible
from thor_dflash.serving.protocol import messages

MAX_TEXT = 500
"""Most characters of an error of the lower layers that a client gets."""


def bad_request(message: str, field: str | None = None) -> PlanError:
    """Return the error for a request that must not be sent again; `field` is at fault."""
    return PlanError("bad_request", message, field=field)


def refusal(error: RequestError) -> str:
    """Return a refusal as text for a client, who may have sent names of any length and content."""
    return visible(cut(str(error), MAX_TEXT))


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


def no_object(schema: Mapping[str, Any]) -> PlanError:
    """Return the error for a schema that does not allow an object, which every plan is."""
    text = f"json_schema must allow an object, as every plan is one (got {show(schema)})"
    return PlanError("schema_unsupported", text, field="json_schema")


def dropped() -> PlanError:
    """Return the error for a `prefix.put` whose prefix was dropped before the answer."""
    return PlanError("cancelled", "the prefix was dropped before its put was answered")


def error_reply(error: PlanError, id: str | None, seq: int = 0) -> messages.ErrorReply:
    """Return the message that reports an error."""
    return messages.ErrorReply(
        code=error.code,
        message=error.message,
        id=id,
        seq=seq,
        retryable=error.retryable,
        retry_after_ms=error.retry_after_ms,
        min_ms=error.min_ms,
        field=error.field,
    )
