"""The tools of a plan request, as the runtime takes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from thor_dflash.core.errors import PlanError, RequestError
from thor_dflash.core.message_text import show
from thor_dflash.core.strict_records import as_list, as_table
from thor_dflash.runtime.grammar.tools import ToolUse
from thor_dflash.runtime.text.tool_calls import Tool, tools_of
from thor_dflash.serving.protocol.errors import bad_request, refusal
from thor_dflash.serving.protocol.messages import PlanRequest

Choice = Literal["auto", "none", "required"]


def tool_use(ask: PlanRequest, values: Literal["off", "frame", "schema"]) -> ToolUse | None:
    """The tools of a request; None if it has none.

    Args:
        ask: The request.
        values: What is enforced of calls that nobody demanded.

    Raises:
        PlanError: naming the field.
    """
    if not ask.tools:
        if ask.tool_choice not in (None, "none", "auto"):
            raise bad_request(
                f"tool_choice must be left out without tools (got {show(ask.tool_choice)})",
                "tool_choice",
            )
        return None
    try:
        tools = tools_of(list(ask.tools))
    except RequestError as e:
        field = str(e).partition(" must ")[0]
        raise PlanError("bad_request", refusal(e), field=field) from e
    choice, only = _choice(ask.tool_choice, tools)
    return ToolUse(
        tools=tools, choice=choice, only=only, parallel=ask.parallel_tool_calls, values=values
    )


def _choice(given: object, tools: tuple[Tool, ...]) -> tuple[Choice, frozenset[str]]:
    if given is None or given == "auto":
        return "auto", frozenset()
    if given == "none":
        return "none", frozenset()
    if given == "required":
        return "required", frozenset()
    table = as_table(given) or {}
    if table.get("type") == "function":
        return "required", frozenset((_declared(table, "tool_choice", tools),))
    allowed = as_table(table.get("allowed_tools"))
    if table.get("type") != "allowed_tools" or allowed is None:
        rule = "none, auto, required, a function or allowed_tools"
        raise bad_request(f"tool_choice must be {rule} (got {show(given)})", "tool_choice")
    mode, where = allowed.get("mode"), "tool_choice.allowed_tools"
    if mode != "auto" and mode != "required":
        raise bad_request(f"{where}.mode must be auto or required (got {show(mode)})", where)
    entries = as_list(allowed.get("tools")) or []
    names = [
        _declared(as_table(e) or {}, f"{where}.tools[{i}]", tools) for i, e in enumerate(entries)
    ]
    if not names:
        raise bad_request(f"{where}.tools must name at least one tool (got none)", where)
    return "auto" if mode == "auto" else "required", frozenset(names)


def _declared(entry: Mapping[str, Any], where: str, tools: tuple[Tool, ...]) -> str:
    name = (as_table(entry.get("function")) or {}).get("name")
    if not isinstance(name, str) or name not in {tool.name for tool in tools}:
        where = f"{where}.function.name"
        raise bad_request(f"{where} must be one of the tools (got {show(name)})", where)
    return name
