"""Sampled tokens depend on seed, prompt and package alone, bit for bit, unless rejection is asked
for.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from support import constrained_model
from support.constrained_model import constrained
from support.drawn_blocks import decided_by_law, drawing
from support.loop_models import DEAD, answer, drafts, erring, hostile, oracle, prompt, session

from thor_dflash.config.decode import BudgetConfig, RelaxedConfig, SamplingConfig
from thor_dflash.core.errors import RequestError
from thor_dflash.plugins import SAMPLE
from thor_dflash.runtime.decoding.block import Block, DecodeProgress, Policy
from thor_dflash.runtime.decoding.proposers import DflashDrafter, NoDrafter, Proposer
from thor_dflash.runtime.session import Request

QWEN = SamplingConfig(temperature=1.0, top_k=20, top_p=0.95, seed=11)
HOW = {
    "all": SamplingConfig(temperature=1.0, seed=5),
    "qwen": QWEN,
    "cold": SamplingConfig(temperature=0.3, min_p=0.05, seed=2**63 - 1),
}
ONE = Request(prompt=prompt(40, seed=1), max_tokens=32)


def asked(how: str) -> Request:
    return replace(ONE, sampling=HOW[how])


@cache
def truth_of(how: str) -> tuple[int, ...]:
    return tuple(answer(session(), asked(how), NoDrafter()))


def drafter(kind: str, truth: list[int]) -> Proposer:
    rng = np.random.default_rng(3)
    return {
        "dead": DEAD,
        "hostile": hostile(truth),
        "real": DflashDrafter(),
        "erring": erring(truth, 0.15, 9),
        "three": drafts(lambda n: truth[n : n + 3]),
        "random": drafts(lambda n: [int(t) for t in rng.integers(0, 240, 15)]),
    }[kind]


class Caps(Policy):
    """Commits a different number of rows in each cycle."""

    def shape(self, progress: DecodeProgress, block: Block) -> Block:
        return block.capped(1 + len(progress.tokens) % 5, "test")


@pytest.mark.parametrize(
    ("how", "kind"),
    [
        ("qwen", "real"),
        ("qwen", "erring"),
        ("all", "erring"),
        ("cold", "erring"),
        *(
            pytest.param("qwen", kind, marks=pytest.mark.slow)
            for kind in ("dead", "hostile", "three", "random")
        ),
        pytest.param("all", "real", marks=pytest.mark.slow),
    ],
)
def test_any_drafter_gives_the_plain_sampled_answer(how: str, kind: str) -> None:
    truth = list(truth_of(how))
    assert answer(session(), asked(how), drafter(kind, truth)) == truth
    assert len(set(truth)) > 5


def test_a_dflash2_drafter_gives_the_plain_sampled_answer() -> None:
    s, request = session(second=True), replace(asked("qwen"), max_tokens=16)
    assert answer(s, request, DflashDrafter()) == answer(s, request, NoDrafter())


def test_any_cap_gives_the_same_tokens() -> None:
    truth = list(truth_of("qwen"))
    got = [
        t for c in session().run(asked("qwen"), erring(truth, 0.1, 1), (Caps(),)) for t in c.tokens
    ]
    assert got == truth


def test_an_oracle_gives_a_full_block_a_cycle() -> None:
    truth = list(truth_of("qwen"))
    assert answer(session(), asked("qwen"), oracle([*truth, *[0] * 16])) == truth
    assert session().report().spec.accept_hist == (0,) * 15 + (2,)


def test_a_continued_prompt_goes_on_as_the_answer_did() -> None:
    """Positions count from the prompt's first token, so that a cancelled answer can be resumed."""
    truth = list(truth_of("qwen"))
    for cut in (1, 27):
        request = replace(
            asked("qwen"), prompt=(*ONE.prompt, *truth[:cut]), max_tokens=ONE.max_tokens - cut
        )
        assert answer(session(), request, DflashDrafter()) == truth[cut:]


@pytest.mark.parametrize("kind", ["erring", pytest.param("real", marks=pytest.mark.slow)])
def test_a_grammar_is_kept_and_a_drafter_changes_nothing(kind: str) -> None:
    grammar = constrained_model.session().grammar(constrained_model.SMALL)
    for thinking in (False, True):
        request = replace(constrained_model.asked(thinking), sampling=QWEN)
        truth = constrained(request, NoDrafter(), grammar, thinking=thinking)
        assert constrained(request, drafter(kind, truth), grammar, thinking=thinking) == truth
        if not thinking:
            assert json.loads(constrained_model.text().decode(truth)).keys() == {"say", "n", "ok"}


