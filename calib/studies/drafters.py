"""Accept length of planner-nano's drafters on the held-out tasks, greedy and sampled.

python -m thor_dflash.calib.studies.drafters --limit 24

The first answers are also made without a drafter, and must be the same; the speed-up is theirs.
Sampled tokens are drawn with coupled acceptance, a seed for each task.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from thor_dflash.builders.build import build
from thor_dflash.calib import plan_requests
from thor_dflash.calib.demo import MODEL
from thor_dflash.calib.planbench import Task, judge
from thor_dflash.calib.studies import script
from thor_dflash.config.build import BuildConfig
from thor_dflash.config.decode import SamplingConfig
from thor_dflash.config.engine import EngineConfig
from thor_dflash.core.progress import Progress, Silent, choose
from thor_dflash.runtime.decoding.proposers import DflashDrafter, NoDrafter
from thor_dflash.runtime.session import Session, open_session

DRAFTERS = {"DFlash": "drafter", "DFlash2": "drafter2"}
TEMPERATURES = (0.0, 0.6, 1.0)
PLAIN = 2
"""Tasks that are also answered without a drafter, which takes ten times as long."""


@dataclass(slots=True)
class Tally:
    """Sums over the answers at one temperature."""

    valid: int = 0
    tokens: float = 0.0
    cycles: int = 0
    plain_ms: float = 0.0
    drafted_ms: float = 0.0
    full: int = 0
    """Cycles that committed every row."""

    def row(self, answers: int) -> tuple[object, ...]:
        """Cells of the table."""
        return (
            round(100 * self.valid / answers, 1),
            round(self.tokens / self.cycles, 2),
            round(100 * self.full / self.cycles, 1),
            round(self.plain_ms / self.drafted_ms, 2),
        )


def add(
    tally: Tally, session: Session, task: Task, sampling: SamplingConfig, *, plain: bool
) -> None:
    """Answer one task with the drafter; with `plain` also without, to compare.

    Raises:
        AssertionError: the two answers differ.
    """
    request = replace(plan_requests.request_of(session, task), sampling=sampling)
    tokens = plan_requests.tokens_of(session.run(request, DflashDrafter()))
    spec, drafted = session.report().spec, session.report().timings.e2e_ms
    answer = plan_requests.answer_of(session, request.prompt, tokens)
    tally.valid += judge(task, answer).valid
    tally.tokens += spec.cycles * spec.accept_len
    tally.cycles += spec.cycles
    tally.full += spec.accept_hist[-1]
    if plain:
        same = plan_requests.tokens_of(session.run(request, NoDrafter()))
        assert same == tokens, f"{task.name}: speculation changed the answer"
        tally.drafted_ms += drafted
        tally.plain_ms += session.report().timings.e2e_ms


def rows(name: str, tasks: Sequence[Task], progress: Progress) -> list[tuple[object, ...]]:
    """The rows of one drafter."""
    made: list[tuple[object, ...]] = []
    with TemporaryDirectory() as held:
        out = Path(held) / "package"
        build(MODEL / "target", MODEL / DRAFTERS[name], out, BuildConfig(), Silent())
        with closing(open_session(out, EngineConfig(threads=1), Silent())) as session:
            for temperature in TEMPERATURES:
                tally = Tally()
                label = f"{name}, temperature {temperature}"
                with progress.task(label, len(tasks), "tasks") as bar:
                    for i, task in enumerate(tasks):
                        how = SamplingConfig(temperature=temperature, seed=i)
                        add(tally, session, task, how, plain=i < PLAIN)
                        bar.advance(1)
                block = session.manifest.block
                made.append((name, block, temperature, *tally.row(len(tasks))))
    return made


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = script.parser(__doc__, package=False)
    parser.add_argument("--limit", type=script.count, help="first so many tasks")
    args = parser.parse_args(argv)
    progress, tasks = choose(sys.stderr), script.tasks(args.limit)
    head = ("drafter", "block", "temperature", "valid, %", "accept length", "full blocks, %",
            "speed-up")  # fmt: skip
    table = [head, *(row for name in DRAFTERS for row in rows(name, tasks, progress))]
    progress.close()
    script.show([("drafters", table)], as_json=args.json)


if __name__ == "__main__":
    sys.exit(script.run(main))
