"""A session gives the answers of plain decoding, whatever was asked, cancelled, stored or broken
before.

Plain decoding is written here once more: one token a verify, each chosen on the host. It shares no
policy, proposer, walk of a grammar or accept step with the session.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule
from support import constrained_model
from support.loop_models import drafts

from thor_dflash.config.decode import BudgetConfig, DraftConfig, RelaxedConfig
from thor_dflash.config.engine import EngineConfig
from thor_dflash.core.errors import RequestError, TransactionError
from thor_dflash.core.progress import Silent
from thor_dflash.core.tensors import Array
from thor_dflash.runtime.decoding.proposers import NoDrafter, Proposer
from thor_dflash.runtime.engines.ort import OrtEngine
from thor_dflash.runtime.measure.score import score
from thor_dflash.runtime.session import Request, RequestReport, Session, TokenChunk, open_session
from thor_dflash.runtime.text.thinking import Marks
from thor_dflash.runtime.text.tokenizer import Tokenizer

CHUNK, CAPACITY = 16, 160
SCHEMAS = (constrained_model.PLAN, constrained_model.SMALL, {"enum": [1, "a", None]})
ID = st.integers(0, 1200)


@cache
def opened(name: str) -> Session:
    """Returns a session of its own over the same package; "plain" is for plain decoding."""
    package = constrained_model.package(CHUNK, (8, 4))
    return open_session(package, EngineConfig(threads=1, capacity=CAPACITY), Silent())


def text() -> Tokenizer:
    found = opened("plain").tokenizer
    assert found is not None
    return found


def marks() -> Marks:
    found = text().marks
    assert found is not None
    return found


# ---- what is asked


@dataclass(frozen=True)
class Asked:
    """A request; its grammar is an index into SCHEMAS, or -1."""

    length: int
    seed: int
    thinks: bool
    most: int
    stops: tuple[int, ...]
    schema: int
    budget: BudgetConfig
    relaxed: RelaxedConfig | None
    gate: bool
    draft: DraftConfig

    def request(self, s: Session) -> Request:
        prompt = (*begun(self.seed)[: self.length], *[marks().open] * self.thinks)
        ends = s.manifest.stop_tokens if self.schema >= 0 else ()
        return Request(
            prompt=prompt,
            max_tokens=min(self.most, s.model.limit - len(prompt)),
            stop=frozenset((*self.stops, *ends)),
            grammar=s.grammar(SCHEMAS[self.schema]) if self.schema >= 0 else None,
            budget=self.budget,
            relaxed=self.relaxed,
            gate=self.gate,
            draft=self.draft,
        )


@cache
def begun(seed: int) -> tuple[int, ...]:
    """Returns tokens that prompts and prefixes begin with."""
    return tuple(int(t) for t in np.random.default_rng(seed).integers(0, 1200, 140))


ASKED = st.builds(
    Asked,
    length=st.sampled_from([1, 2, 16, 17, 32, 33, 60, 113, 127, 128, 129]),
    seed=st.integers(0, 1),
    thinks=st.sampled_from([True, True, False]),
    most=st.sampled_from([1, 2, 16, 17, 40, CAPACITY]),
    stops=st.lists(ID, max_size=3).map(tuple),
    schema=st.integers(-1, len(SCHEMAS) - 1),
    budget=st.builds(
        BudgetConfig,
        tokens=st.integers(0, 33),
        close=st.sampled_from(["hard", "soft"]),
        message=st.sampled_from(["", "</think>", "Go: a b c d e f g h i j k l.</think>\n\n"]),
        ratio=st.sampled_from([0.5, 0.001]),
        soften=st.sampled_from([0.01, 0.5]),
    )
    | st.just(BudgetConfig()),
    relaxed=st.none() | st.just(RelaxedConfig(k=1280, margin=9.0)),
    gate=st.booleans(),
    draft=st.builds(DraftConfig, context=st.sampled_from([0, 5]), seed=st.sampled_from([0, 20])),
)
KINDS = st.sampled_from(["dflash", "nobody", "right", "nearly", "marks", "few", "wild"])


def drafter(kind: str, truth: Sequence[int], rows: int) -> Proposer:
    rng = np.random.default_rng(len(truth))
    ids = (marks().open, marks().close, *opened("plain").manifest.stop_tokens, 0, 1279)
    guesses: dict[str, Callable[[Sequence[int]], Sequence[int]]] = {
        "right": lambda ahead: ahead,
        "nearly": lambda ahead: [t if rng.random() < 0.85 else t ^ 1 for t in ahead],
        "marks": lambda ahead: [int(t) for t in rng.choice(ids, rows)],
        "few": lambda ahead: ahead[: int(rng.integers(4))],
        "wild": lambda ahead: [int(t) for t in rng.integers(0, 1280, 2 * rows)],
    }
    return drafts(lambda n: guesses[kind](truth[n : n + rows])) if kind in guesses else NoDrafter()


# ---- plain decoding


class Plain:
    """The answer to one request so far, and what may follow it."""

    def __init__(self, q: Request) -> None:
        self.q, self.out = q, list[int]()
        ends = [t for t in q.prompt if t in (marks().open, marks().close)]
        self.inside = ends[-1:] == [marks().open]
        self.most, self.think = q.max_tokens, math.inf
        self.message, self.closing = list[int](), list[int]()
        self.matcher = q.grammar.matcher.deep_copy() if q.grammar else None
        self.lead = text().encode("\n\n") if self.inside else []
        if self.inside and q.budget.tokens >= 0:
            card = opened("plain").manifest.card
            self.message = text().encode(q.budget.message or card.close)
            reply = min(card.reply, self.most - q.budget.tokens)
            self.most = min(q.budget.tokens + reply, self.most)
            self.think = self.most - reply

    def close(self) -> None:
        """Begin the closing message if the thinking has used up its tokens."""
        if self.inside and self.message and len(self.out) >= self.think:
            written = self.out[-1:] == self.message[:1]
            self.closing, self.message = self.message[written:], []

    def choose(self, logits: Array) -> int:
        """Returns the next token; -1 if none is legal."""
        if self.closing:
            return self.closing[0]
        if self.inside:
            return self._thought(logits)
        if self.matcher and self.lead:
            return self.lead[0]
        if self.matcher:
            legal = np.frombuffer(self.matcher.compute_logit_bias(), np.uint8)[: len(logits)] > 0
            logits = np.where(legal, logits, -np.inf)
        return int(logits.argmax()) if np.isfinite(logits.max()) else -1

    def _thought(self, logits: Array) -> int:
        best, budget = int(logits.argmax()), self.q.budget
        soft = budget.close == "soft" and len(self.out) >= math.ceil(budget.soften * self.think)
        near = logits[marks().close] >= logits[best] + np.float32(math.log(budget.ratio))
        return marks().close if soft and near else best

    def take(self, token: int) -> None:
        """Append a token."""
        self.closing = self.closing[1:]
        if not self.inside and self.lead:
            self.lead = self.lead[1:] if token == self.lead[0] else []
        elif not self.inside and self.matcher and token not in opened("plain").manifest.stop_tokens:
            assert self.matcher.consume_token(token)
        self.inside &= token != marks().close
        self.out.append(token)


def rows(prompt: Sequence[int], out: Sequence[int]) -> Iterator[Array]:
    """Yields the logits after the prompt, then after each token that was put in `out` meanwhile."""
    model = opened("plain").model
    model.state.reset()
    for at in range(0, len(prompt) - 1, CHUNK):
        model.prefill(prompt[:-1][at : at + CHUNK], observe=False)
    while True:
        model.write_tokens([out[-1] if out else prompt[-1]])
        model.verify()
        yield model.read("logits")[0, : model.manifest.vocab_limit].astype(np.float64)
        model.state.commit(1)


def plain(q: Request, written: Sequence[int] = ()) -> tuple[list[int], str]:
    """Returns all committed tokens, of which `written` are the first, and why they end."""
    p = Plain(q)
    for logits in rows(q.prompt, p.out):
        p.close()
        token = p.choose(logits) if len(p.out) >= len(written) else written[len(p.out)]
        if token < 0:
            break
        p.take(token)
        if token in q.stop:
            return p.out, "stop"
        if len(p.out) == p.most:
            return p.out, "length"
    return p.out, "grammar_dead_end"


@cache
def truth(asked: Asked) -> tuple[list[int], str]:
    return plain(asked.request(opened("plain")))


# ---- the session


class Broken(Exception):
    pass


@contextmanager
def breaking(at: int) -> Generator[None]:
    """Let the engine's call number `at` from now on fail."""
    left = [at]

    def failing(method: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **named: object) -> object:
            left[0] -= 1
            if left[0] == 0:
                raise Broken
            return method(*args, **named)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in ("run", "write", "read", "clear"):
            patch.setattr(OrtEngine, name, failing(getattr(OrtEngine, name)))
        yield


