"""Replays a recorded trace against a server with OpenAI's API, with the fields that MLPerf's client
sends, so that any server can be measured alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from thor_dflash.calib.replay.command_overlap import overlap
from thor_dflash.calib.replay.openai_client import OpenAIConnection, StreamedAnswer
from thor_dflash.calib.replay.recorded_trace import Message, RecordedConversation, RecordedTrace
from thor_dflash.calib.replay.replay_report import ReplayTurn
from thor_dflash.core.errors import PlanError, RequestError
from thor_dflash.core.strict_records import as_table

COMMON: Mapping[str, Any] = {
    "temperature": 0.0,
    "seed": 42,
    "max_completion_tokens": 1024,
    "stream": True,
}
"""Source: mlcommons/endpoints, examples/11_Edge_Agentic_Example at ea33327."""
COUNTED: Mapping[str, Any] = {"stream_options": {"include_usage": True}}
"""Not sent by the benchmark; without it a server does not say how many tokens it read."""


@dataclass(frozen=True, slots=True)
class HttpReplay:
    """Sends the turns of a trace one after the other, each once the answer before is complete."""

    connection: OpenAIConnection
    model: str
    plain: bool = False
    """Send nothing that the benchmark does not send: no token counts."""
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Further fields of every request."""
    forced: float | Literal["drafter"] | None = None
    """As SessionReplay; needs a server of ours with serve.allow_forced."""

    def run(self, trace: RecordedTrace) -> Iterator[ReplayTurn]:
        """Answer every turn. An error ends its conversation."""
        for conversation in trace.conversations:
            for number in range(1, len(conversation.turns) + 1):
                found = self._turn(conversation, number)
                yield found
                if found.error:
                    break

    def body(self, conversation: RecordedConversation, number: int) -> dict[str, Any]:
        """The request of a turn, from 1."""
        return {
            "model": self.model,
            **COMMON,
            "messages": conversation.turns[number - 1].messages,
            **({"tools": conversation.tools} if conversation.tools else {}),
            **({} if self.plain else COUNTED),
            **self._forcing(conversation.turns[number - 1].answer),
            **self.extra,
        }

    def _forcing(self, answer: Message) -> dict[str, Any]:
        if self.forced is None:
            return {}
        given = {"forced_answer": answer}
        return given if self.forced == "drafter" else {**given, "forced_accept": self.forced}

    def _turn(self, conversation: RecordedConversation, number: int) -> ReplayTurn:
        headers = {"X-Session-ID": conversation.name}
        try:
            answer = self.connection.stream(self.body(conversation, number), headers)
        except (RequestError, PlanError) as e:
            return ReplayTurn(conversation=conversation.name, turn=number, error=str(e))
        ended = answer.extra.get("finish_reason")
        if self.forced is not None and ended != "forced":
            rule = "the server must commit forced_answer, as ours do with serve.allow_forced"
            error = f"{rule} (got an answer of its own)"
            return ReplayTurn(conversation=conversation.name, turn=number, error=error)
        return _measured(conversation, number, answer)


def _measured(conversation: RecordedConversation, number: int, got: StreamedAnswer) -> ReplayTurn:
    details = as_table(got.usage.get("prompt_tokens_details")) or {}
    reuse, spec = (as_table(got.extra.get(name)) or {} for name in ("reuse", "spec"))
    timings = as_table(got.extra.get("timings")) or {}
    first, last = got.first_s, got.last_s
    recorded = conversation.turns[number - 1].answer
    forced = got.extra.get("finish_reason") == "forced"
    return ReplayTurn(
        conversation=conversation.name,
        turn=number,
        prompt_tokens=_count(got.usage.get("prompt_tokens")),
        cached_tokens=_count(details.get("cached_tokens")),
        answer_tokens=_count(got.usage.get("completion_tokens")),
        prefill_ms=_number(timings.get("prefill_ms")),
        ttft_ms=None if first is None else 1e3 * first,
        decode_ms=None if first is None or last is None else 1e3 * (last - first),
        swap_ms=_number(reuse.get("swap_ms")),
        cycles=_count(spec.get("cycles")),
        boundary=str(reuse.get("boundary") or ""),
        why=str(reuse.get("why") or ""),
        finish="forced" if forced else got.finish,
        calls=len(got.calls),
        overlap=None if forced else overlap(recorded.get("tool_calls") or [], got.calls),
    )


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None
