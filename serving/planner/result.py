"""Builds the result of a run from the decoded text: extracts the plan and validates it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Literal

from msgspec import structs

from thor_dflash.core.results import Speculation, Timings, Usage
from thor_dflash.runtime.decoding.telemetry import ReuseReport
from thor_dflash.runtime.text.tool_calls import ToolCallParser
from thor_dflash.serving.planner.backend import Prepared
from thor_dflash.serving.protocol import messages


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoded:
    """The output of one run."""

    finish: messages.Finish
    text: str
    """The answer, without the thinking."""
    thinking: str
    tokens: tuple[int, ...]
    usage: Usage
    timings: Timings
    spec: Speculation | None
    closed: Literal["", "natural", "soft", "hard", "call"] = ""
    """How the thinking ended."""
    calls: ToolCallParser | None = None
    """None: none could be made."""
    reuse: ReuseReport | None = None
    images: tuple[messages.ImageResult, ...] | None = None


def result(prepared: Prepared, decoded: Decoded) -> messages.Result:
    """Return the result of a run, with the parts that were requested and all times."""
    ask, wanted = prepared.ask, frozenset(prepared.ask.parts)
    calls, form = _calls(decoded), prepared.format
    plan, valid = (
        (None, False) if calls else form.read(decoded.text, whole=decoded.finish == "stop")
    )
    finish = "tool_calls" if calls and decoded.finish == "stop" else decoded.finish
    reuse, parser, drawn = decoded.reuse, decoded.calls, prepared.sampling
    return messages.Result(
        finish_reason=finish,
        status=_status(decoded.finish, not form.demanded or valid or bool(calls)),
        tool_calls=calls,
        cut_call=parser.cut if parser else None,
        notes=tuple(parser.notes) if parser else (),
        reuse=messages.ReuseResult(**asdict(reuse)) if reuse else None,
        plan=plan if "plan" in wanted else None,
        plan_valid=valid,
        text=decoded.text if "text" in wanted else None,
        thinking=decoded.thinking if "thinking" in wanted else None,
        tokens=decoded.tokens if "tokens" in wanted else None,
        generation=ask.generation,
        session=ask.session,
        prefix_id=ask.prefix_id,
        seed=drawn.seed if drawn else None,
        acceptance=drawn.acceptance if drawn else None,
        # Only thinking is decoded relaxed.
        accept_mode=ask.accept_mode if decoded.usage.thinking_tokens else "exact",
        thinking_closed=decoded.closed,
        thinking_budget=prepared.budget,
        usage=decoded.usage,
        images=decoded.images,
        timings=decoded.timings,
        spec=decoded.spec,
        metadata=ask.metadata,
    )


def _calls(decoded: Decoded) -> tuple[messages.CallResult, ...] | None:
    found = decoded.calls.calls if decoded.calls else []
    calls = (
        messages.CallResult(name=c.name, arguments=json.loads(c.arguments), text=c.arguments)
        for c in found
    )
    return tuple(calls) or None


def requested_parts(result: messages.Result, ask: messages.PlanRequest) -> messages.Result:
    """Return the result as it is sent, with times only if requested. They are removed this late
    because the statistics need the times of every plan.
    """
    if "timings" in ask.parts:
        return result
    return structs.replace(result, timings=None, spec=None)


def _status(finish: messages.Finish, sound: bool) -> messages.Status:
    if finish == "stop":
        return "ok" if sound else "error"
    return "error" if finish in ("grammar_dead_end", "error") else "partial"