def test_a_budget_closes_a_sampled_thought_where_it_closes_a_plain_one() -> None:
    s = constrained_model.session()
    close = s.tokenizer.marks.close if s.tokenizer and s.tokenizer.marks else -1
    for kind in ("hard", "soft"):
        budget = BudgetConfig(tokens=9, message="Done.</think>", close=kind, ratio=1e-6)
        asked = replace(constrained_model.asked(True, max_tokens=40), sampling=QWEN, budget=budget)
        asked = replace(asked, stop=frozenset())
        plain, drafted = (
            [t for c in s.generate(replace(asked, drafter=d)) for t in c.tokens]
            for d in ("none", "dflash")
        )
        assert plain == drafted
        assert close in plain[:20]


def test_relaxed_acceptance_is_strict_without_a_margin_and_else_longer() -> None:
    s = constrained_model.session()
    asked = replace(constrained_model.asked(True, max_tokens=12), sampling=HOW["all"])

    def run(relaxed: RelaxedConfig | None) -> tuple[list[int], int]:
        tokens = [t for c in s.generate(replace(asked, relaxed=relaxed)) for t in c.tokens]
        return tokens, s.report().phases["thinking"].relaxed

    strict, none = run(None)
    assert run(RelaxedConfig(margin=0.0)) == (strict, 0)
    assert none == 0
    assert run(RelaxedConfig(margin=30.0, k=1000))[1] > 0


def test_a_stored_prefix_changes_no_token() -> None:
    s, truth = session(), list(truth_of("qwen"))
    s.prefixes.put("here", ONE.prompt[:36])
    try:
        assert answer(s, asked("qwen"), DflashDrafter()) == truth
        assert s.report().usage.cached_tokens == 32
    finally:
        s.prefixes.drop("here")


def test_a_greedy_answer_is_the_same_after_a_sampled_one() -> None:
    s = session()
    greedy = answer(s, ONE, DflashDrafter())
    answer(s, asked("all"), DflashDrafter())
    assert answer(s, ONE, DflashDrafter()) == greedy
    assert greedy != list(truth_of("all"))


def test_other_seeds_give_other_answers() -> None:
    seen = {truth_of("qwen")}
    for seed in (0, 1):
        request = replace(ONE, sampling=replace(QWEN, seed=seed))
        seen.add(tuple(answer(session(), request, DEAD)))
    assert len(seen) == 3


def test_a_seed_that_is_not_given_is_drawn_anew() -> None:
    request = replace(ONE, sampling=replace(QWEN, seed=-1), max_tokens=12)
    first, second = (answer(session(), request, DEAD) for _ in range(2))
    assert first != second


def test_the_tokens_are_those_of_the_operator() -> None:
    """From the model's own logits, row by row, by `sample`'s reference."""
    s, how = session(), QWEN
    tokens = truth_of("qwen")
    context = [*ONE.prompt]
    for token in tokens[:6]:
        s.model.state.reset()
        for start in range(0, len(context) - 1, s.model.chunk):
            s.model.prefill(context[:-1][start : start + s.model.chunk], observe=False)
        s.model.write_tokens([context[-1]])
        s.model.verify()
        x = {"logits": s.model.read("logits")[:1], **drawing(how, len(context) - 1)}
        a = SAMPLE.complete({"vocab": s.manifest.vocab_limit, "first": 1})
        assert SAMPLE.reference(x, a)["choice"][0] == token
        context.append(token)


# ---- rejection -----------------------------------------------------------------------------------
REJECTION = replace(QWEN, acceptance="rejection", temperature=0.8)


@pytest.mark.parametrize("second", [False, True])
def test_rejection_decides_by_what_each_draft_was_drawn_from(second: bool) -> None:
    decided_by_law(session(second=second), replace(ONE, sampling=REJECTION))


@pytest.mark.parametrize("kind", ["none", "erring"])
def test_drafts_that_were_not_drawn_leave_the_coupled_answer(kind: str) -> None:
    truth = list(truth_of("qwen"))
    proposer = NoDrafter() if kind == "none" else drafter(kind, truth)
    request = replace(ONE, sampling=replace(QWEN, acceptance="rejection"))
    assert answer(session(), request, proposer) == truth


def test_rejection_follows_a_grammar() -> None:
    grammar = constrained_model.session().grammar(constrained_model.SMALL)
    request = replace(constrained_model.asked(False), sampling=REJECTION)
    got = constrained(request, DflashDrafter(), grammar)
    assert json.loads(constrained_model.text().decode(got)).keys() == {"say", "n", "ok"}


def test_rejection_at_temperature_0_is_greedy_and_with_relaxed_acceptance_refused() -> None:
    s = session()
    greedy = replace(REJECTION, temperature=0)
    assert s.admit(replace(ONE, sampling=greedy)).sampling is None
    with pytest.raises(RequestError, match="acceptance"):
        s.admit(replace(ONE, sampling=REJECTION, relaxed=RelaxedConfig()))
