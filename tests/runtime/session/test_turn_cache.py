"""The law of reuse: a turn that continues from what earlier ones left gives, bit for bit, what it
gives in an empty session: tokens, drafts, cycles, and every byte of the state.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from support.loop_models import answer, prompt, session

from thor_dflash.runtime.decoding.proposers import DflashDrafter, NoDrafter, Proposer
from thor_dflash.runtime.session import Request, Session
from thor_dflash.runtime.session.admission import Admitted
from thor_dflash.runtime.session.prefix_cache import PrefixCache
from thor_dflash.runtime.session.turn_cache import Boundary, Conversation, TurnCache

CHUNK = 32
MEMORY = 4 << 20
"""Too little for all states of a model of four layers: some are swapped out, some evicted."""


@pytest.fixture
def s() -> Iterator[Session]:
    """A session that keeps turns; those that a test adds are forgotten."""
    found = session("27b", reuse=MEMORY)
    forget(found)
    yield found
    forget(found)


def forget(s: Session) -> None:
    s.prefixes = PrefixCache(s.model)
    s.turns = TurnCache(s.model)
    s.model.state.log.chunks.clear()


def turn(*parts: tuple[int, ...], name: str = "", scope: str = "") -> Request:
    """A request of these parts: the system turn, users' turns, and the end of the prompt."""
    ends = np.cumsum([len(part) for part in parts]).tolist()
    kinds: list[Boundary] = ["user" for _ in parts]
    kinds[0], kinds[-1] = "system", "prompt"
    conversation = Conversation(
        boundaries=tuple(zip(ends, kinds, strict=True)), scope=scope, session=name
    )
    return Request(
        prompt=tuple(t for part in parts for t in part), max_tokens=6, conversation=conversation
    )


def state(s: Session, request: Request) -> dict[str, bytes]:
    """Every byte of state that later steps can read, when the prefill has ended."""
    answers = s.run(request, DflashDrafter())
    while next(answers).prompt_done < len(request.prompt) - 1:
        pass
    answers.close()
    return {name: array.tobytes() for name, array in s.model.state.snapshot().arrays.items()}


def poison(s: Session, first: int) -> None:
    """Make NaN of the rows of the live caches from `first` on."""
    for tensor in s.turns.layout().caches:
        values = s.model.engine.read(tensor)
        values[:, first:] = np.nan
        s.model.engine.write(tensor, values)


def same(s: Session, request: Request, proposer: Proposer | None = None) -> int:
    """Check a request against an empty session; return the tokens it reused."""
    proposer, empty = proposer or DflashDrafter(), session("27b")
    held = s.held(request.prompt, request.conversation.scope)
    tokens, want = answer(s, request, proposer), answer(empty, request, proposer)
    got, plain = s.report(), empty.report()
    assert tokens == want
    assert got.spec == plain.spec
    assert got.usage.cached_tokens == got.reuse.held == held
    return held


def reused(s: Session, request: Request) -> int:
    """Answer a request; return the tokens it reused."""
    answer(s, request, DflashDrafter())
    return s.report().reuse.held


SYSTEM, USER, CALL, RESULT, MORE = (
    prompt(length, seed) for seed, length in enumerate((70, 40, 9, 60, 33))
)


def test_a_tool_loop_reads_only_its_new_chunks(s: Session) -> None:
    one = turn(SYSTEM, USER)
    assert same(s, one) == 0
    assert s.report().reuse.why == "first"
    two = turn(SYSTEM, USER, CALL, RESULT)
    assert same(s, two) == 96, "110 tokens are three whole chunks"
    assert s.report().reuse.boundary == "prompt"
    three = turn(SYSTEM, USER, CALL, RESULT, CALL, MORE)
    assert same(s, three) == 160, "179 tokens are five whole chunks"
    other = turn(SYSTEM, MORE)
    assert same(s, other) == 64
    assert s.report().reuse.boundary == "system"
    assert s.turns.totals.swapped_out > 0


