"""A pytest plugin: prints CPU seconds of each folder of tests, with --cpu-budget.

More in all than cpu_budget.toml allows fails the tests; a folder over its own limit is a warning.
Processes that a test starts and waits for count as well: g++, NVRTC, servers.
"""

from __future__ import annotations

import os
import tomllib
from collections import Counter
from pathlib import Path

import pytest

BUDGET = Path(__file__).parents[1] / "cpu_budget.toml"
COLLECTION, TOTAL, OTHERS = "collection", "total", "others"
"""Rows beside the folders: starting and collecting, the sum, a limit of folders not listed."""


class CpuSeconds:
    """Adds up CPU seconds in each process that runs tests; the first process prints them all."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._seconds: Counter[str] = Counter()
        self._counted = 0.0
        self._over: dict[str, str] = {}

    def _count(self, row: str) -> None:
        now = sum(os.times()[:4])
        self._seconds[row] += now - self._counted
        self._counted = now

    def pytest_collection_finish(self) -> None:
        """Counts what starting and collecting took."""
        self._count(COLLECTION)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> object:
        """Counts what a test took, with its fixtures: in the row of its folder, two levels deep."""
        done = yield
        self._count("/".join(item.nodeid.split("::")[0].split("/")[1:-1][:2]) or ".")
        return done

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: object) -> None:
        """Adds the seconds of a worker of xdist."""
        self._seconds.update(getattr(node, "workeroutput", {}).get("cpu", {}))

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """A worker sends its seconds; the first process compares them with the budget."""
        self._count(COLLECTION)
        sent = getattr(self._config, "workeroutput", None)
        if sent is not None:
            sent["cpu"] = dict(self._seconds)
            return
        if not self._config.getoption("--cpu-budget"):
            return
        limits = tomllib.loads(BUDGET.read_text(encoding="utf-8"))["seconds"]
        for row, seconds in (*self._seconds.items(), (TOTAL, self._seconds.total())):
            if seconds > (limit := limits.get(row, limits[OTHERS])):
                self._over[row] = f"must take <= {limit} CPU seconds (got {seconds:.1f})"
        if TOTAL in self._over and session.exitstatus == 0:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Prints the table."""
        if self._config.getoption("--cpu-budget"):
            terminalreporter.section("CPU seconds")
            rows = sorted(self._seconds.items(), key=lambda row: -row[1])
            for row, seconds in ((TOTAL, self._seconds.total()), *rows):
                terminalreporter.write_line(f"{seconds:8.1f} {row}")
            for row, rule in self._over.items():
                kind = "error" if row == TOTAL else "warning"
                terminalreporter.write_line(f"{kind}: {row} {rule}", red=row == TOTAL, yellow=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds --cpu-budget."""
    parser.addoption("--cpu-budget", action="store_true", help="print and limit CPU seconds")


def pytest_configure(config: pytest.Config) -> None:
    """Registers the plugin."""
    config.pluginmanager.register(CpuSeconds(config), "cpu-seconds")
