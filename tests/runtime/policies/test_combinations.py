"""The laws under random combinations of all policies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from support.loop_models import DEAD, erring
from support.thinking_models import Asked, after, oracle, run, thinker

from thor_dflash.config.decode import DraftConfig
from thor_dflash.plugins.accept.record import LOG_MARGIN, PROBABILITY_DELTA
from thor_dflash.runtime.decoding.block import AcceptRule, Block, DecodeProgress, Policy
from thor_dflash.runtime.decoding.loop import DecodeRequest, decode
from thor_dflash.runtime.decoding.proposers import DflashDrafter, NoDrafter, Proposer
from thor_dflash.runtime.decoding.telemetry import RequestMeter
from thor_dflash.runtime.policies.relaxed_acceptance import RelaxedThinking
from thor_dflash.runtime.policies.speculation_gate import GateRule, SpeculationGate, StepCosts
from thor_dflash.runtime.policies.thinking_budget import SoftClose, ThinkingBudget

LAWFUL = settings(
    max_examples=8, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
NEVER = 511
COUNT = 48


class Masked(Policy):
    """From the 17th token on, a third of the answer, allows only even ids and the closing mark
    NEVER. As with a grammar, the mask of a row depends on the tokens before it alone.
    """

    def shape(self, progress: DecodeProgress, block: Block) -> Block:
        words = np.full((thinker().model.block, 16), -1, np.int32)
        start = max(0, 16 - len(progress.tokens))
        words[start:] = 0x55555555
        words[start:, -1] |= np.int32(-(2**31))  # the last id, which is NEVER
        return replace(block, mask=lambda: words)


def gate(seed: int) -> SpeculationGate:
    """A gate with a random clock, so that it opens and shuts at random."""
    rng, now = np.random.default_rng(seed), [0.0]

    def clock() -> float:
        now[0] += rng.exponential()
        return now[0]

    rule = GateRule(pause=2, upkeep=1.0, plain=1, warmup=1, sustain=1)
    return SpeculationGate(StepCosts(), clock, rule)


def proposer(kind: str, truth: Sequence[int], seed: int) -> Proposer:
    draft = DraftConfig(context=seed % 3 * 20, seed=seed % 2 * 17, window=seed % 5 // 4 * 20)
    return {
        "real": DflashDrafter(draft),
        "oracle": oracle(truth),
        "dead": DEAD,
        "erring": erring(truth, 0.2, seed),
    }[kind]


def policies(on: frozenset[str], it: Asked, limit: int, long: bool, seed: int) -> list[Policy]:
    made: list[Policy] = []
    if on & {"budget", "soft"}:
        close = (5, 6, 7, 8) * 4 + (it.close, 9) if long else (it.close,)
        soft = SoftClose(limit // 2, 4.0) if "soft" in on else None
        made.append(ThinkingBudget(limit, close, soft))
    if "relaxed" in on:
        rule = LOG_MARGIN if seed % 2 else PROBABILITY_DELTA
        made.append(RelaxedThinking(AcceptRule(rule=rule, top_k=9, margin=0.7, close=it.close)))
    if "gate" in on:
        made.append(gate(seed))
    if "mask" in on:
        made.append(Masked())
    return made


RELAXED = {"on": frozenset({"relaxed"}), "close": -1, "limit": 0, "thinks": True, "long": False}
options = st.frozensets(st.sampled_from(["budget", "soft", "relaxed", "gate", "mask"]))
combination = given(
    on=options,
    kind=st.sampled_from(["real", "oracle", "dead", "erring"]),
    close=st.sampled_from([NEVER, -1]),
    limit=st.integers(0, 40),
    length=st.integers(2, 90),
    thinks=st.booleans(),
    long=st.booleans(),
    seed=st.integers(0, 50),
)


def asked(close: int, length: int, thinks: bool, seed: int) -> Asked:
    """A request. If `close` is -1, the closing mark is one of the first 20 ids of the answer that
    the model gives to the prompt by itself.
    """
    it = Asked(NEVER, length=length, seed=seed, max_tokens=COUNT)
    if close < 0:
        truth = after(it.prompt, 20)
        close = max(truth, key=lambda token: (truth.count(token) == 1, truth.index(token)))
    return Asked(close, length=length, seed=seed, max_tokens=COUNT, thinks=thinks)


# Relaxed thinking alone and then an answer, which no drawn example has: once after thoughts that
# are not the strict ones, once with near misses among the drafts of the answer.
@example(**RELAXED, kind="real", length=60, seed=4)
@example(**RELAXED, kind="erring", length=24, seed=24)
@LAWFUL
@combination
def test_strict_parts_are_those_of_plain_decoding(
    on: frozenset[str], kind: str, close: int, limit: int, length: int, thinks: bool,
    long: bool, seed: int,
) -> None:  # fmt: skip
    it = asked(close, length, thinks, seed)
    limit = min(limit, COUNT - 20)
    truth, _ = run(it, NoDrafter(), policies(on - {"gate"}, it, limit, long, seed))
    got, report = run(it, proposer(kind, truth, seed), policies(on, it, limit, long, seed))
    assert len(got) == COUNT
    assert sum(part.committed for part in report.phases.values()) == COUNT
    if "relaxed" not in on or not thinks:
        assert got == truth
        return
    start = got.index(it.close) + 1 if it.close in got else COUNT
    if start < COUNT and not on & {"mask", "budget", "soft"}:
        assert got[start:] == after([*it.prompt, *got[:start]], COUNT - start)
    if on & {"budget", "soft"}:
        assert it.close in got[: limit + 20]


@LAWFUL
@combination
def test_dropped_steps_leave_no_trace(
    on: frozenset[str], kind: str, close: int, limit: int, length: int, thinks: bool,
    long: bool, seed: int,
) -> None:  # fmt: skip
    """Between the blocks, steps are verified and never committed, and the request is closed half
    way. Neither changes its tokens or those of the same request asked again.
    """
    it = asked(close, length, thinks, seed)
    limit = min(limit, COUNT - 20)
    on = on - {"relaxed"}
    truth, _ = run(it, NoDrafter(), policies(on - {"gate"}, it, limit, long, seed))
    s = thinker()
    plan = DecodeRequest(
        prompt=it.prompt,
        max_tokens=COUNT,
        max_answer=COUNT,
        stop=(),
        proposer=proposer(kind, truth, seed),
        policies=tuple(policies(on, it, limit, long, seed)),
        marks=it.marks,
    )
    progress, got = DecodeProgress(plan.prompt, plan.marks), list[int]()
    for chunk in decode(s.model, plan, progress, RequestMeter(16, s.model.engine.busy())):
        got += chunk.tokens
        if got:
            s.model.write_tokens([seed + i for i in range(16)])
            s.model.verify()
            s.model.verify()
        if len(got) > COUNT // 2:
            break
    assert got == truth[: len(got)]
    again, _ = run(it, proposer(kind, truth, seed), policies(on, it, limit, long, seed))
    assert again == truth
