"""What relaxed acceptance and the width of a block cost and gain on planner-nano.

python -m thor_dflash.calib.studies.policies --target DIR --drafter DIR [--json] [SECTION ...]

Times are CPU times of the process on one thread, so that a machine that is busy with something else
does not matter; compared ways take turns, and medians of their ratios are shown. Accept lengths do
not depend on the clock.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Literal

from thor_dflash.builders.build import build
from thor_dflash.calib import plan_requests
from thor_dflash.calib.planbench import Task, judge
from thor_dflash.calib.studies import script
from thor_dflash.config.build import BuildConfig
from thor_dflash.config.decode import (
    RelaxedConfig,
)
from thor_dflash.config.engine import EngineConfig
from thor_dflash.core.progress import Silent
from thor_dflash.runtime.decoding.telemetry import PhaseTotals
from thor_dflash.runtime.session import RequestReport, Session, TokenChunk, open_session
from thor_dflash.runtime.text.thinking import Thinking

WIDTHS = (4, 8)
CLOCK = time.process_time


@dataclass(frozen=True, slots=True)
class PolicyRun:
    """One request, answered."""

    tokens: tuple[int, ...]
    report: RequestReport
    decode_s: float
    """CPU time after the prompt was read, seconds."""
    thinking_s: float
    """Of that, in blocks that began inside thinking."""
    valid: bool = False

    @property
    def speed(self) -> float:
        """Tokens a second of decoding."""
        return len(self.tokens) / self.decode_s

    @property
    def cycle_ms(self) -> float:
        """Time of a cycle, ms."""
        return 1e3 * self.decode_s / self.report.spec.cycles


@dataclass(slots=True)
class StudyPackages:
    """Packages built from one pair of checkpoints, and the held-out tasks."""

    root: Path
    target: Path
    drafter: Path
    count: int
    _open: dict[int, Session] = field(default_factory=dict[int, Session])

    def session(self, block: int = 0) -> Session:
        """The package, opened with this width."""
        path = self.root / "package"
        if not path.exists():
            build(self.target, self.drafter, path, BuildConfig(widths=WIDTHS), Silent())
        if block not in self._open:
            engine = EngineConfig(block=block, threads=1)
            self._open[block] = open_session(path, engine, Silent())
        return self._open[block]

    @property
    def tasks(self) -> list[Task]:
        """Held-out tasks, families taking turns."""
        return script.tasks(self.count)

    def close(self) -> None:
        """Free every engine."""
        for session in self._open.values():
            session.close()


def ask(session: Session, task: Task, *, relaxed: RelaxedConfig | None = None) -> PolicyRun:
    """Plan one task and judge the plan."""
    request = plan_requests.request_of(session, task)
    request = replace(request, relaxed=relaxed)
    ran = run(session, request.prompt, session.generate(request))
    answer = plan_requests.answer_of(session, request.prompt, ran.tokens)
    return replace(ran, valid=judge(task, answer).valid)


def run(session: Session, prompt: Sequence[int], chunks: Iterator[TokenChunk]) -> PolicyRun:
    """Take an answer in, and the time."""
    thinking = Thinking(session.tokenizer.marks if session.tokenizer else None, prompt)
    tokens, decode, inside_s = list[int](), 0.0, 0.0
    last = CLOCK()
    for chunk in chunks:
        now = CLOCK()
        if chunk.tokens or chunk.finish:
            decode += now - last
            inside_s += (now - last) * thinking.inside
        for token in chunk.tokens:
            thinking.feed(token)
        tokens += chunk.tokens
        last = CLOCK()
    return PolicyRun(tuple(tokens), session.report(), decode, inside_s)


def part(runs: Sequence[PolicyRun], phase: Literal["thinking", "closing", "answer"]) -> PhaseTotals:
    """A phase of all of them."""
    total = PhaseTotals()
    for one in runs:
        total = total.plus(one.report.phases.get(phase, PhaseTotals()))
    return total


def length_of(runs: Sequence[PolicyRun]) -> float:
    """Tokens a cycle over all of them."""
    return sum(r.spec.accept_len * r.spec.cycles for r in (x.report for x in runs)) / sum(
        x.report.spec.cycles for x in runs
    )


def speed(runs: Sequence[PolicyRun]) -> float:
    """Median decode speed, tok/s."""
    return median(r.speed for r in runs)


def faster(runs: Sequence[PolicyRun], others: Sequence[PolicyRun]) -> float:
    """Median of the paired ratios of decode speed."""
    return median(a.speed / b.speed for a, b in zip(runs, others, strict=True))


def valid(runs: Sequence[PolicyRun]) -> str:
    """Valid plans."""
    return f"{sum(r.valid for r in runs)}/{len(runs)}"


def relaxing(bench: StudyPackages) -> Iterator[script.Table]:
    """Accept length and speed of thinking, and the plans that come of it."""
    session, rules = bench.session(), (None, RelaxedConfig(), RelaxedConfig(rule="delta"))
    runs: list[list[PolicyRun]] = [[] for _ in rules]
    for task in bench.tasks:
        for rule, done in zip(rules, runs, strict=True):
            done.append(ask(session, task, relaxed=rule))
    rows: list[Sequence[object]] = []
    for name, done in zip(("strict", "margin 3, 1.0", "delta 10, 0.6"), runs, strict=True):
        p, gain = part(done, "thinking"), _pace(done) / _pace(runs[0])
        rows.append((name, p.committed / p.cycles, p.relaxed, gain, length_of(done), valid(done)))
    head = ("accept", "accept length thinking", "relaxed drafts", "thinking tok/s against strict",
            "accept length", "valid")  # fmt: skip
    yield [head, *rows]


def _pace(runs: Sequence[PolicyRun]) -> float:
    """Tokens a second of thinking."""
    return part(runs, "thinking").committed / sum(r.thinking_s for r in runs)


def widths(bench: StudyPackages) -> Iterator[script.Table]:
    """The same tokens in blocks of 4, 8 and 16 rows."""
    every = (*WIDTHS, 0)
    runs: dict[int, list[PolicyRun]] = {width: [] for width in every}
    for task in bench.tasks:
        for width in every:
            runs[width].append(ask(bench.session(block=width), task))
        assert len({runs[width][-1].tokens for width in every}) == 1
    rows = [
        (width or bench.session().model.block, length_of(done), median(r.cycle_ms for r in done),
         speed(done), faster(done, runs[0]))
        for width, done in runs.items()
    ]  # fmt: skip
    yield [("rows", "accept length", "ms a cycle", "tok/s", "against 16"), *rows]


SECTIONS: dict[str, Callable[[StudyPackages], Iterator[script.Table]]] = {
    "relaxed": relaxing,
    "width": widths,
}


def _section(text: str) -> str:
    if text not in SECTIONS:
        raise argparse.ArgumentTypeError(f"must be {' or '.join(SECTIONS)} (got {text})")
    return text


def _named(found: dict[str, Iterator[script.Table]]) -> Iterator[tuple[str, script.Table]]:
    """Each table with the name of its section; a second one of a section is counted."""
    for name, tables in found.items():
        for number, table in enumerate(tables, 1):
            yield (name if number == 1 else f"{name} {number}"), table


def main(argv: Sequence[str] | None = None) -> None:
    """Print the chosen tables, all of them by default."""
    parser = argparse.ArgumentParser(description="what the decoding policies cost and gain")
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--drafter", type=Path, required=True)
    parser.add_argument("--tasks", type=script.count, default=60)
    parser.add_argument("--json", action="store_true", help="print the tables as JSON")
    parser.add_argument("sections", nargs="*", type=_section, metavar="|".join(SECTIONS))
    args = parser.parse_args(argv)
    with TemporaryDirectory() as held:
        bench = StudyPackages(Path(held), args.target, args.drafter, args.tasks)
        with closing(bench):
            found = {name: SECTIONS[name](bench) for name in args.sections or SECTIONS}
            script.show(_named(found), as_json=args.json)


if __name__ == "__main__":
    sys.exit(script.run(main))