def test_the_state_is_that_of_an_empty_session(s: Session) -> None:
    first = turn(SYSTEM, USER)
    second = turn(SYSTEM, USER, CALL, RESULT, MORE)
    answer(s, first, DflashDrafter())
    assert state(s, second) == state(session("27b"), second)
    assert s.report().reuse.held == 96


def test_two_conversations_interleaved(s: Session) -> None:
    """Their caches take the same rows: what the other one needs is swapped out and in again."""
    histories = [list(prompt(90, 20 + i)) for i in range(2)]
    for step in range(3):
        for i, history in enumerate(histories):
            request = turn(tuple(history), name=f"robot {i}")
            held = same(s, request)
            assert held == (len(history) - 50) // CHUNK * CHUNK * (step > 0)
            history += prompt(50, 100 + 10 * step + i)
    assert s.turns.totals.swapped_in > 0


def test_ids_written_by_decoding_are_not_those_of_a_prefill(s: Session) -> None:
    """A longer prompt is kept; a shorter one's answer then repeats its ids by verify steps, whose
    bits may be others. Here they are made others, by hand."""
    begin = turn(prompt(64, 7))
    written = tuple(answer(session("27b"), replace(begin, max_tokens=70), DflashDrafter()))
    assert same(s, begin) == 0
    long = turn((*begin.prompt, *written))
    assert same(s, long) == 32
    assert s.held((*long.prompt, 1, 2)) == 128
    assert same(s, replace(begin, max_tokens=70)) == 32
    poison(s, 63)
    after = turn((*begin.prompt, *written), prompt(40, 8))
    want = state(session("27b"), after)
    assert s.held(after.prompt) == 128, "the chunk that the answer overwrote was swapped out before"
    assert state(s, after) == want
    assert s.turns.totals.swapped_in > 0


def test_the_same_rows_of_another_beginning_are_not_reused(s: Session) -> None:
    tail = prompt(64, 31)
    one, other = (turn(prompt(64, seed), tail, CALL) for seed in (1, 2))
    short = turn(prompt(64, 1), (5,))
    for request in (one, other, short, one):
        same(s, request)
    assert state(s, one) == state(session("27b"), one)


def test_scopes_share_nothing(s: Session) -> None:
    a, b = (turn(SYSTEM, USER, scope=scope) for scope in "ab")
    same(s, a)
    assert same(s, b) == 0
    assert s.report().reuse.why == "diverged"
    assert same(s, a) == 96


def test_a_plain_request_uses_but_does_not_spoil(s: Session) -> None:
    first = turn(SYSTEM, USER)
    second = turn(SYSTEM, USER, RESULT)
    same(s, first)
    assert same(s, second, NoDrafter()) == 96
    assert same(s, second) == 96, "the plain request left the drafter without its rows"
    assert same(s, turn(SYSTEM, USER, RESULT, MORE)) == 160


def test_a_cancelled_prefill_and_a_pinned_prefix(s: Session) -> None:
    long = turn(SYSTEM, USER, RESULT, MORE, RESULT)
    answers = s.run(long, DflashDrafter())
    while next(answers).prompt_done < 96:
        pass
    answers.close()
    assert same(s, turn(SYSTEM, CALL)) == 64
    s.prefixes.put("skills", (*SYSTEM, *USER, *RESULT))
    assert same(s, long) == 160
    assert s.report().reuse.boundary == "prefix"
    assert same(s, replace(long, prompt=(*long.prompt, *MORE))) == 256


@pytest.mark.slow
def test_memory_is_bounded_and_the_oldest_conversation_goes_first(s: Session) -> None:
    pages = s.turns.layout()
    del pages.free[9:]
    for i in range(12):
        same(s, turn(prompt(100, 200 + i), name=f"r{i}"))
    assert s.turns.totals.evicted["user"] + s.turns.totals.evicted["prompt"] > 0
    assert same(s, turn(prompt(100, 211), MORE, name="r11")) == 96
    assert same(s, turn(prompt(100, 200), MORE, name="r0")) == 0
    assert s.report().reuse.why == "evicted"
    used = {page for kept in s.turns._kept.values() for page in kept.pages}  # pyright: ignore[reportPrivateUsage]
    assert not used & set(pages.free)
    assert len(pages.free) == len(set(pages.free))


