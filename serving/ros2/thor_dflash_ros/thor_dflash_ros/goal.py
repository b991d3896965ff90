"""Goals of Plan.action as requests of TDP/1, and replies as its results and feedback."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec import structs, to_builtins
from thor_dflash_msgs.action import Plan

from thor_dflash.core.errors import PlanError
from thor_dflash.serving.client import Chunk, PlanRequest, Result
from thor_dflash.serving.protocol import validation
from thor_dflash.serving.protocol.codec import convert
from thor_dflash.serving.protocol.errors import bad_request

PREEMPT = {
    Plan.Goal.SAME_SESSION: "same_session",
    Plan.Goal.NONE: "none",
    Plan.Goal.LOWER: "lower",
}
ERRORS = {
    "deadline": Plan.Result.DEADLINE,
    "cancelled": Plan.Result.CANCELLED,
    "preempted": Plan.Result.PREEMPTED,
    "stale": Plan.Result.STALE,
    "busy": Plan.Result.BUSY,
    "not_ready": Plan.Result.NOT_READY,
    "draining": Plan.Result.NOT_READY,
    "unreachable": Plan.Result.UNREACHABLE,
    "engine_fault": Plan.Result.SERVER_FAULT,
    "internal": Plan.Result.SERVER_FAULT,
}
"""Code of TDP/1 -> error_code; any other is REFUSED."""
OWN = {"op", "v", "id", "token", "stream", "return"}
"""Fields of a request that the node sets, so no goal may."""

ANSWERS = {"json_schema", "response_format", "skills", "tools"}
"""Fields that say what the answer is."""


NO_FRAME = {"format": "png", "data": b""}
"""An image, where only the goal is checked."""


def request_of(
    goal: Any,
    setting: dict[str, Any],
    skills: Any = None,
    frames: Mapping[str, Mapping[str, Any]] | None = None,
) -> PlanRequest:
    """Return the request of a goal.

    Args:
        setting: The node's parameters.
        skills: Those of its skills_file, for goals that have neither a schema nor skills.
        frames: The images of the goal's topics, without ids; None: the goal is only checked.

    Raises:
        PlanError: bad_request, naming the field.
    """
    table: dict[str, Any] = {
        "prompt": goal.prompt,
        "messages": _parsed("messages_json", goal.messages_json, list),
        "json_schema": _schema(goal, setting["schema_dir"]),
        "skills": _parsed("skills_json", goal.skills_json, dict),
        "plan_format": goal.plan_format,
        "images": [
            {"id": topic, **(NO_FRAME if frames is None else frames[topic])}
            for topic in goal.images
        ],
        "thinking": goal.thinking,
        "thinking_budget": goal.thinking_budget if goal.thinking_budget >= 0 else None,
        "max_tokens": goal.max_tokens,
        "prefix_id": goal.prefix_id,
        "deadline_ms": _milliseconds(goal.deadline),
        "on_deadline": "error" if goal.whole else None,
        "session": goal.session,
        "generation": goal.generation,
    }
    if goal.images and goal.prompt:
        shown = [{"type": "image", "image": topic} for topic in goal.images]
        table["prompt"], parts = "", [{"type": "text", "text": goal.prompt}, *shown]
        if table["messages"] is None:
            table["messages"] = [{"role": "user", "content": parts}]
        else:
            raise bad_request("prompt must be left out with messages_json (got both)", "prompt")
    # Zero and empty stand for the server's default; what was parsed, and a budget, may be either.
    kept = ("messages", "json_schema", "skills", "thinking_budget")
    given = {k: v for k, v in table.items() if v or (k in kept and v is not None)}
    if goal.preempt not in PREEMPT:
        raise bad_request(f"preempt must be 0, 1 or 2 (got {goal.preempt})", "preempt")
    given |= {"priority": goal.priority, "preempt": PREEMPT[goal.preempt]}
    given["stream"] = setting["feedback"]
    options = _parsed("options_json", goal.options_json, dict) or {}
    if twice := sorted(options.keys() & (given.keys() | OWN)):
        text = f"options_json must have further fields only (got {twice[0]})"
        raise bad_request(text, "options_json")
    if skills is not None and not ANSWERS & (given.keys() | options.keys()):
        given["skills"] = skills
    request = convert(given | options, PlanRequest)
    validation.check(request)
    return request


def _parsed(name: str, text: str, kind: type) -> Any:
    """The value of a JSON text; None if it is empty."""
    if not text:
        return None
    try:
        value = json.loads(text)
    except ValueError as e:
        raise bad_request(f"{name} must be JSON (got: {e})", name) from e
    if not isinstance(value, kind):
        what = "a list" if kind is list else "an object"
        raise bad_request(f"{name} must be {what} of JSON (got {text[:40]})", name)
    return value


def _schema(goal: Any, schema_dir: str) -> Any:
    if goal.schema and goal.json_schema:
        raise bad_request("schema must be left out where json_schema is given (got both)", "schema")
    if not goal.schema:
        return _parsed("json_schema", goal.json_schema, dict)
    known = {path.stem: path for path in Path(schema_dir).glob("*.json")} if schema_dir else {}
    if goal.schema not in known:
        names = ", ".join(sorted(known)) or "none: set the parameter"
        text = f"schema must be that of a file in schema_dir (got {goal.schema}; there is {names})"
        raise bad_request(text, "schema")
    try:
        return _parsed("schema", known[goal.schema].read_text(encoding="utf-8"), dict)
    except (OSError, UnicodeDecodeError) as e:
        raise bad_request(f"schema must be readable (got: {e})", "schema") from e


def _milliseconds(duration: Any) -> int | None:
    """A deadline; None for 0. A negative one is refused by its range."""
    if duration.sec == 0 and duration.nanosec == 0:
        return None
    return int(duration.sec * 1000 + duration.nanosec // 1_000_000) or 1


def feedback_of(chunk: Chunk, stamp: Any) -> Any:
    """Return the feedback for a step or for progress; None for other chunks."""
    message = Plan.Feedback(stamp=stamp)
    if chunk.kind == "step" and chunk.step is not None:
        message.kind, message.index = Plan.Feedback.STEP, chunk.index or 0
        message.skill = str(chunk.step.get("skill", ""))
        message.args_json = _json(chunk.step.get("args", {}))
        message.step_json = _json(chunk.step)
    elif chunk.kind == "progress":
        message.kind = Plan.Feedback.PROGRESS
    else:
        return None
    message.phase, message.tokens = chunk.phase or "", chunk.tokens or 0
    return message


def result_of(result: Result) -> Any:
    """Return a finished plan. Its error_code is OK if there is a valid plan, also a partial one."""
    message = Plan.Result(
        plan_json="" if result.plan is None else _json(result.plan),
        text=result.text or "",
        plan_valid=result.plan_valid,
        status=result.status,
        finish_reason=result.finish_reason,
        prompt_tokens=result.usage.prompt_tokens,
        cached_tokens=result.usage.cached_tokens,
        thinking_tokens=result.usage.thinking_tokens,
        output_tokens=result.usage.output_tokens,
        result_json=_json(to_builtins(structs.asdict(result))),
    )
    if result.timings is not None:
        message.ttft_ms, message.e2e_ms = result.timings.ttft_ms, result.timings.e2e_ms
    if result.spec is not None:
        message.accept_len = result.spec.accept_len
    if result.plan is None and result.finish_reason == "deadline":
        message.error_code, message.code = Plan.Result.DEADLINE, "deadline"
        message.error_msg = "the plan must have a whole step by its deadline (got none)"
    elif not result.plan_valid:
        message.error_code, message.code = Plan.Result.INVALID_PLAN, "invalid_plan"
        message.error_msg = (
            f"the answer must be a valid plan (got status {result.status}, "
            f"ended by {result.finish_reason})"
        )
    return message


def failure_of(error: PlanError) -> Any:
    """Return the result of a goal that got no plan."""
    message = Plan.Result(
        error_code=ERRORS.get(error.code, Plan.Result.REFUSED),
        error_msg=error.message,
        code=error.code,
        retryable=error.retryable,
    )
    if error.min_ms is not None:
        message.error_msg += f"; min_ms {error.min_ms}"
    if error.retry_after_ms is not None:
        seconds, rest = divmod(int(error.retry_after_ms), 1000)
        message.retry_after.sec, message.retry_after.nanosec = seconds, rest * 1_000_000
    return message


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
