"""A plan as a table for a terminal."""

from __future__ import annotations

from typing import Any, TextIO

from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from thor_dflash.core.message_text import visible


class TableConsole(Console):
    """A rich console that raises BrokenPipeError for a closed pipe, which the command line handles;
    rich itself would exit with status 1. `on_broken_pipe` is its documented hook.
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__(file=stream, highlight=False)
        if not self.width:  # a terminal that does not know its size: it would show nothing
            self.width = 80

    def on_broken_pipe(self) -> None:
        """See rich."""
        raise BrokenPipeError


def plan_panel(plan: object, text: str, state: str, colour: str) -> Panel:
    """Return the steps of a plan with `state` below them, framed in `colour`. A plan without the
    fields of `tdp.plan.v1` is shown as `text`.
    """
    below = _text(state, colour)
    try:
        shown: list[Any] = _contents(plan)
    except (KeyError, TypeError, AttributeError):
        return Panel(Group(_text(text), below), title="answer", border_style=colour)
    return Panel(Group(*shown, below), title="plan", title_align="left", border_style=colour)


def _contents(plan: Any) -> list[Any]:
    """Return goal, steps and question, or steps and the text of another format. A malformed plan
    raises KeyError, TypeError etc.
    """
    if "body" in plan:
        return [_steps(plan["steps"]), _text(plan["body"].removesuffix("\n"), "dim")]
    steps, question = _steps(plan["steps"]), plan["needs_clarification"]
    goal = _text(f"goal: {plan['goal']}", "bold")
    asks = [_text(f"asks: {question}", "yellow")] if question else []
    return [goal, *([steps] if steps.rows else []), *asks]


def _steps(steps: list[dict[str, Any]]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for name in ("#", "skill", "arguments", "on failure"):
        table.add_column(name, overflow="fold")
    for step in steps:
        arguments = ", ".join(f"{key}={value}" for key, value in step["args"].items())
        cells = (str(step["id"]), arguments, str(step.get("on_fail", "")))
        number, what, fails = map(_text, cells)
        table.add_row(number, _text(step["skill"], "cyan"), what, fails)
    return table


def _text(text: str, style: str = "") -> Text:
    """A text of the model. Not a str, of which rich would take brackets for markup; and a terminal
    would obey control characters.
    """
    return Text(visible(text, keep="\n"), style=style)
