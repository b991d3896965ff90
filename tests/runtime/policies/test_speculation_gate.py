"""The gate with simulated costs, and what skipped drafts leave behind in a real drafter's rings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from support.loop_models import session
from support.thinking_models import Asked, run

from thor_dflash.plugins.accept.record import Record
from thor_dflash.runtime.decoding.block import Block, DecodeProgress, Policy
from thor_dflash.runtime.decoding.model_runner import ModelRunner
from thor_dflash.runtime.decoding.proposers import (
    DflashDrafter,
    Proposal,
)
from thor_dflash.runtime.engines.protocol import Call
from thor_dflash.runtime.policies.speculation_gate import GateRule, SpeculationGate, StepCosts

PLAIN = 1.0
"""Cost of a plain step, which is the unit of time here."""


@dataclass
class World:
    """A machine whose steps take the time and commit the drafts that a test says, as functions of
    `n`, the tokens so far.
    """

    drafted: Callable[[int], float]
    agreed: Callable[[int], int]
    plain: Callable[[int], float] = lambda n: PLAIN
    catch_up: float = 0.3
    now: float = 0.0
    behind: bool = False
    costs: StepCosts = field(default_factory=StepCosts)

    def request(self, tokens: int) -> tuple[float, list[bool]]:
        """Simulate a request. Return its time relative to plain decoding, and for each step whether
        it was drafted.
        """
        gate = SpeculationGate(self.costs, lambda: self.now, GateRule())
        progress, start, steps, plain = DecodeProgress((1,)), self.now, [], 0.0
        while len(progress.tokens) < tokens:
            n = len(progress.tokens)
            block = gate.shape(progress, Block(cap=16))
            agreed = self.agreed(n) if block.draft else 0
            self.now += self.drafted(n) if block.draft else self.plain(n)
            self.now += self.catch_up * (block.draft and self.behind)
            self.behind = not block.draft
            record = Record(agreed + 1, -1, 0, agreed, 0, (7,) * (agreed + 1), (7,) * 16)
            assert gate.judge(progress, block, record) == agreed + 1
            progress.commit(record.tokens)
            gate.observe(progress, agreed + 1)
            steps.append(block.draft)
            plain += sum(self.plain(n + i) for i in range(agreed + 1))
        return (self.now - start) / plain, steps


@pytest.mark.parametrize(
    ("cost", "tokens"),
    [(1.0, 150), (1.1, 400), (1.35, 150), (1.35, 400), (2.0, 2000), (3.0, 150), (3.0, 2000)],
)
def test_a_dead_drafter_costs_3_percent_or_the_allowed_loss(cost: float, tokens: int) -> None:
    world = World(lambda n: cost, lambda n: 0)
    world.request(200)
    ratio, _ = world.request(tokens)
    # Until the gate shuts, a request may lose `loss` plain steps and one cycle more; from then on,
    # trials may take 1.5 % of the time.
    assert ratio <= 1.03 or (ratio - 1) * tokens <= GateRule().loss + cost + 0.015 * tokens
    if tokens == 2000 or (tokens == 400 and cost <= 1.35):
        assert ratio <= 1.03


def test_a_block_that_a_text_drafted_tells_nothing_of_the_drafter() -> None:
    world = World(lambda n: 2.0, lambda n: 0)
    gate, progress = (
        SpeculationGate(world.costs, lambda: world.now, GateRule()),
        DecodeProgress((1,)),
    )
    for source, known in (("session", False), ("drafter", True)):
        block = gate.shape(progress, Block(cap=16)).holding(15, 16, source=source)  # type: ignore[arg-type]
        world.now += 1
        record = Record(16, -1, 0, 15, 0, (7,) * 16, (7,) * 16)
        gate.judge(progress, block, record)
        progress.commit(record.tokens)
        gate.observe(progress, 16)
        assert world.costs.ready(1) == known


@pytest.mark.parametrize("cost", [4.5, 11.0, 100.0])
def test_a_drafter_too_dear_for_its_hits(cost: float) -> None:
    world = World(lambda n: cost, lambda n: 3)
    world.request(100)
    ratio, steps = world.request(4000)
    assert (ratio - 1) * 4000 <= GateRule().loss + cost + 0.015 * 4000
    assert sum(steps) < 0.05 * len(steps)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("mean", [2.0, 3.5])
def test_ordinary_text_is_not_gated(seed: int, mean: float) -> None:
    """The number of agreed drafts is geometrically distributed, so that runs of misses occur. Times
    vary, and one step in 50 takes ten times as long.
    """
    rng = np.random.default_rng(seed)

    def noisy(cost: float) -> float:
        return cost * rng.uniform(0.9, 1.2) * (10 if rng.random() < 0.02 else 1)

    world = World(
        lambda n: noisy(1.35), lambda n: min(15, int(rng.geometric(1 / (1 + mean))) - 1),
        plain=lambda n: noisy(1.0),
    )  # fmt: skip
    world.request(100)
    _, steps = world.request(1500)
    assert all(steps)


def test_a_drafter_that_breaks_is_left_out_and_one_repaired_is_found() -> None:
    world = World(lambda n: 1.35, lambda n: 4 if n < 300 or n > 1500 else 0)
    _, steps = world.request(4000)
    tokens, at = 0, []
    for step in steps:
        at.append((tokens, step))
        tokens += 5 if step and (tokens < 300 or tokens > 1500) else 1
    broken = [step for n, step in at if 340 < n <= 1500]
    assert sum(broken) < 0.1 * len(broken)
    repaired = [step for n, step in at if n > 1500]
    first = repaired.index(True)
    assert first < 120
    assert all(repaired[first:]), "one trial finds it"


def test_forced_and_capped_blocks_do_not_shut_the_gate() -> None:
    costs = StepCosts()
    for seconds in (1.35, 1.35):
        costs.drafted(seconds)
    for _ in range(3):
        costs.plain(1.0)
    now = [0.0]
    gate, progress = SpeculationGate(costs, lambda: now[0], GateRule()), DecodeProgress((1,))
    for _ in range(60):
        forced = gate.shape(progress, Block(cap=16).forcing([5] * 3, "x"))
        assert forced.draft
        now[0] += 1.35
        gate.judge(progress, forced, Record(1, -1, 0, 0, 0, (5,), (5,) * 16))
        gate.observe(progress, 1)
    for _ in range(60):
        cut = gate.shape(progress, Block(cap=1))
        assert cut.draft
        now[0] += 1.35
        gate.judge(progress, cut, Record(1, -1, 0, 9, 0, (5,), (5,) * 16))
        gate.observe(progress, 1)


def measured(drafted: float) -> StepCosts:
    """Costs that are known, of which a plain step is 1."""
    costs = StepCosts()
    for _ in range(3):
        costs.drafted(drafted)
        costs.plain(PLAIN)
    return costs


def test_ids_that_a_grammar_forces_among_the_drafts_are_no_hits() -> None:
    now, progress, steps = [0.0], DecodeProgress((1,)), list[bool]()
    gate = SpeculationGate(measured(2.0), lambda: now[0], GateRule())
    for _ in range(10):
        block = replace(gate.shape(progress, Block(cap=16)), forced=(5,) * 15)  # by a look
        steps.append(block.draft)
        now[0] += 2.0 if block.draft else PLAIN
        gate.judge(progress, block, Record(16, -1, 0, 15, 0, (5,) * 16, (5,) * 16))
        gate.observe(progress, 16)
    assert steps[0]
    assert not steps[-1], "a plain step commits them, too"


def test_between_two_trials_are_plain_steps_even_if_a_trial_is_cheap() -> None:
    world = World(lambda n: 1.1, lambda n: 0, catch_up=0.0)
    world.costs = measured(1.1)
    _, steps = world.request(400)
    runs = [len(run) for run in "".join("d" if step else "p" for step in steps).split("d") if run]
    assert len(runs) > 3
    assert min(runs[:-1]) >= GateRule().pause


def test_by_rejection_rows_that_are_not_committed_decide_nothing() -> None:
    """Their noise is used again: whether a row is drafted must not depend on what it would be."""

    def drafted(agreed: int) -> list[bool]:
        costs, found, now = StepCosts(), list[bool](), [0.0]
        for _ in range(3):
            costs.drafted(1.35)
            costs.plain(1.0)
        gate, progress = SpeculationGate(costs, lambda: now[0], GateRule()), DecodeProgress((1,))
        for cycle in range(40):
            block = gate.shape(progress, Block(cap=4))
            found.append(block.draft)
            now[0] += 1.35 if block.draft else 1.0
            # Every second block is cut; in the others no draft agrees.
            reached, count = (agreed, 4) if block.draft and cycle % 2 else (0, 1)
            tokens = (5,) * count
            gate.judge(
                progress,
                replace(block, drawn=15 * block.draft),
                Record(count, -1, 0, reached, 0, tokens, (5,) * 16),
            )
            gate.observe(progress, count)
        return found

    assert drafted(4) == drafted(15)
    assert not all(drafted(4))


# --- what gated steps leave behind


@dataclass(frozen=True)
class Every(Policy):
    """A policy that lets the drafter draft only every `period`-th block."""

    period: int
    seen: list[int] = field(default_factory=list)

    def shape(self, progress: DecodeProgress, block: Block) -> Block:
        self.seen.append(1)
        return block if len(self.seen) % self.period == 0 else block.undrafted("test")


@dataclass(frozen=True)
class Eager:
    """A proposer that never drafts, but lets the drafter observe every block at once, instead of
    catching up later.
    """

    inner: DflashDrafter = field(default_factory=DflashDrafter)

    def begin(self, model: ModelRunner, rows: int) -> int:
        return self.inner.begin(model, rows)

    def propose(self, model: ModelRunner, progress: DecodeProgress, block: Block) -> Proposal:
        return self.inner.propose(model, progress, block.undrafted("test"))

    def observe(self, model: ModelRunner, block: Block) -> Sequence[Call]:
        return (model.call("observe"),)

    def committed(self, model: ModelRunner, block: Block, count: int) -> None:
        pass


def rings(model: ModelRunner) -> dict[str, bytes]:
    """The rows of the drafter's rings that a query at the present length may see, oldest first."""
    found: dict[str, bytes] = {}
    for name, array in model.state.snapshot().arrays.items():
        if name.startswith("drafter."):
            slots = model.state.tensors[name].spec.at({})[1]
            spare = max(model.block, model.manifest.chunk)
            seen = range(max(0, model.state.length - slots + spare), model.state.length)
            found[name] = array[:, [p % slots for p in seen]].tobytes()
    return found


@pytest.mark.parametrize(
    ("geometry", "tokens"), [("27b", 1), ("0.8b", 7), ("27b", 32), ("0.8b", 33), ("27b", 150)]
)
def test_catching_up_leaves_the_rings_of_eager_observing(geometry: str, tokens: int) -> None:
    s = session(geometry)
    it = Asked(239, max_tokens=tokens, length=40)
    eager, _ = run(it, Eager(), s=s)
    want = rings(s.model)
    deferred, _ = run(it, DflashDrafter(), [Every(10**6)], s=s)
    assert deferred == eager
    assert sum(len(rows) for rows in s.model.state.behind) == tokens
    assert rings(s.model) != want
    s.model.catch_up()
    assert rings(s.model) == want
    assert s.model.state.behind == []
