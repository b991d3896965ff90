"""Writes answers of TDP/1 as OpenAI's chat completions, whole and streamed."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

import msgspec

from thor_dflash.serving.protocol import messages as wire

FINISH: Mapping[str, str] = {
    "stop": "stop", "tool_calls": "tool_calls", "grammar_dead_end": "content_filter",
}  # fmt: skip
"""OpenAI's finish reason for ours; all others become `length`: the text is incomplete."""
EXTRAS = (
    "status", "finish_reason", "plan_valid", "thinking_closed", "thinking_budget", "cut_call",
    "notes", "images", "reuse", "seed", "acceptance", "timings", "spec", "plan",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ResponseHeader:
    """The fields that are equal in all pieces of an answer."""

    model: str
    id: str = field(default_factory=lambda: f"chatcmpl-{uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))
    """Seconds since 1970. Equal in all pieces, by which clients may group them."""
    _calls: dict[int, str] = field(default_factory=dict[int, str])

    def call_id(self, index: int) -> str:
        """The id of a tool call of this answer, the same in all pieces and no other answer's."""
        return self._calls.setdefault(index, f"call_{secrets.token_hex(12)}")


def completion(answer: ResponseHeader, result: wire.Result) -> dict[str, Any]:
    """Return a complete answer. `thor_dflash` holds what OpenAI's format has no field for."""
    message: dict[str, Any] = {
        "role": "assistant",
        "content": result.text,
        "reasoning_content": result.thinking,
    }
    if result.tool_calls:
        message["content"] = result.text or None
        message["tool_calls"] = [
            _call(answer, index, call.name, call.text)
            for index, call in enumerate(result.tool_calls)
        ]
    return {
        **_frame(answer, "chat.completion"),
        "choices": [
            {"index": 0, "message": message, "finish_reason": _finish(result), "logprobs": None}
        ],
        "usage": usage(result),
        **acceptance(result),
        "thor_dflash": telemetry(result),
    }


def delta(answer: ResponseHeader, **fields: object) -> dict[str, Any]:
    """Return a piece of a streamed answer."""
    return {
        **_frame(answer, "chat.completion.chunk"),
        "choices": [{"index": 0, "delta": fields, "finish_reason": None}],
    }


def call_deltas(answer: ResponseHeader, part: wire.CallDelta) -> list[dict[str, Any]]:
    """Return the pieces for a part of a tool call: its beginning, and the next characters of its
    arguments."""
    found: list[dict[str, Any]] = []
    if part.name:
        found.append({"index": part.index, **_call(answer, part.index, part.name, "")})
    if part.arguments:
        found.append({"index": part.index, "function": {"arguments": part.arguments}})
    return [delta(answer, tool_calls=[one]) for one in found]


def _call(answer: ResponseHeader, index: int, name: str, arguments: str) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": answer.call_id(index), "type": "function", "function": function}


def ending(answer: ResponseHeader, result: wire.Result) -> dict[str, Any]:
    """Return the last piece of a streamed answer."""
    return {
        **_frame(answer, "chat.completion.chunk"),
        "choices": [{"index": 0, "delta": {}, "finish_reason": _finish(result)}],
        "thor_dflash": telemetry(result),
    }


def counted(answer: ResponseHeader, result: wire.Result) -> dict[str, Any]:
    """Return the piece with the usage, sent after the last one if requested."""
    return {
        **_frame(answer, "chat.completion.chunk"),
        "choices": [],
        "usage": usage(result),
        **acceptance(result),
    }


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


def acceptance(result: wire.Result) -> dict[str, Any]:
    """Return `metrics.speculative_decoding` as vLLM has it, from which AIPerf and its SPEED-Bench
    report read the acceptance of each request; nothing without a drafter. Tokens that a grammar or
    a budget forced count as accepted drafts: they cost no cycle either.
    """
    spec = result.spec
    if spec is None or len(spec.accept_hist) < 2:
        return {}
    accepted = sum(count * cycles for count, cycles in enumerate(spec.accept_hist))
    drafted = spec.drafted + spec.forced
    stats = {
        "mean_acceptance_length": 1 + accepted / spec.cycles if spec.cycles else 1.0,
        "draft_acceptance_rate": accepted / drafted if drafted else 0.0,
        "acceptance_histogram": spec.accept_hist,
        "num_spec_steps": spec.cycles,
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": drafted,
        "num_spec_tokens": len(spec.accept_hist) - 1,
    }
    return {"metrics": {"speculative_decoding": stats}}


def telemetry(result: wire.Result) -> dict[str, Any]:
    """Return the fields of the result that OpenAI's format lacks."""
    table: dict[str, Any] = msgspec.to_builtins(result)
    return {name: table[name] for name in EXTRAS}


def _finish(result: wire.Result) -> str:
    return FINISH.get(result.finish_reason, "length")


def _frame(answer: ResponseHeader, kind: str) -> dict[str, Any]:
    return {
        "id": answer.id,
        "object": kind,
        "created": answer.created,
        "model": answer.model,
    }
