"""`thor-dflash stats`: queue, speed, deadlines and power of a plan server, drawn on a terminal."""

from __future__ import annotations

import itertools
import json
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from thor_dflash.cli import plan_server
from thor_dflash.cli.report.server_facts import ServerReport
from thor_dflash.config.tree import Config
from thor_dflash.core.errors import PlanError
from thor_dflash.core.message_text import visible
from thor_dflash.core.plan_table import TableConsole
from thor_dflash.core.progress import Progress

if TYPE_CHECKING:
    from thor_dflash.serving.client import RemotePlanner

BARS, ASCII = "▁▂▃▄▅▆▇█", "_.-=*#"
"""Heights of a trend, and for terminals that have ASCII alone."""
COLOURS = {"ready": "green", "busy": "green", "loading": "yellow", "warming": "yellow"}
"""State -> its colour; of all others red."""
COLUMNS = (
    ("ended", "finish_reason", ""), ("queue ms", "queue_ms", ".0f"),
    ("first token ms", "ttft_ms", ".0f"), ("end to end ms", "e2e_ms", ".0f"),
    ("tokens/s", "tok_s", ".1f"), ("accept length", "accept_len", ".2f"),
)  # fmt: skip
"""Column of the last plans -> field of `stats.last`, format."""
SHOWN = 8
"""Plans in the table."""

Sample = ServerReport | PlanError
"""What a server reported, or why it did not."""


def run(args: Namespace, config: Config, progress: Progress) -> None:
    """Print the statistics once, or with --watch again and again until Ctrl-C."""
    progress.close()
    with plan_server.connect(args, retries=0, timeout_s=args.wait) as planner:
        if args.watch is None:
            _once(args, plan_server.report(planner))
        else:
            _watch(args, _samples(planner, args.watch))


def _once(args: Namespace, report: ServerReport) -> None:
    if args.json:
        print(json.dumps(report.table()))
        return
    console = TableConsole(sys.stdout)
    if _draws(console):
        console.print(_drawing(args.server, report, ascii_only=console.options.ascii_only))
    else:
        print("\n".join(f"{fact.name}: {visible(fact.text)}" for fact in report.facts()))


def _watch(args: Namespace, samples: Iterator[Sample]) -> None:
    console = TableConsole(sys.stdout)
    if args.json or not _draws(console):
        for sample in samples:
            print(json.dumps(_table(sample)) if args.json else _line(sample), flush=True)
        return
    with Live(console=console, auto_refresh=False, screen=True) as live:
        for sample in samples:
            plain = console.options.ascii_only
            live.update(_drawing(args.server, sample, ascii_only=plain), refresh=True)


def _draws(console: TableConsole) -> bool:
    return console.is_terminal and not console.is_dumb_terminal


def _samples(planner: RemotePlanner, every_s: float) -> Iterator[Sample]:
    """A sample every so many seconds. A server that is gone is waited for: it may be restarting.

    Raises:
        PlanError: the server refuses to answer this client.
    """
    start = time.monotonic()
    for number in itertools.count(1):
        try:
            yield plan_server.report(planner)
        except PlanError as e:
            if e.code != "unreachable" or not e.retryable:
                raise
            yield e
        time.sleep(max(0.0, start + number * every_s - time.monotonic()))


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _table(sample: Sample) -> dict[str, Any]:
    if isinstance(sample, PlanError):
        return {"time": _now(), "error": {"code": sample.code, "message": sample.message}}
    return {"time": _now(), **sample.table()}


def _line(sample: Sample) -> str:
    """One sample as `key=value` words. What is not known yet is left out."""
    words: dict[str, object] = {"state": "unreachable"}
    if isinstance(sample, ServerReport):
        stats, health = sample.stats, sample.health
        words = {name: health[name] for name in ("state", "running", "waiting")}
        for name in ("finished", "refused"):
            words[name] = sum(stats[name].values())
        for name in ("accept_len", "tok_s"):
            if (value := getattr(sample, name)) is not None:
                words[name] = f"{value:.2f}"
        words |= {f"watts_{rail}": f"{watts:.1f}" for rail, watts in sample.watts.items()}
        words |= {f"deadlines_{how}": n for how, n in stats.get("deadlines", {}).items()}
        for name in ("ttft_ms", "e2e_ms"):
            if (times := stats["percentiles"][name]) is not None:
                words[name] = f"{times['p50']:.0f}"
    return " ".join([_now(), *(f"{name}={value}" for name, value in words.items())])


def _drawing(server: str, sample: Sample, *, ascii_only: bool) -> Group:
    """The statistics for a terminal."""
    if isinstance(sample, PlanError):
        return Group(_text(server, "bold"), _text(sample.message, "red"))
    grid = Table.grid(padding=(0, 2, 0, 0))
    for _ in range(3):
        grid.add_column(overflow="fold")
    for fact in sample.facts():
        state = fact.name == "state"
        style = COLOURS.get(sample.health["state"], "red") if state else ""
        trend = _trend(fact.trend, ASCII if ascii_only else BARS)
        grid.add_row(_text(fact.name, "dim"), _text(fact.text, style), _text(trend, "cyan"))
    plans = sample.stats["last"][-SHOWN:]
    return Group(_text(server, "bold"), grid, *([_last(plans)] if plans else []))


def _last(plans: list[dict[str, Any]]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for name, _, form in COLUMNS:
        table.add_column(name, justify="right" if form else "left")
    for plan in plans:
        values = ((plan.get(key), form) for _, key, form in COLUMNS)
        table.add_row(*(_text("-" if v is None else format(v, form)) for v, form in values))
    return table


def _trend(values: Any, heights: str) -> str:
    """Values as bars between the least and the largest."""
    low, high = min(values, default=0.0), max(values, default=0.0)
    if len(values) < 2:
        return ""
    scale = (len(heights) - 1) / (high - low) if high > low else 0.0
    return "".join(heights[round(scale * (value - low))] for value in values)


def _text(text: str, style: str = "") -> Text:
    """A text that may come from a server, in which rich must see no markup."""
    return Text(visible(text), style=style)
