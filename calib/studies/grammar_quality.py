"""What a grammar costs and gives: held-out tasks planned free, masked, and masked with forced ids.

    python -m thor_dflash.calib.studies.grammar_quality PACKAGE [--count 120] [--plain 12]

Prints a table. `--plain` of the tasks are decoded without a drafter too, and must come out the
same.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from thor_dflash.calib import plan_requests
from thor_dflash.calib.planbench import Task, judge
from thor_dflash.calib.planbench.scene import Scene
from thor_dflash.calib.planbench.skills import skills_of
from thor_dflash.calib.studies import script
from thor_dflash.config.engine import EngineConfig
from thor_dflash.core.progress import Silent
from thor_dflash.runtime.decoding.proposers import DflashDrafter, NoDrafter, Proposer
from thor_dflash.runtime.grammar.policy import Constrain, Place
from thor_dflash.runtime.session import Session, open_session
from thor_dflash.serving.planner.plan_schema import Schema, from_skills
from thor_dflash.serving.planner.schema_validator import SchemaValidator, read_schema


@dataclass(slots=True)
class Arm:
    """One way to decode, over all tasks."""

    name: str
    force: bool | None
    """None: no grammar."""
    tasks: int = 0
    schema_valid: int = 0
    executor_valid: int = 0
    stopped: int = 0
    cycles: int = 0
    """In the answer, the thinking left out."""
    tokens: int = 0
    forced: int = 0
    seconds: list[float] = field(default_factory=list[float])
    """Of a cycle's walk and masks, a mean for each task."""
    decode_ms: float = 0.0
    compile_ms: list[float] = field(default_factory=list[float])

    def row(self) -> Sequence[object]:
        """A row of the table; see HEADER."""
        n = max(1, self.tasks)
        counts = (self.stopped, self.schema_valid, self.executor_valid)
        return (
            self.name,
            *(f"{count}/{n}" for count in counts),
            round(self.tokens / max(1, self.cycles), 2),
            round(100 * self.forced / max(1, self.tokens)),
            round(1e6 * median(self.seconds)) if self.seconds else "",
            round(self.decode_ms / n),
        )


HEADER = ("decoding", "stopped", "schema", "executor",
          "accept length (answer)", "forced, %", "grammar us/cycle", "decode ms/plan")  # fmt: skip


def schema_of(scene: Scene) -> Schema:
    """The schema of plans on a scene."""
    return from_skills(*skills_of(scene))


def run(session: Session, task: Task, arm: Arm, proposer: Proposer) -> tuple[int, ...]:
    """Plan one task one way and count what came of it; the tokens."""
    tokens, answer, policies = _plan(session, task, arm, proposer)
    _count(session, arm, policies)
    verdict = judge(task, answer)
    arm.schema_valid += _obeys(schema_of(task.scene), answer)
    arm.executor_valid += verdict.valid
    if not verdict.valid:
        print(f"{arm.name}, {task.name}: {verdict.reason}", file=sys.stderr)
    return tokens


def _plan(
    session: Session, task: Task, arm: Arm, proposer: Proposer
) -> tuple[tuple[int, ...], str, tuple[Constrain, ...]]:
    """The tokens, the text of the answer, and the policies that had a say."""
    request = plan_requests.request_of(session, task)
    policies: tuple[Constrain, ...] = ()
    if arm.force is not None:
        grammar = session.grammar(schema_of(task.scene))
        arm.compile_ms.append(grammar.compile_ms)
        policies = (Constrain(grammar, Place(thinking=True), force=arm.force),)
    tokens = plan_requests.tokens_of(session.run(request, proposer, policies))
    return tokens, plan_requests.answer_of(session, request.prompt, tokens), policies


def _count(session: Session, arm: Arm, policies: Sequence[Constrain]) -> None:
    report = session.report()
    arm.tasks += 1
    arm.stopped += report.finish == "stop"
    if (answer := report.phases.get("answer")) is not None:
        arm.cycles += answer.cycles
        arm.tokens += answer.committed
    arm.forced += report.spec.forced
    arm.decode_ms += report.timings.decode_ms
    arm.seconds += [policy.seconds / report.spec.cycles for policy in policies]


def _obeys(schema: Schema, answer: str) -> bool:
    try:
        return SchemaValidator(read_schema(schema)).valid(json.loads(answer))
    except ValueError:
        return False


def main(argv: Sequence[str] | None = None) -> None:
    """Read the arguments, run, print."""
    parser = script.parser(__doc__)
    parser.add_argument("--count", type=script.count, default=120)
    parser.add_argument("--plain", type=int, default=12)
    args = parser.parse_args(argv)
    tasks = script.tasks(args.count)
    session = open_session(args.package, EngineConfig(threads=args.threads), Silent())
    arms = [Arm("free", None), Arm("masks", False), Arm("masks and forced ids", True)]
    plain, same, begin = Arm("plain, forced ids", True), 0, time.perf_counter()
    for number, task in enumerate(tasks):
        got = [run(session, task, arm, DflashDrafter()) for arm in arms]
        assert got[1] == got[2], f"{task.name}: forced ids must change no token"
        if number < args.plain:
            same += run(session, task, plain, NoDrafter()) == got[2]
    first = arms[1].compile_ms
    tables: dict[str, script.Table] = {
        "grammar": [HEADER, *(arm.row() for arm in (*arms, plain) if arm.tasks)],
        "run": [
            ("", "value"),
            ("tasks with the same tokens without a drafter", f"{same}/{plain.tasks}"),
            ("compilation, median, ms", round(median(first), 1)),
            ("compilation, longest, ms", round(max(first), 1)),
            ("time of all tasks, s", round(time.perf_counter() - begin)),
        ],
    }
    script.show(tables.items(), as_json=args.json)


if __name__ == "__main__":
    sys.exit(script.run(main))
