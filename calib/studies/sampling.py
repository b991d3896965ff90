"""Accept lengths of planner-nano's drafters on the held-out tasks, by how tokens are drawn.

python -m thor_dflash.calib.studies.sampling [--limit N] [--json]

Each task has a seed of its own. With coupled acceptance every answer is also decoded with the
drafter's best tokens as drafts, which must give the same tokens. Accept lengths do not depend on
the clock.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from thor_dflash.builders.build import build
from thor_dflash.calib import plan_requests
from thor_dflash.calib.demo import MODEL
from thor_dflash.calib.planbench import Task, judge
from thor_dflash.calib.studies import script
from thor_dflash.calib.studies.drafters import DRAFTERS
from thor_dflash.config.build import BuildConfig
from thor_dflash.config.decode import SamplingConfig
from thor_dflash.config.engine import EngineConfig
from thor_dflash.core.progress import ProgressTask, Silent, choose
from thor_dflash.runtime.decoding.block import Block, DecodeProgress
from thor_dflash.runtime.decoding.model_runner import ModelRunner
from thor_dflash.runtime.decoding.proposers import DflashDrafter, Proposal
from thor_dflash.runtime.session import Session, open_session

WAYS = {
    "greedy": SamplingConfig(),
    "T 0.6": SamplingConfig(temperature=0.6),
    "T 1": SamplingConfig(temperature=1.0),
}


class BestDrafts(DflashDrafter):
    """Drafts the drafter's best tokens, however the target draws."""

    def propose(self, model: ModelRunner, progress: DecodeProgress, block: Block) -> Proposal:
        """See Proposer."""
        return super().propose(model, progress, replace(block, sampled=False))


@dataclass(slots=True)
class Kind:
    """Sums over the answers of one kind of drafts and acceptance."""

    proposer: DflashDrafter = field(default_factory=DflashDrafter)
    rejection: bool = False
    tokens: float = 0.0
    cycles: int = 0
    valid: int = 0

    def answer(self, session: Session, task: Task, how: SamplingConfig) -> tuple[int, ...]:
        """Answer a task; its tokens."""
        if self.rejection:
            how = replace(how, acceptance="rejection")
        request = replace(plan_requests.request_of(session, task), sampling=how)
        tokens = plan_requests.tokens_of(session.run(request, self.proposer))
        spec = session.report().spec
        self.tokens += spec.cycles * spec.accept_len
        self.cycles += spec.cycles
        self.valid += judge(task, plan_requests.answer_of(session, request.prompt, tokens)).valid
        return tokens


def row(
    session: Session, tasks: Sequence[Task], how: SamplingConfig, bar: ProgressTask
) -> list[object]:
    """Accept lengths and valid plans of one way to draw."""
    kinds = coupled, rejecting, best = Kind(), Kind(rejection=True), Kind(BestDrafts())
    for seed, task in enumerate(tasks):
        drawn = replace(how, seed=seed) if how.temperature else how
        truth = coupled.answer(session, task, drawn)
        same = best.answer(session, task, drawn)
        assert same == truth, f"{task.name} depends on its drafts"
        rejecting.answer(session, task, drawn)
        bar.advance(1)
    lengths = [round(kind.tokens / kind.cycles, 2) for kind in kinds]
    return [*lengths, *(f"{kind.valid}/{len(tasks)}" for kind in (coupled, rejecting))]


def measure(tasks: Sequence[Task]) -> script.Table:
    """A row for each drafter and way to draw."""
    reporter = choose(sys.stderr)
    rows: list[Sequence[object]] = []
    for name, folder in DRAFTERS.items():
        with TemporaryDirectory() as held:
            out = Path(held) / "package"
            build(MODEL / "target", MODEL / folder, out, BuildConfig(), Silent())
            with closing(open_session(out, EngineConfig(threads=1), Silent())) as session:
                for way, how in WAYS.items():
                    with reporter.task(f"{name}, {way}", len(tasks), "tasks") as bar:
                        rows.append((name, way, *row(session, tasks, how, bar)))
    reporter.close()
    head = ("drafter", "drawn", "coupled", "rejection", "best tokens as drafts")
    return [(*head, "valid, coupled", "valid, rejection"), *rows]


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = script.parser(__doc__, package=False)
    parser.add_argument("--limit", type=script.count, help="first so many tasks")
    args = parser.parse_args(argv)
    table = measure(script.tasks(args.limit))
    script.show([("accept lengths", table)], as_json=args.json)


if __name__ == "__main__":
    sys.exit(script.run(main))
