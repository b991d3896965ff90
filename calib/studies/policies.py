"""What each decoding policy costs and gains on planner-nano.

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
from random import Random
from statistics import median
from tempfile import TemporaryDirectory
from typing import Literal

from thor_dflash.builders.build import build
from thor_dflash.calib.planbench import Task, judge
from thor_dflash.calib.studies import script
from thor_dflash.calib.studies.noise_drafter import NoiseDrafter
from thor_dflash.calib.studies.replay_baseline import Replay
from thor_dflash.config.build import BuildConfig
from thor_dflash.config.decode import (
    NO_BUDGET,
    NO_DRAFT_LIMITS,
    BudgetConfig,
    DraftConfig,
    RelaxedConfig,
)
from thor_dflash.config.engine import EngineConfig
from thor_dflash.core.progress import Silent
from thor_dflash.runtime.decoding.proposers import DflashDrafter, NoDrafter, Proposer
from thor_dflash.runtime.decoding.telemetry import PhaseTotals
from thor_dflash.runtime.policies.speculation_gate import GateRule, SpeculationGate, StepCosts
from thor_dflash.runtime.session import Request, RequestReport, Session, TokenChunk, open_session
from thor_dflash.runtime.text.thinking import Thinking

WIDTHS = (4, 8)
CLOCK = time.process_time
GATED, ROUNDS = 300, 3
"""Tokens of an answer the gate is measured on, and how often."""


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
    _open: dict[tuple[str, int], Session] = field(default_factory=dict[tuple[str, int], Session])

    def session(self, saves: Literal["records", "states"] = "records", block: int = 0) -> Session:
        """The package with these saves, opened with this width."""
        path = self.root / saves
        if not path.exists():
            config = BuildConfig(saves=saves, widths=WIDTHS)
            build(self.target, self.drafter, path, config, Silent())
        if (saves, block) not in self._open:
            engine = EngineConfig(block=block, threads=1)
            self._open[saves, block] = open_session(path, engine, Silent())
        return self._open[saves, block]

    @property
    def tasks(self) -> list[Task]:
        """Held-out tasks, families taking turns."""
        return script.tasks(self.count)

    def close(self) -> None:
        """Free every engine."""
        for session in self._open.values():
            session.close()


def ask(
    session: Session,
    task: Task,
    *,
    budget: BudgetConfig = NO_BUDGET,
    relaxed: RelaxedConfig | None = None,
    draft: DraftConfig = NO_DRAFT_LIMITS,
) -> PolicyRun:
    """Plan one task and judge the plan."""
    request = script.request_of(session, task)
    request = replace(request, budget=budget, relaxed=relaxed, draft=draft)
    ran = run(session, request.prompt, session.generate(request))
    answer = script.answer_of(session, request.prompt, ran.tokens)
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


def budgets(bench: StudyPackages) -> Iterator[script.Table]:
    """Decode speed with a budget that never fires, and with one that does."""
    session = bench.session()
    free, idle, cut = list[PolicyRun](), list[PolicyRun](), list[PolicyRun]()
    for task in bench.tasks:
        free.append(ask(session, task))
        idle.append(ask(session, task, budget=BudgetConfig(tokens=300, reply=212)))
        assert idle[-1].tokens == free[-1].tokens
        thought = free[-1].report.phases["thinking"].committed
        budget = BudgetConfig(tokens=thought // 2, reply=256)
        cut.append(ask(session, task, budget=budget))
    rows = [
        (name, speed(runs), faster(runs, free), length_of(runs), valid(runs))
        for name, runs in (("none", free), ("inert", idle), ("at half the thoughts", cut))
    ]
    yield [("budget", "tok/s", "speed against none", "accept length", "valid"), *rows]
    hard = [part(cut, phase) for phase in ("thinking", "closing", "answer")]
    yield [
        ("phase, closed by force", "blocks", "tokens", "drafted", "accepted"),
        *((n, p.cycles, p.committed, p.drafted, p.accepted)
          for n, p in zip(("thinking", "closing", "answer"), hard, strict=True)),
    ]  # fmt: skip


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


def _texts(
    session: Session, bench: StudyPackages
) -> Iterator[tuple[str, tuple[int, ...], Proposer]]:
    rng = Random(5)
    noise = tuple(rng.randrange(session.manifest.vocab_limit) for _ in range(120))
    again = tuple(script.tokenizer_of(session).encode("the cup is on the table. " * 12))
    yield "random tokens", noise, DflashDrafter()
    yield "verbatim repetition", again, DflashDrafter()
    yield "noise for drafts", script.request_of(session, bench.tasks[0]).prompt, NoiseDrafter()
    for task in bench.tasks[:3]:
        yield f"ordinary, {task.family}", script.request_of(session, task).prompt, DflashDrafter()


def gates(bench: StudyPackages) -> Iterator[script.Table]:
    """Degenerate and ordinary texts: plain, drafted and gated in turns."""
    session, costs = bench.session(), StepCosts()
    rows: list[Sequence[object]] = []
    for name, prompt, proposer in _texts(session, bench):
        stop = session.manifest.stop_tokens if name.startswith("ordinary") else ()
        request = Request(prompt=prompt, max_tokens=GATED, stop=frozenset(stop))
        plain, drafted, gated = list[PolicyRun](), list[PolicyRun](), list[PolicyRun]()
        for _ in range(ROUNDS):
            plain.append(run(session, prompt, session.run(request, NoDrafter())))
            drafted.append(run(session, prompt, session.run(request, proposer)))
            gate = SpeculationGate(costs, CLOCK, GateRule())
            gated.append(run(session, prompt, session.run(request, proposer, (gate,))))
            assert plain[-1].tokens == drafted[-1].tokens == gated[-1].tokens
        skipped = sum(n.cycles for n in gated[-1].report.notes if n.why == "drafts do not pay")
        cycles = gated[-1].report.spec.cycles
        times = 1 / faster(drafted, plain), 1 / faster(gated, plain)
        rows.append((name, length_of(drafted), costs.even, *times, f"{skipped}/{cycles}"))
    head = ("text", "accept length ungated", "even", "drafted / plain, time",
            "gated / plain, time", "gated blocks")  # fmt: skip
    yield [head, *rows]


def options(bench: StudyPackages) -> Iterator[script.Table]:
    """Accept length as a function of each drafter option."""
    session = bench.session()
    window = min(layer.window for layer in session.manifest.drafter.layers if layer.window) \
        if session.manifest.drafter else 0  # fmt: skip
    ladder = (16, 32, 64, 128, 256)
    tries = [("as made", NO_DRAFT_LIMITS)]
    tries += [(f"window {n}", DraftConfig(window=n)) for n in ladder if n < window]
    tries += [(f"full {n}", DraftConfig(full=n)) for n in ladder]
    tries += [(f"context {n}", DraftConfig(context=n)) for n in (1, *ladder)]
    tries += [(f"seed {n}", DraftConfig(seed=n)) for n in (1, *ladder)]
    rows: list[Sequence[object]] = []
    for name, draft in tries:
        runs = [ask(session, task, draft=draft) for task in bench.tasks]
        rows.append((name, length_of(runs)))
    yield [("drafter sees", "accept length"), *rows]


def rollbacks(bench: StudyPackages) -> Iterator[script.Table]:
    """Records, states, and the classic snapshot and replay."""
    kept: dict[str, list[PolicyRun]] = {"records": [], "states": []}
    for task in bench.tasks:
        for saves in ("records", "states"):
            kept[saves].append(ask(bench.session(saves), task))
        assert kept["records"][-1].tokens == kept["states"][-1].tokens
    rows: list[Sequence[object]] = []
    for saves, runs in kept.items():
        tensors = bench.session("records" if saves == "records" else "states").model.state.tensors
        held = sum(t.spec.nbytes({}) for n, t in tensors.items() if n.startswith("gdn."))
        rows.append((saves, f"{held / 1e6:.2f}", median(r.cycle_ms for r in runs), 1))
    replayed = [_replay(bench.session(), t, r) for t, r in
                zip(bench.tasks, kept["records"], strict=True)]  # fmt: skip
    copied = median(copied for _, copied in replayed)
    rows.append(("replay", f"{copied / 1e6:.2f} copied a cycle", median(m for m, _ in replayed), 2))
    yield [("rollback", "recurrent state, MB", "ms a cycle", "verifies a cycle"), *rows]


def _replay(session: Session, task: Task, run: PolicyRun) -> tuple[float, float]:
    """Time of a cycle without its draft, ms, and bytes copied; the drafts are half right."""
    truth = run.tokens

    def guess(tokens: Sequence[int]) -> list[int]:
        return [*truth[len(tokens) : len(tokens) + 5], 0]

    replay = Replay(session, guess)
    prompt = script.request_of(session, task).prompt
    start = CLOCK()
    replay.answer(prompt, 0)
    prefilled = CLOCK()
    got = replay.answer(prompt, len(truth))
    spent = CLOCK() - prefilled - (prefilled - start)
    assert tuple(got) == truth
    cycles = replay.verifies / 2
    return 1e3 * spent / cycles, replay.copied / cycles


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
    "budget": budgets,
    "relaxed": relaxing,
    "gate": gates,
    "drafter": options,
    "rollback": rollbacks,
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
