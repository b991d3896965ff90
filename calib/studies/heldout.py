"""planner-nano on its held-out tasks: valid plans, accept length, and speed against itself.

python -m thor_dflash.calib.studies.heldout --package build/planner-nano
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median

from thor_dflash.calib import plan_requests
from thor_dflash.calib.planbench import FAMILIES, Task, judge
from thor_dflash.calib.studies import script
from thor_dflash.config.engine import EngineConfig
from thor_dflash.core.progress import Progress, choose
from thor_dflash.runtime.decoding.proposers import NoDrafter
from thor_dflash.runtime.session import RequestReport, Session, open_session


@dataclass(frozen=True, slots=True)
class TaskResult:
    """One task, planned."""

    task: Task
    tokens: tuple[int, ...]
    reason: str
    """Why the plan is not valid; empty where it is."""
    report: RequestReport
    plain: RequestReport | None
    """The same request without a drafter, if measured."""

    @property
    def valid(self) -> bool:
        """The executor reaches the goal."""
        return not self.reason


def plan(session: Session, task: Task, *, thinking: bool, plain: bool) -> TaskResult:
    """Plan one task with the drafter; and without, to compare.

    Raises:
        AssertionError: both ways did not give the same tokens.
    """
    request = plan_requests.request_of(session, task, thinking=thinking)
    tokens = plan_requests.tokens_of(session.generate(request))
    report, other = session.report(), None
    if plain:
        same = plan_requests.tokens_of(session.run(request, NoDrafter()))
        assert same == tokens, f"{task.name}: speculation changed the answer"
        other = session.report()
    answer = plan_requests.answer_of(session, request.prompt, tokens)
    return TaskResult(task, tokens, judge(task, answer).reason, report, other)


def accept_length(results: Iterable[TaskResult]) -> float:
    """Committed tokens a cycle over all cycles of all tasks, the bonus included."""
    specs = [r.report.spec for r in results]
    cycles = sum(s.cycles for s in specs)
    return sum(s.cycles * s.accept_len for s in specs) / cycles


def speed_up(results: Iterable[TaskResult]) -> float:
    """Plain end-to-end time over speculative, all tasks together."""
    both = [(r.plain.timings.e2e_ms, r.report.timings.e2e_ms) for r in results if r.plain]
    return sum(p for p, _ in both) / sum(f for _, f in both)


def table(results: Sequence[TaskResult]) -> script.Table:
    """Per family and over all."""
    rows: list[Sequence[object]] = [
        ("family", "tasks", "valid, %", "accept length", "tok/s", "request to plan, s", "speed-up")
    ]
    for name in (*FAMILIES, "all"):
        some = [r for r in results if name in ("all", r.task.family)]
        if not some:
            continue
        timings = [r.report.timings for r in some]
        rows.append(
            (
                name,
                len(some),
                round(100 * mean(r.valid for r in some), 1),
                round(accept_length(some), 2),
                round(median(t.tok_s for t in timings)),
                round(median(t.e2e_ms for t in timings) / 1e3, 2),
                round(speed_up(some), 2) if some[0].plain else "",
            )
        )
    return rows


def run(package: Path, limit: int | None, thinking: bool, progress: Progress) -> list[TaskResult]:
    """Plan the held-out tasks both ways."""
    with closing(open_session(package, EngineConfig(), progress)) as session:
        todo = script.tasks(limit)
        results: list[TaskResult] = []
        with progress.task("planning", len(todo), "tasks") as task:
            for item in todo:
                results.append(plan(session, item, thinking=thinking, plain=True))
                task.advance(1)
    return results


def main(argv: Sequence[str] | None = None) -> None:
    """Print the tables of docs/performance."""
    parser = script.parser(__doc__, package=False)
    parser.add_argument("--package", type=Path, required=True)
    parser.add_argument("--limit", type=script.count, help="first so many tasks")
    parser.add_argument("--thinking", choices=("on", "off"), default="on")
    args = parser.parse_args(argv)
    results = run(args.package, args.limit, args.thinking == "on", choose(sys.stderr))
    hist = [sum(c) for c in zip(*(r.report.spec.accept_hist for r in results), strict=True)]
    tables: dict[str, script.Table] = {
        "heldout": table(results),
        "tokens per cycle": [("tokens", "cycles"), *enumerate(hist, 1)],
        "not valid": [("task", "reason"), *((r.task.name, r.reason) for r in results if r.reason)],
    }
    script.show(tables.items(), as_json=args.json)


if __name__ == "__main__":
    sys.exit(script.run(main))
