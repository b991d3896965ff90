"""The laws of constrained decoding, on a real engine: a grammar changes answers, a drafter never
does.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher
from support.constrained_model import PLAN, SMALL, asked, constrained, session, text
from support.coverings import some
from support.loop_models import DEAD, drafts, erring, hostile, oracle
from support.plan_formats import skills

from thor_dflash.core.tensors import Array
from thor_dflash.runtime.decoding.block import Block, DecodeProgress, Policy
from thor_dflash.runtime.decoding.proposers import DflashDrafter, NoDrafter, Proposer
from thor_dflash.runtime.grammar.compiler import Grammar, Vocabulary
from thor_dflash.runtime.grammar.policy import Constrain, Place, Walk, leads
from thor_dflash.runtime.grammar.schema import read
from thor_dflash.runtime.policies.thinking_budget import ThinkingBudget
from thor_dflash.runtime.session import Request
from thor_dflash.serving.planner.answer_rule import rule_of
from thor_dflash.serving.planner.schema_validator import SchemaValidator
from thor_dflash.serving.protocol.messages import PlanRequest
from thor_dflash.serving.protocol.skills import PlanFormatName

SCHEMAS = {"plan": PLAN, "small": SMALL}
every_schema = pytest.mark.parametrize("schema", SCHEMAS.values(), ids=SCHEMAS)


def grammar(schema: dict[str, object]) -> Grammar:
    return session().grammar(schema)


def drafter(kind: str, truth: list[int], seed: int) -> Proposer:
    rng = np.random.default_rng(seed)
    return {
        "nobody": NoDrafter(),
        "dead": DEAD,
        "hostile": hostile(truth),
        "oracle": oracle(truth),
        "real": DflashDrafter(),
        "erring": erring(truth, 0.15, seed),
        "random": drafts(lambda n: [int(t) for t in rng.integers(0, 1280, 15)]),
    }[kind]


@cache
def _plain(schema: str, force: bool) -> tuple[int, ...]:
    return tuple(constrained(asked(False), NoDrafter(), grammar(json.loads(schema)), force=force))


def plain(schema: dict[str, object], force: bool = True) -> list[int]:
    """The answer without a drafter, decoded once for all tests that compare with it."""
    return list(_plain(json.dumps(schema), force))


KINDS = ("dead", "random", "hostile", "oracle", "erring", "real")


@dataclass
class Closing(Policy):
    """Makes the target itself close its thinking after `at` tokens, wherever that is in a block."""

    at: int

    def shape(self, progress: DecodeProgress, block: Block) -> Block:
        row = self.at - len(progress.tokens)
        if not 0 <= row < 16:
            return block
        close = text().end_think
        assert close is not None
        return replace(block, soft=(*[-1] * row, close), soft_margin=1e9)


def by_hand(request: Request, schema: dict[str, object]) -> list[int]:
    """Masked greedy decoding, one verified row at a time, every mask from a matcher made anew."""
    s, model = session(), session().model
    made = grammar(schema)
    model.state.reset()
    for start in range(0, len(request.prompt) - 1, 32):
        model.prefill(request.prompt[:-1][start : start + 32], observe=False)
    tokens: list[int] = []
    while len(tokens) < request.max_tokens:
        model.write_tokens([tokens[-1] if tokens else request.prompt[-1]])
        model.verify()
        matcher = made.matcher.deep_copy()
        assert matcher.consume_tokens(tokens)
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        legal = np.unpackbits(bits, bitorder="little")[: s.manifest.vocab_limit].astype(bool)
        logits = model.read("logits")[0, : s.manifest.vocab_limit]
        tokens.append(int(np.where(legal, logits, -np.inf).argmax()))
        model.state.commit(1)
        if tokens[-1] in request.stop:
            break
    return tokens


@every_schema
def test_plain_constrained_decoding_is_masked_greedy_decoding(schema: dict[str, object]) -> None:
    request = asked(False)
    want = by_hand(request, schema)
    assert constrained(request, NoDrafter(), grammar(schema)) == want[:-1]
    assert want[-1] in request.stop


@pytest.mark.parametrize("kind", KINDS)
@every_schema
def test_any_drafter_gives_the_plain_answer(schema: dict[str, object], kind: str) -> None:
    truth = plain(schema)
    assert constrained(asked(False), drafter(kind, truth, 5), grammar(schema)) == truth
    assert session().report().finish == "stop"
    assert SchemaValidator(read(schema)).valid(json.loads(text().decode(truth)))


@settings(max_examples=15)
@given(
    words=st.sampled_from(["Pick.", "Bring the cup to the tray now.", "x" * 90, "Ü? [mug]"]),
    kind=st.sampled_from(KINDS),
    schema=st.sampled_from(list(SCHEMAS)),
    most=st.integers(1, 40),
    close=st.integers(0, 40),
    force=st.booleans(),
    seed=st.integers(0, 99),
)
def test_any_request_and_any_drafter_after_thinking(
    words: str, kind: str, schema: str, most: int, close: int, force: bool, seed: int
) -> None:
    request = asked(True, words, max_tokens=close + most)
    made, ends = grammar(SCHEMAS[schema]), Closing(close)
    truth = constrained(request, NoDrafter(), made, thinking=True, policies=(ends,))
    proposer = drafter(kind, truth, seed)
    got = constrained(request, proposer, made, thinking=True, force=force, policies=(ends,))
    assert got == truth
    assert text().end_think in truth[: close + 1]


@pytest.mark.parametrize("name", ["bt_cpp_xml", "pddl_plan"])
def test_a_plan_of_another_format_is_the_same_with_any_drafter(name: PlanFormatName) -> None:
    rule = rule_of(PlanRequest(prompt="x", skills=skills(name), plan_format=name))
    made, request = session().lark_grammar(rule.lark), asked(False)
    truth = constrained(request, NoDrafter(), made, force=False)
    assert session().report().finish == "stop"
    assert rule.format.read(text().decode(truth), whole=True)[1]
    for kind in ("hostile", "oracle", "real"):
        assert constrained(request, drafter(kind, truth, 5), made) == truth, kind
    spec = session().report().spec
    assert spec.forced > 0.3 * len(truth)  # what the grammar leaves no choice for is free


@every_schema
def test_forcing_changes_cycles_and_not_one_token(schema: dict[str, object]) -> None:
    request, made = asked(False), grammar(schema)
    truth = constrained(request, NoDrafter(), made, force=False)
    masks_alone = session().report().spec
    assert constrained(request, NoDrafter(), made) == truth
    forced = session().report().spec
    assert (masks_alone.forced, masks_alone.cycles) == (0, len(truth) + 1)
    assert forced.cycles < masks_alone.cycles
    assert forced.forced == sum(1 for _ in only_choices(made, truth))


def only_choices(made: Grammar, tokens: list[int]) -> list[int]:
    """The tokens that were the only legal ones in their place, by the masks of a fresh matcher."""
    matcher, found = made.matcher.deep_copy(), []
    for token in tokens:
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        if np.unpackbits(bits).sum() == 1 and matcher.compute_ff_tokens():
            found.append(token)
        assert matcher.consume_token(token)
    return found


LEADS = [
    *(("Enough.\n</think>\n\n", limit) for limit in (0, 1, 15, 17, 16)),
    *(("</think>\n\n", limit) for limit in (0, 7)),
    *(("</think>", limit) for limit in (7, 15)),
]


@pytest.mark.parametrize(("message", "limit"), some(LEADS, LEADS[::2], pytest.mark.slow))
def test_a_budget_that_closes_thinking_leads_into_the_grammar(limit: int, message: str) -> None:
    request, made = asked(True), grammar(PLAN)
    close = tuple(text().encode(message))

    def answer(proposer: Proposer) -> list[int]:
        budget = ThinkingBudget(limit, close)
        return constrained(request, proposer, made, thinking=True, policies=(budget,))

    truth = answer(NoDrafter())
    ends = truth.index(close[-1] if message.endswith(">") else text().end_think)
    written = text().decode(truth[ends + 1 :])
    assert session().report().finish == "stop"
    assert written.startswith('\n\n{"goal":"')
    assert SchemaValidator(read(PLAN)).valid(json.loads(written))
    assert answer(DflashDrafter()) == truth
    assert answer(oracle(truth)) == truth


LEAD = (7, 9, 7)
"""Line breaks of a tokenizer that has none of two; any ids serve."""


def led(schema: dict[str, object]) -> Grammar:
    made = grammar(schema)
    return replace(made, vocabulary=replace(made.vocabulary, lead=LEAD))


@pytest.mark.parametrize("close", [0, 14])
def test_all_of_a_lead_of_several_tokens_comes_before_the_answer(close: int) -> None:
    """Wherever in a block it begins, and if it ends in the next one."""
    request, made, policies = asked(True), led(SMALL), (Closing(close),)
    truth = constrained(request, NoDrafter(), made, thinking=True, policies=policies)
    ends = truth.index(text().end_think) + 1
    assert ends == close + 1
    assert tuple(truth[ends : ends + 3]) == LEAD
    written = json.loads(text().decode(truth[ends + 3 :]))
    assert SchemaValidator(read(SMALL)).valid(written)
    for kind in ("oracle", "hostile", "real"):
        proposer = drafter(kind, truth, 5)
        got = constrained(request, proposer, made, thinking=True, policies=policies)
        assert got == truth, kind


@pytest.mark.parametrize(
    ("message", "left"),
    [((), LEAD), (LEAD[:1], LEAD[1:]), (LEAD[:2], LEAD[2:]), (LEAD, ()), ((5,), ()), ((7, 5), ())],
)
def test_a_message_may_begin_a_lead_or_replace_its_rest(
    message: tuple[int, ...], left: tuple[int, ...]
) -> None:
    vocabulary = led(SMALL).vocabulary
    place = Place(thinking=False, lead=LEAD)
    for token in message:
        place = place.after(token, vocabulary)
    assert (place.lead, place.inside) == (left, not left)
    assert leads(message, vocabulary)
    assert leads((*message, 5), vocabulary) == bool(left), "all that follows is of the answer"


def test_a_constrained_cycle_waits_twice_and_an_unconstrained_one_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    s, events = session(), list[str]()
    engine = type(s.model.engine)
    run, read, masks = engine.run, engine.read, Walk.make_masks
    made = grammar(SMALL)
    names = lambda calls: " ".join(call.graph.name for call in calls)  # noqa: E731
    monkeypatch.setattr(
        engine, "run", lambda e, calls: events.append(names(calls)) or run(e, calls)
    )
    monkeypatch.setattr(engine, "read", lambda *a, **k: events.append("wait") or read(*a, **k))
    monkeypatch.setattr(Walk, "make_masks", lambda *a: events.append("masks") or masks(*a))
    constrained(replace(asked(False), max_tokens=9), DflashDrafter(), made)
    cycle = ["propose", "wait", "verify", "masks", "accept_masked observe", "wait"]
    first = events.index("propose")
    assert events[first:] == cycle * s.report().spec.cycles
    events.clear()
    constrained(replace(asked(False), max_tokens=9), NoDrafter(), made)
    first = events.index("verify")
    undrafted = ["verify", "masks", "accept_masked", "wait"]
    assert events[first:] == undrafted * s.report().spec.cycles, "the host wrote the tokens itself"
    events.clear()
    constrained(replace(asked(True), max_tokens=9), DflashDrafter(), made, thinking=True)
    first = events.index("propose")
    thinking = ["propose", "wait", "verify accept observe", "wait"]
    assert events[first:] == thinking * s.report().spec.cycles
    events.clear()
    list(s.run(replace(asked(False), max_tokens=9), DflashDrafter()))
    first = events.index("propose verify accept observe")
    assert events[first:] == ["propose verify accept observe", "wait"] * s.report().spec.cycles


@dataclass(frozen=True, slots=True)
class Mute:
    """A vocabulary of which nothing is legal after `at` tokens of the answer, as if it lacked the
    char that the grammar needs there.
    """

    whole: Vocabulary
    at: int

    size = property(lambda self: self.whole.size)
    words = property(lambda self: self.whole.words)
    stop = property(lambda self: self.whole.stop)
    lead = property(lambda self: self.whole.lead)
    end_think = property(lambda self: self.whole.end_think)

    def masks(self, matcher: LLMatcher, tokens: list[int], out: Array) -> None:
        self.whole.masks(matcher, tokens, out)
        walked = matcher.deep_copy()
        for row, token in enumerate([*tokens, -1]):
            if self.dead(walked):
                out[row] = 0
            if token >= 0:
                walked.consume_token(token)

    def dead(self, matcher: LLMatcher) -> bool:
        # A matcher does not tell how many tokens it has taken, but whether it can take some back.
        return matcher.deep_copy().rollback(self.at)


@pytest.mark.parametrize("kind", ["nobody", "oracle", "real", "dead"])
@pytest.mark.parametrize("at", some(range(2, 24, 3), range(2, 24, 9), pytest.mark.slow))
def test_a_dead_end_in_any_row_ends_the_request_there(at: int, kind: str) -> None:
    made = grammar(SMALL)
    truth = plain(SMALL, force=False)
    mute = replace(made, vocabulary=Mute(made.vocabulary, at))  # type: ignore[arg-type]
    got = constrained(asked(False), drafter(kind, truth, 1), mute, force=False)
    assert got == truth[:at]
    assert session().report().finish == "grammar_dead_end"


def test_a_drafted_stop_id_ends_its_block() -> None:
    made = grammar({"type": "integer", "minimum": 0, "maximum": 99})
    written = text().encode("7")  # after which the answer may end or go on
    for stop in made.vocabulary.stop:
        drafted = (0, *written, stop, *[5] * (14 - len(written)))
        block = Constrain(made, Place(thinking=False), force=False).look(drafted, Block(cap=16))
        assert block.cap == len(written) + 1, "the row that it follows is the last"


def test_the_same_constrained_request_after_any_other_and_after_cancel() -> None:
    made, request = grammar(PLAN), asked(False)
    first = constrained(request, DflashDrafter(), made)
    constrained(asked(True, "Wait.", 40), DflashDrafter(), grammar(SMALL), thinking=True)
    policy: Policy = Constrain(made, Place(thinking=False))
    answers = session().run(request, DflashDrafter(), (policy,))
    while not next(answers).tokens:
        pass
    answers.close()
    assert session().report().finish == "cancelled"
    assert constrained(request, DflashDrafter(), made) == first


def test_a_constrained_request_continues_from_a_prefix() -> None:
    s, made = session(), grammar(PLAN)
    request = asked(False, "Pick the mug. " * 12)
    truth = constrained(request, DflashDrafter(), made)
    s.prefixes.put("words", request.prompt[:70])
    assert constrained(request, DflashDrafter(), made) == truth
    assert s.report().usage.cached_tokens == 64
    s.prefixes.drop("words")