def test_what_lies_past_the_held_rows_does_not_matter(s: Session) -> None:
    """Rows of the live caches that the log does not know are never read."""
    first = turn(SYSTEM, USER)
    same(s, first)
    poison(s, 96)
    assert same(s, turn(SYSTEM, USER, RESULT)) == 96


def between(s: Session, random: Random, request: Request, waiting: list[Admitted]) -> None:
    """What may happen between two turns: a conversation ends or goes idle, is read ahead, or waits
    in a queue while others are answered."""
    what = random.random()
    if what < 0.1:
        s.turns.drop(request.conversation)
    elif what < 0.2:
        s.turns.expire(random.choice([0.0, 60.0, 60.0]))
    elif what < 0.4:
        steps = iter([False] * random.randint(0, 6))
        s.read_ahead(request.prompt, request.conversation, lambda: next(steps, True))
    elif what < 0.6:
        waiting.append(s.admit(request))
    if len(waiting) > 2:
        one = waiting.pop(0)
        plain = replace(request, prompt=one.prompt, conversation=one.conversation)
        tokens = [t for chunk in s.generate(one) for t in chunk.tokens]
        assert tokens == answer(session("27b"), plain, DflashDrafter())


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 12))]
)
def test_any_conversations(s: Session, seed: int) -> None:
    """Appended turns, edits in the middle, regenerated answers that repeat older prompts, other
    speakers, plain requests and cancelled ones, in any order and with little memory; between them
    conversations end, go idle, wait in a queue or are read ahead."""
    random, waiting = Random(seed), list[Admitted]()
    s.turns.layout().free[12:] = []  # a few pages, so that much is evicted
    texts = [[prompt(random.randint(20, 80), 50 + i)] for i in range(3)]
    found = 0
    for step in range(9 if seed == 0 else 14):
        who = random.randrange(3)
        parts = texts[who]
        if random.random() < 0.3 and len(parts) > 1:
            del parts[random.randrange(1, len(parts)) :]
        length = random.randint(1, 70)
        if sum(map(len, parts)) + length > 400:
            del parts[1:]
        parts.append(prompt(length, 300 + random.randrange(6)))
        request = turn(*parts, name=random.choice(["", f"r{who}"]))
        proposer = NoDrafter() if random.random() < 0.15 else DflashDrafter()
        between(s, random, request, waiting)
        if random.random() < 0.2:
            answers = s.run(request, proposer)
            next(answers)
            answers.close()
        found += same(s, request, proposer) > 0
        if step % 4 == 0 and s.held(request.prompt) < len(request.prompt) - 1:
            assert state(s, request) == state(session("27b"), request)
    assert found > 3


def pages_for(s: Session, boundaries: int, chunks: int) -> None:
    """Leave memory for so many boundaries, and for the rows of so many chunks."""
    pages = s.turns.layout()
    del pages.free[boundaries * len(pages.light) + chunks :]


def test_a_request_that_waits_finds_what_it_was_admitted_with(s: Session) -> None:
    """Others take all other memory meanwhile, also the rows of the live caches."""
    pages_for(s, 3, 4)
    history = prompt(100, 60)
    waits = turn(history, CALL, name="waits")
    want = answer(session("27b"), waits, DflashDrafter())

    def others(seed: int) -> None:
        reused(s, turn(history, name="waits"))
        found = s.admit(waits) if seed else None
        for other in range(seed, seed + 3):
            reused(s, turn(prompt(100, 70 + other), name=f"r{other}"))
        tokens = [t for chunk in s.generate(found or waits) for t in chunk.tokens]
        assert tokens == want
        assert s.report().reuse.held == (96 if found else 0)
        assert not s.turns._leases, "its promise is kept"  # pyright: ignore[reportPrivateUsage]

    others(0)
    s.turns.drop(waits.conversation)
    others(10)


