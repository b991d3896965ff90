"""Accept lengths and plans of planner-nano's held-out tasks when tokens are drawn.

python -m thor_dflash.calib.studies.sampling PACKAGE [--tasks N] [--json]

Each task has a seed of its own. Every answer is also decoded with the drafter's best tokens as
drafts, which must give the same tokens. Accept lengths do not depend on the clock.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace

from thor_dflash.calib.planbench import Task, judge
from thor_dflash.calib.studies import script
from thor_dflash.config.decode import SamplingConfig
from thor_dflash.config.engine import EngineConfig
from thor_dflash.core.progress import choose
from thor_dflash.runtime.decoding.block import Block, DecodeProgress
from thor_dflash.runtime.decoding.model_runner import ModelRunner
from thor_dflash.runtime.decoding.proposers import DflashDrafter, Proposal
from thor_dflash.runtime.session import RequestReport, Session, open_session

WAYS = {
    "greedy": SamplingConfig(),
    "T 0.6": SamplingConfig(temperature=0.6),
    "T 1": SamplingConfig(temperature=1.0),
    "T 0.6, top-k 20, top-p 0.95": SamplingConfig(temperature=0.6, top_k=20, top_p=0.95),
    "T 1, top-k 20, top-p 0.95": SamplingConfig(temperature=1.0, top_k=20, top_p=0.95),
}


class BestDrafts(DflashDrafter):
    """Drafts the drafter's best tokens, however the target draws."""

    def propose(self, model: ModelRunner, progress: DecodeProgress, block: Block) -> Proposal:
        """See Proposer."""
        return super().propose(model, progress, replace(block, sampled=False))


def answer(
    session: Session, task: Task, how: SamplingConfig, seed: int, *, drawn: bool
) -> tuple[tuple[int, ...], RequestReport]:
    """The tokens of a task, with drawn drafts or with the drafter's best ones."""
    request = script.request_of(session, task)
    if how.temperature:
        request = replace(request, sampling=replace(how, seed=seed))
    proposer = DflashDrafter() if drawn else BestDrafts()
    return script.tokens_of(session.run(request, proposer)), session.report()


def length(reports: Sequence[RequestReport]) -> float:
    """Tokens a cycle over all of them."""
    cycles = sum(report.spec.cycles for report in reports)
    return sum(report.spec.accept_len * report.spec.cycles for report in reports) / cycles


def measure(session: Session, tasks: Sequence[Task]) -> script.Table:
    """A row for each way to draw."""
    reporter = choose(sys.stderr)
    rows: list[Sequence[object]] = []
    for name, how in WAYS.items():
        found: dict[bool, list[RequestReport]] = {True: [], False: []}
        valid = 0
        with reporter.task(name, len(tasks), "tasks") as progress:
            for seed, task in enumerate(tasks):
                truth: tuple[int, ...] = ()
                for drawn, reports in found.items():
                    tokens, report = answer(session, task, how, seed, drawn=drawn)
                    reports.append(report)
                    assert drawn or tokens == truth, f"task {seed} must not depend on its drafts"
                    truth = tokens
                text = script.answer_of(session, script.request_of(session, task).prompt, truth)
                valid += judge(task, text).valid
                progress.advance(1)
        rows.append((name, length(found[True]), length(found[False]), f"{valid}/{len(tasks)}"))
    reporter.close()
    return [("drawn", "accept length", "with best tokens as drafts", "valid plans"), *rows]


def main() -> None:
    """Measure and print."""
    parser = script.parser(__doc__)
    parser.add_argument("--tasks", type=script.count, default=None, metavar="N")
    args = parser.parse_args()
    with closing(
        open_session(args.package, EngineConfig(threads=args.threads), choose(sys.stderr))
    ) as session:
        table = measure(session, script.tasks(args.tasks))
    script.show([("sampling", table)], as_json=args.json)


if __name__ == "__main__":
    sys.exit(script.run(main))
