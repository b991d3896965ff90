"""Answers with a thinking part, from models with random weights. Any token id can serve as the mark
that closes thinking: each test chooses one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from support.loop_models import drafts, prompt, session

from thor_dflash.runtime.decoding.block import DecodeProgress, Policy
from thor_dflash.runtime.decoding.loop import DecodeRequest, decode
from thor_dflash.runtime.decoding.proposers import CallableDrafter, NoDrafter, Proposer
from thor_dflash.runtime.decoding.telemetry import RequestMeter, RequestReport
from thor_dflash.runtime.policies.limits import TokenLimit
from thor_dflash.runtime.session import Session
from thor_dflash.runtime.text.thinking import Marks

OPEN = 241
"""The id that opens thinking; random prompts have smaller ids."""


def thinker() -> Session:
    """Returns a session with one layer of each kind: policies do not depend on their number."""
    return session()


@dataclass(frozen=True)
class Asked:
    """A request. Its prompt ends with an open thinking part; unless `thinks`, with a closed one."""

    close: int
    length: int = 24
    seed: int = 2
    max_tokens: int = 60
    max_answer: int | None = None
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
) -> tuple[list[int], RequestReport]:
    """Answer a request; return the tokens and the telemetry."""
    s = s or thinker()
    most = asked.max_answer or asked.max_tokens
    plan = DecodeRequest(
        prompt=asked.prompt,
        max_tokens=asked.max_tokens,
        max_answer=most,
        stop=asked.stop,
        proposer=proposer,
        policies=(*policies, TokenLimit(asked.max_tokens, most)),
        marks=asked.marks,
    )
    progress = DecodeProgress(plan.prompt, plan.marks)
    meter = RequestMeter(s.model.block, s.model.engine.busy())
    tokens = [t for chunk in decode(s.model, plan, progress, meter) for t in chunk.tokens]
    return tokens, meter.report("", progress, len(tokens), s.model.engine.busy())


def after(tokens: Sequence[int], count: int) -> list[int]:
    """Returns the next `count` tokens after these by plain decoding without policies."""
    return [*_after(tuple(tokens), count)]


@cache
def _after(tokens: tuple[int, ...], count: int) -> tuple[int, ...]:
    s = thinker()
    plan = DecodeRequest(
        prompt=tokens,
        max_tokens=count,
        max_answer=count,
        stop=(),
        proposer=NoDrafter(),
        policies=(TokenLimit(count, count),),
    )
    meter = RequestMeter(s.model.block, s.model.engine.busy())
    chunks = decode(s.model, plan, DecodeProgress(plan.prompt), meter)
    return tuple(t for chunk in chunks for t in chunk.tokens)


def oracle(truth: Sequence[int]) -> CallableDrafter:
    """Returns a drafter of the true answer, and of token 9 after its end."""
    return drafts(lambda n: [*truth[n : n + 15], *[9] * 15][:15])


def first_seen(tokens: Sequence[int], at: int) -> int:
    """Returns the first index from `at` on whose token does not occur before it."""
    return next(i for i in range(at, len(tokens)) if tokens[i] not in tokens[:i])