def test_the_end_of_a_conversation_frees_its_own(s: Session) -> None:
    one, two = (turn(SYSTEM, USER, RESULT, name=name) for name in ("one", "two"))
    reused(s, one)
    other = turn(SYSTEM, MORE, RESULT, name="two")
    reused(s, other)
    kept = len(s.turns)
    assert s.turns.drop(Conversation(session="one", scope="x")) == 0
    assert s.turns.drop(one.conversation) == 2
    assert s.turns.drop(one.conversation) == 0
    assert len(s.turns) == kept - 2
    assert s.held((*other.prompt, 1)) == 160
    assert reused(s, one) == 64, "the system turn is everyone's"
    assert same(s, two) == 160


def test_what_nobody_used_for_long_is_dropped(s: Session) -> None:
    now = [0.0]
    s.turns.clock = lambda: now[0]
    assert s.turns.expire(5) is None
    for at, request in enumerate(
        (turn(SYSTEM, USER), turn(SYSTEM, MORE), turn(SYSTEM, USER, CALL))
    ):
        now[0] = float(at)
        reused(s, request)
    assert s.turns.expire(2.5) == 1.5
    now[0] = 3.5
    more = (*SYSTEM, *MORE, 1)
    lease = s.turns.lease(more, "")
    for waits in (True, False):
        assert s.turns.expire(2.5) == 1.0
        assert s.held(more) == (96 if waits else 64)
        lease = None
    assert lease is None
    assert s.held((*SYSTEM, *USER, *CALL, 1)) == 96
    now[0] = 9.0
    assert s.turns.expire(2.5) is None
    assert reused(s, turn(SYSTEM, USER, RESULT)) == 64
    assert s.turns.totals.expired == 2


def test_what_is_read_ahead_need_not_be_read_again(s: Session) -> None:
    """Also what a request interrupted; and a conversation that goes on otherwise finds its own."""
    first, second = turn(SYSTEM, USER, ()), turn(SYSTEM, USER, CALL, RESULT)
    reused(s, first)
    steps = iter([False, True])
    assert s.read_ahead(second.prompt, second.conversation, lambda: next(steps)) == 32
    assert s.held(second.prompt) == 128
    assert s.read_ahead(second.prompt, second.conversation) == 32
    assert s.read_ahead(second.prompt, second.conversation) == 0
    assert s.turns.totals.ahead == 64
    assert s.turns.totals.queries == len(first.prompt)
    assert same(s, turn(SYSTEM, USER, MORE)) == 96
    assert same(s, turn(SYSTEM, USER, CALL, RESULT, MORE)) == 160
    report = s.report().reuse
    assert (report.reread, report.diverged_at) == (1, 161), "what was read ahead, and one token"


def test_where_a_prompt_diverges(s: Session) -> None:
    assert reused(s, turn((1, 2, 3))) == 0
    assert s.report().reuse.why == "too_short"
    reused(s, turn(SYSTEM, USER, CALL, name="a"))
    same(s, turn(SYSTEM, USER[:35], MORE, name="a"))
    report = s.report().reuse
    assert (report.boundary, report.held) == ("user", 96)
    assert (report.diverged_at, report.reread) == (105, 9)
    reused(s, turn(SYSTEM, USER, CALL, scope="b"))
    assert s.report().reuse.diverged_at == 0, "nothing is known of another scope"


def test_a_prefix_that_is_pinned_overwrites_what_turns_need(s: Session) -> None:
    """It is read without asking the turns: what they lost is read again."""
    first = turn(SYSTEM, USER)
    same(s, first)
    s.prefixes.put("other", prompt(130, 77))
    assert same(s, turn(SYSTEM, USER, RESULT)) == 0
