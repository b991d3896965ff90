"""Answers that think, of models with random weights: the marks are whatever ids a test says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from decoding import drafts, prompt, session

from thor_dflash.runtime.block import Limit, Policy, Progress
from thor_dflash.runtime.decode import Plan, decode
from thor_dflash.runtime.propose import Guess, Nobody, Proposer
from thor_dflash.runtime.session import Session
from thor_dflash.runtime.telemetry import Meter, Report
from thor_dflash.runtime.thinking import Marks

OPEN = 241
"""Opens thinking; no random prompt holds it."""


def thinker() -> Session:
    """A layer of each kind: what a policy decides is the same above any number of them."""
    return session(layers=2)


@dataclass(frozen=True)
class Asked:
    """A prompt that thinks, unless told otherwise."""

    close: int
    length: int = 24
    seed: int = 2
    max_tokens: int = 60
    thinks: bool = True
    stop: tuple[int, ...] = ()

    @property
    def marks(self) -> Marks:
        return Marks(OPEN, self.close)

    @property
    def prompt(self) -> tuple[int, ...]:
        begin = tuple(t for t in prompt(self.length, self.seed) if t != self.close)
        return (*begin, OPEN) if self.thinks else (*begin, OPEN, self.close)


def run(
    asked: Asked,
    proposer: Proposer,
    policies: Sequence[Policy] = (),
    s: Session | None = None,
) -> tuple[list[int], Report]:
    """The answer's tokens and its telemetry."""
    s = s or thinker()
    plan = Plan(
        prompt=asked.prompt,
        max_tokens=asked.max_tokens,
        stop=asked.stop,
        proposer=proposer,
        policies=(*policies, Limit(asked.max_tokens)),
        marks=asked.marks,
    )
    progress = Progress(plan.prompt, plan.marks)
    meter = Meter(s.model.block, s.model.engine.busy())
    tokens = [t for chunk in decode(s.model, plan, progress, meter) for t in chunk.tokens]
    return tokens, meter.report("", len(progress.tokens), s.model.engine.busy())


def after(tokens: Sequence[int], count: int, s: Session | None = None) -> list[int]:
    """What plain decoding says after these tokens, no policy in sight."""
    s = s or thinker()
    plan = Plan(
        prompt=tuple(tokens),
        max_tokens=count,
        stop=(),
        proposer=Nobody(),
        policies=(Limit(count),),
    )
    meter = Meter(s.model.block, s.model.engine.busy())
    chunks = decode(s.model, plan, Progress(plan.prompt), meter)
    return [t for chunk in chunks for t in chunk.tokens]


def oracle(truth: Sequence[int]) -> Guess:
    """The true answer, and then anything."""
    return drafts(lambda n: [*truth[n : n + 15], *[9] * 15][:15])


def first_seen(tokens: Sequence[int], at: int) -> int:
    """The first place from `at` on whose token was not there before."""
    return next(i for i in range(at, len(tokens)) if tokens[i] not in tokens[:i])
