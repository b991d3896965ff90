"""BFCL v4, single turn: sends the samples of MLPerf's accuracy phase to a server and scores the
calls.

Scores come from the package bfcl-eval if it is installed: it pins old versions of other packages,
so it needs an environment of its own. Otherwise only the form of the calls is checked: that
functions exist and arguments are objects.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from statistics import fmean
from typing import Any

from thor_dflash.calib.replay.http_replay import COMMON
from thor_dflash.calib.replay.openai_client import OpenAIConnection
from thor_dflash.core.errors import PlanError, RequestError
from thor_dflash.core.message_text import show
from thor_dflash.core.strict_records import as_list, as_table, read_text

LANGUAGES = {"simple_java": "JAVA", "simple_javascript": "JAVASCRIPT"}
"""Subset -> language whose types its expected values have; others: Python."""
CHECKED_AS = "gpt-4o-2024-11-20-FC"
"""A model of bfcl-eval for which `_` in names stands for `.`. Source: mlcommons/endpoints,
bfcl_v4_scorer.py at 0662a84."""
_Table = Mapping[str, Any]
Calls = Sequence[_Table]
"""[{"name", "arguments"}], arguments parsed; None if they are no object."""
Judge = Callable[["BfclSample", Calls], bool]


@dataclass(frozen=True, slots=True)
class BfclSample:
    """One sample."""

    sample_id: str
    subset: str
    category: str
    messages: tuple[_Table, ...]
    tools: tuple[_Table, ...]
    functions: tuple[_Table, ...]
    """The tools as BFCL writes them, for its checker."""
    ground_truth: tuple[_Table, ...]


@dataclass(frozen=True, slots=True)
class BfclVerdict:
    """What came of one sample."""

    sample_id: str
    subset: str
    category: str
    right: bool
    """By bfcl-eval, else by the form alone."""
    calls: int = 0
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class BfclReport:
    """Scores in percent. Missing answers count as wrong."""

    scored: bool
    """By bfcl-eval. Without, the numbers say how many answers have the right form."""
    overall: float
    normalised: float
    """Mean of the categories."""
    categories: Mapping[str, float]
    subsets: Mapping[str, float]
    samples: int
    failed: int
    """Requests without an answer."""
    verdicts: tuple[BfclVerdict, ...] = field(default=())


def read_samples(path: Path) -> tuple[BfclSample, ...]:
    """Read a file of samples, one JSON object in a line.

    Raises:
        RequestError: it cannot be read, or is none; the message names the line.
    """
    try:
        lines = read_text(path).splitlines()
    except OSError as e:
        raise RequestError(f"{path} must be readable (got: {e.strerror})") from e
    except ValueError as e:
        raise RequestError(f"{path} must be UTF-8 text (got: {e})") from e
    found = tuple(_sample(line, f"{path}:{i}") for i, line in enumerate(lines, 1) if line.strip())
    if not found:
        raise RequestError(f"{path} must hold at least one sample (got none)")
    return found


def _sample(line: str, where: str) -> BfclSample:
    try:
        row = as_table(json.loads(line))
    except (ValueError, RecursionError) as e:
        raise RequestError(f"{where} must be JSON (got: {e})") from e
    texts = [(row or {}).get(name) for name in ("sample_id", "subset", "category")]
    names = ("messages", "tools", "functions", "ground_truth")
    lists = [as_list((row or {}).get(name)) for name in names]
    for name, value in zip(("sample_id", "subset", "category", *names), texts + lists, strict=True):
        if value is None or (name == "subset" and not isinstance(value, str)):
            raise RequestError(f"{where}: {name} must be present (got {show(value)})")
    tables = (tuple(as_table(item) or {} for item in items or ()) for items in lists)
    sample_id, subset, category = map(str, texts)
    return BfclSample(sample_id, subset, category, *tables)


def judge() -> Judge | None:
    """BFCL's own checker; None if bfcl-eval, or one of the many packages it needs, is missing."""
    try:
        # By name: no checker of types sees a package that is installed elsewhere.
        languages: Any = import_module("bfcl_eval.constants.enums")
        checker: Any = import_module("bfcl_eval.eval_checker.ast_eval.ast_checker")
    except ImportError:
        return None

    def check(sample: BfclSample, calls: Calls) -> bool:
        found = checker.ast_checker(
            list(sample.functions),
            [{call["name"]: call["arguments"] or {}} for call in calls],
            list(sample.ground_truth),
            languages.Language[LANGUAGES.get(sample.subset, "PYTHON")],
            sample.subset,
            CHECKED_AS,
        )
        return bool(found["valid"])

    return check


