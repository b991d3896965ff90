"""A plan as a table for a terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text


class TableConsole(Console):
    """A rich console that raises BrokenPipeError for a closed pipe, which the command line handles;
    rich itself would exit with status 1. `on_broken_pipe` is its documented hook.
    """

    def on_broken_pipe(self) -> None:
        """See rich."""
        raise BrokenPipeError


def plan_panel(plan: object, text: str, state: str, colour: str) -> Panel:
    """Return the steps of a plan with `state` below them, framed in `colour`. A plan without the
    fields of `tdp.plan.v1` is shown as `text`.
    """
    # Text, because rich would take brackets in the model's text for markup.
    below = Text(state, style=colour)
    try:
        shown: list[Any] = _contents(plan)
    except (KeyError, TypeError, AttributeError):
        return Panel(Group(Text(text), below), title="answer", border_style=colour)
    return Panel(Group(*shown, below), title="plan", title_align="left", border_style=colour)


def _contents(plan: Any) -> list[Any]:
    """Return goal, steps and question. A malformed plan raises KeyError, TypeError etc."""
    steps, question = _steps(plan["steps"]), plan["needs_clarification"]
    goal = Text(f"goal: {plan['goal']}", style="bold")
    asks = [Text(f"asks: {question}", style="yellow")] if question else []
    return [goal, *([steps] if steps.rows else []), *asks]


def _steps(steps: list[dict[str, Any]]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for name in ("#", "skill", "arguments", "on failure"):
        table.add_column(name, overflow="fold")
    for step in steps:
        arguments = ", ".join(f"{key}={value}" for key, value in step["args"].items())
        table.add_row(Text(str(step["id"])), Text(step["skill"], style="cyan"),
                      Text(arguments), Text(str(step.get("on_fail", ""))))  # fmt: skip
    return table