def adds_up(report: RequestReport, shown: int) -> None:
    spec, parts, times = report.spec, report.phases.values(), report.timings
    done = report.completion_tokens
    assert report.usage.thinking_tokens + report.usage.output_tokens == shown
    assert done == shown + (report.finish == "stop")
    assert done == sum(n * cycles for n, cycles in enumerate(spec.accept_hist, 1))
    assert spec.cycles == sum(spec.accept_hist) == sum(part.cycles for part in parts)
    assert done == sum(part.committed for part in parts)
    assert spec.accepted == sum(spec.accepted_per_position) == sum(p.accepted for p in parts)
    assert spec.drafted == sum(part.drafted for part in parts) >= spec.accepted
    assert 0 <= done - spec.forced - spec.accepted <= spec.cycles
    assert times.prefill_ms + times.decode_ms == pytest.approx(times.e2e_ms)
    assert sum(report.phases_ms.values()) == pytest.approx(times.e2e_ms)
    assert all(note.cycle + note.cycles <= spec.cycles for note in report.notes)


class AnyOrder(RuleBasedStateMachine):
    """Two sessions in use, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.left: dict[str, Iterator[TokenChunk]] = {}
        for name in "ab":
            for prefix in opened(name).prefixes.list():
                opened(name).prefixes.drop(prefix.name)

    @rule(name=st.sampled_from("ab"), asked=ASKED, kind=KINDS, steps=st.integers(0, 99))
    def ask(self, name: str, asked: Asked, kind: str, steps: int) -> None:
        """Answer a request; of every fourth only some steps, and then it is cancelled or left."""
        chunks = self.admitted(name, asked, kind)
        some = None if steps % 4 else 1 + steps // 12
        got = [*islice(chunks, some)]
        self.compare(asked, got)
        if got and some and not got[-1].finish and steps % 8:
            self.left[name] = chunks
        elif got:
            self.ended(name, chunks, got)

    @rule(name=st.sampled_from("ab"), asked=ASKED, kind=KINDS, at=st.integers(1, 150))
    def fail(self, name: str, asked: Asked, kind: str, at: int) -> None:
        """An engine that fails ends a request, and changes nothing that was answered."""
        chunks, got = self.admitted(name, asked, kind), list[TokenChunk]()
        with breaking(at):
            try:
                for chunk in chunks:
                    got.append(chunk)
            except Broken:
                assert opened(name).report().finish == "error"
        self.compare(asked, got)

    @rule(name=st.sampled_from("ab"), seed=st.integers(0, 1), length=st.integers(1, 140))
    def put(self, name: str, seed: int, length: int) -> None:
        opened(name).prefixes.put(f"{length % 3}", begun(seed)[:length], pinned=bool(length % 2))
        self.lost(name)

    @rule(name=st.sampled_from("ab"), which=st.integers(0, 2))
    def drop(self, name: str, which: int) -> None:
        opened(name).prefixes.drop(f"{which}")

    @rule(name=st.sampled_from("ab"), asked=ASKED)
    def score(self, name: str, asked: Asked) -> None:
        q, (out, _) = asked.request(opened(name)), truth(asked)
        found = score(opened(name), [*q.prompt, *out], False, Silent())["logits"]
        self.lost(name)
        if not q.grammar and not q.budget.tokens >= 0:
            after = found[len(q.prompt) - 1 : -1, : opened(name).manifest.vocab_limit]
            assert after.argmax(axis=1).tolist() == out

    def admitted(self, name: str, asked: Asked, kind: str) -> Iterator[TokenChunk]:
        """Begin a request; an empty iterator if it is refused."""
        s, q = opened(name), asked.request(opened(name))
        try:
            admitted = s.admit(q)
        except RequestError:
            return iter(())
        if kind != "dflash":
            made = drafter(kind, truth(asked)[0], s.model.block)
            admitted = replace(admitted, proposer=made)
        return self.first(name, s.generate(admitted))

    def first(self, name: str, chunks: Iterator[TokenChunk]) -> Iterator[TokenChunk]:
        """The chunks; after the first, a request that was left has lost the state."""
        for chunk in chunks:
            self.lost(name)
            yield chunk

    def lost(self, name: str) -> None:
        if chunks := self.left.pop(name, None):
            with pytest.raises(TransactionError):
                next(chunks)

    def compare(self, asked: Asked, got: Sequence[TokenChunk]) -> None:
        tokens, finish = [t for c in got for t in c.tokens], "".join(c.finish for c in got)
        if not got:
            return
        want, why = truth(asked)
        if asked.relaxed and marks().close in tokens:
            written = tokens[: tokens.index(marks().close) + 1]
            want, why = plain(asked.request(opened("plain")), written)
        elif asked.relaxed and (asked.thinks or tokens[:1] == [marks().open]):
            return
        shown = want[:-1] if why == "stop" else want
        assert tokens == (shown if finish else shown[: len(tokens)])
        assert finish in ("", why)

    def ended(self, name: str, chunks: Iterator[TokenChunk], got: Sequence[TokenChunk]) -> None:
        if got[-1].finish:
            assert list(chunks) == []
        else:
            chunks.close()  # type: ignore[attr-defined]
        report = opened(name).report()
        assert report.finish == (got[-1].finish or "cancelled")
        adds_up(report, sum(len(chunk.tokens) for chunk in got))


def of(examples: int) -> settings:
    return settings(
        max_examples=examples, stateful_step_count=20, suppress_health_check=list(HealthCheck)
    )


class TestAnyOrder(AnyOrder.TestCase):  # type: ignore[name-defined, misc]
    settings = of(2)


@pytest.mark.slow
class TestMoreOrders(AnyOrder.TestCase):  # type: ignore[name-defined, misc]
    settings = of(6)