def formed(sample: BfclSample, calls: Calls) -> bool:
    """Whether there are calls, all of declared functions with an object of arguments."""
    names = {(as_table(tool.get("function")) or {}).get("name") for tool in sample.tools}
    return bool(calls) and all(c["name"] in names and c["arguments"] is not None for c in calls)


def run(
    connection: OpenAIConnection,
    model: str,
    samples: Sequence[BfclSample],
    check: Judge | None,
) -> Iterator[BfclVerdict]:
    """Send every sample."""
    for sample in samples:
        yield _verdict(connection, model, sample, check or formed)


def body(model: str, sample: BfclSample) -> dict[str, Any]:
    """The request of a sample, with the fields of the accuracy phase."""
    given = {"messages": sample.messages, "tools": sample.tools, "tool_choice": "auto"}
    return {"model": model, **COMMON, **given}


def _verdict(
    connection: OpenAIConnection, model: str, sample: BfclSample, check: Judge
) -> BfclVerdict:
    names = (sample.sample_id, sample.subset, sample.category)
    try:
        answer = connection.stream(body(model, sample), {})
    except (RequestError, PlanError) as e:
        return BfclVerdict(*names, right=False, error=str(e))
    calls = [_call(as_table(call["function"]) or {}) for call in answer.calls]
    # An answer without calls is right exactly where none of the functions helps.
    right = not calls if sample.category == "hallucination" else bool(calls)
    if right and calls:
        right = check(sample, calls)
    return BfclVerdict(*names, right=right, calls=len(calls))


def _call(function: _Table) -> dict[str, Any]:
    try:
        arguments = as_table(json.loads(str(function.get("arguments") or "{}")))
    except (ValueError, RecursionError):
        arguments = None
    return {"name": function.get("name"), "arguments": arguments}


def report(verdicts: Sequence[BfclVerdict], *, scored: bool) -> BfclReport:
    """Sum up. Source of the means: mlcommons/endpoints, bfcl_v4_scorer.py at 0662a84."""
    by: dict[str, dict[str, list[bool]]] = defaultdict(lambda: defaultdict(list))
    for verdict in verdicts:
        by[verdict.category][verdict.subset].append(verdict.right)
    categories = {name: 100 * _mean(name, subsets) for name, subsets in by.items()}
    return BfclReport(
        scored=scored,
        overall=100 * fmean(verdict.right for verdict in verdicts),
        normalised=fmean(categories.values()),
        categories=categories,
        subsets={
            n: 100 * fmean(rights) for subsets in by.values() for n, rights in subsets.items()
        },
        samples=len(verdicts),
        failed=sum(bool(verdict.error) for verdict in verdicts),
        verdicts=tuple(verdicts),
    )


def _mean(category: str, subsets: Mapping[str, Sequence[bool]]) -> float:
    if category == "live":  # by samples
        return fmean(right for rights in subsets.values() for right in rights)
    means = {name: fmean(rights) for name, rights in subsets.items()}
    simple = [mean for name, mean in means.items() if name.startswith("simple_")]
    others = [mean for name, mean in means.items() if not name.startswith("simple_")]
    return fmean([*([fmean(simple)] if simple else []), *others])
