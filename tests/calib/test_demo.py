"""What the demo prints: progress, plans, histograms and figures, over stand-ins for a session."""

from __future__ import annotations

import io
import json
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from thor_dflash.calib import demo
from thor_dflash.calib.planbench.judge import Verdict


@pytest.mark.parametrize(
    "steps", [None, [1], ["pick"], [{}], [{"id": 1, "skill": "pick", "args": ["mug"]}]]
)
def test_an_answer_that_is_no_plan_is_shown_as_it_is(steps: object) -> None:
    text = json.dumps({"goal": "x", "steps": steps, "needs_clarification": None})
    console = Console(file=io.StringIO(), width=200)
    with console.capture() as shown:
        console.print(demo._plan(text, Verdict(False, "steps must be an array")))
    assert text in shown.get()
    assert "steps must be an array" in shown.get()


def test_brackets_in_an_answer_are_no_markup() -> None:
    args = {"object": "[/mug]", "on": "[red]table"}
    step = {"id": "[/1]", "skill": "place", "args": args, "on_fail": "[/retry]"}
    plan = {"goal": "[mug->table]", "steps": [step], "needs_clarification": "[/why]?"}
    console = Console(file=io.StringIO(), width=200)
    with console.capture() as shown:
        console.print(demo._plan(json.dumps(plan), Verdict(False, "id must be 1")))
    for part in ("object=[/mug], on=[red]table", "[/1]", "[/retry]", "[mug->table]", "[/why]?"):
        assert part in shown.get()


def test_the_speed_up_is_plain_over_drafted_of_the_medians() -> None:
    def run(*ms: float) -> demo.DemoRun:
        spec = SimpleNamespace(cycles=3, accept_hist=(1, 2), accept_len=1.67)
        reports: Any = tuple(
            SimpleNamespace(spec=spec, timings=SimpleNamespace(e2e_ms=x, tok_s=x)) for x in ms
        )
        return demo.DemoRun((1, 2), reports)

    console = Console(file=io.StringIO(), width=100)
    with console.capture() as shown:
        console.print(demo._numbers(run(900, 500, 100), run(2000, 1000, 9000), 7))
    cells = [[c.strip() for c in line.split("│")] for line in shown.get().splitlines()]
    rows = {row[1]: row[2:4] for row in cells if len(row) > 3}
    assert rows["speed-up"] == ["4.0x", "1.0x"]
    assert rows["request to plan, s"] == ["0.50", "2.00"]
