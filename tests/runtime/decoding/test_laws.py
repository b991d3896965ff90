"""The laws of the loop, bit for bit, on a real engine: speculation changes how fast, never what."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import cycle
from typing import Literal

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.coverings import some
from support.loop_models import DEAD, answer, drafts, erring, hostile, oracle, prompt, session

from thor_dflash.core.errors import TransactionError
from thor_dflash.runtime.decoding.block import Block
from thor_dflash.runtime.decoding.proposers import DflashDrafter, NoDrafter, Proposer
from thor_dflash.runtime.decoding.sequence_state import SequenceState, Snapshot
from thor_dflash.runtime.session import Request, Session

GEOMETRIES = ("0.8b", "4b", "27b", "heads27b", "narrow")
FEW = ("0.8b", "27b", "narrow")
SLOW = pytest.mark.slow
LAWFUL = settings(
    max_examples=12, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)


def plain(s: Session, request: Request) -> list[int]:
    return answer(s, request, NoDrafter())


ONE = Request(prompt=prompt(40, seed=1), max_tokens=48)


@cache
def truth_of(geometry: str) -> tuple[int, ...]:
    """The plain answer to ONE, decoded once; the answer with every drafter must equal it."""
    return tuple(plain(session(geometry), ONE))


def drafter(kind: str, truth: list[int], seed: int) -> Proposer:
    rng = np.random.default_rng(seed)
    return {
        "dead": DEAD,
        "hostile": hostile(truth),
        "oracle": oracle(truth),
        "real": DflashDrafter(),
        "erring": erring(truth, 0.15, seed),
        "random": drafts(lambda n: [int(t) for t in rng.integers(0, 240, 15)]),
    }[kind]


@pytest.mark.parametrize(
    ("geometry", "kind"),
    [
        *some([(g, "erring") for g in GEOMETRIES], [(g, "erring") for g in FEW], SLOW),
        *zip(GEOMETRIES, cycle(["real", "hostile", "dead", "random", "oracle"]), strict=False),
        *(("27b", kind) for kind in ("real", "hostile", "oracle")),
    ],
)
def test_any_drafter_gives_the_plain_answer(geometry: str, kind: str) -> None:
    truth = list(truth_of(geometry))
    assert answer(session(geometry), ONE, drafter(kind, truth, 5)) == truth
    assert len(set(truth)) > 5, "a model that repeats itself shows nothing"


@LAWFUL
@given(
    length=st.integers(1, 130),
    tokens=st.integers(1, 60),
    seed=st.integers(0, 99),
    rate=st.sampled_from([0.0, 0.05, 0.2, 0.5, 1.0]),
)
def test_any_prompt_and_any_drafter(length: int, tokens: int, seed: int, rate: float) -> None:
    s = session()
    request = Request(prompt=prompt(length, seed), max_tokens=tokens)
    truth = plain(s, request)
    assert len(truth) == tokens
    assert answer(s, request, erring(truth, rate, seed)) == truth


FAR = Request(prompt=prompt(380, seed=6), max_tokens=40)
"""Its answer begins within the third tile of attention and ends in the fourth, after twelve steps
of prefill."""


@pytest.mark.parametrize("kind", ["erring", "real", "hostile"])
def test_any_drafter_gives_the_plain_answer_and_cache_far_into_the_cache(kind: str) -> None:
    s = session()
    truth = plain(s, FAR)
    want = cached(s)
    assert answer(s, FAR, drafter(kind, truth, 5)) == truth
    got = cached(s)
    for name, rows in want.items():
        assert np.array_equal(rows, got[name]), name
        where = rows.reshape(rows.shape[0], rows.shape[1], -1)
        assert len({row.tobytes() for row in where[0]}) == rows.shape[1], "each token has its own"


def cached(s: Session) -> dict[str, np.ndarray]:
    arrays = s.model.state.snapshot().arrays
    return {name: array for name, array in arrays.items() if name.startswith("attention.")}


@pytest.mark.parametrize("geometry", some(GEOMETRIES, FEW, SLOW))
def test_an_oracle_gives_a_full_block_a_cycle(geometry: str) -> None:
    s = session(geometry)
    request = Request(prompt=prompt(40, seed=1), max_tokens=64)
    truth = plain(s, request)
    answer(s, request, oracle([*truth, *[0] * 16]))
    assert s.report().spec.accept_hist == (0,) * 15 + (4,)


def test_the_same_request_after_any_other() -> None:
    s = session()
    request = Request(prompt=prompt(50, seed=2), max_tokens=30)
    first = answer(s, request, DflashDrafter())
    for seed, length in ((3, 1), (4, 200), (5, 33)):
        answer(s, Request(prompt=prompt(length, seed), max_tokens=40), DflashDrafter())
        assert answer(s, request, DflashDrafter()) == first


def test_a_broken_request_does_not_poison_the_next() -> None:
    s = session()
    request = Request(prompt=prompt(50, seed=2), max_tokens=20)
    first = answer(s, request, DflashDrafter())
    for tensor in s.model.state.tensors.values():
        s.model.engine.write(tensor, np.full(tensor.spec.at({}), np.nan, np.float32))
    assert answer(s, request, DflashDrafter()) == first


def bits(snapshot: Snapshot) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in snapshot.arrays.items()}


def started(s: Session, length: int = 40) -> list[int]:
    """Leave the state in the middle of an answer; return the prompt's tokens and the answer's."""
    answers = s.run(Request(prompt=prompt(length, 7), max_tokens=60), DEAD)
    tokens: list[int] = []
    for chunk in answers:
        tokens += chunk.tokens
        if len(tokens) >= 10:
            break
    answers.close()
    return [*prompt(length, 7), *tokens]


def commit(s: Session, tokens: list[int], count: int) -> None:
    s.model.write_tokens(tokens)
    s.model.verify()
    s.model.state.commit(count)


FOLDED = list(zip(cycle(GEOMETRIES), range(1, 17), strict=False))


@pytest.mark.parametrize(
    ("geometry", "count"),
    [
        *some(FOLDED, FOLDED[::2], SLOW),
        *some([("27b", n) for n in (1, 4, 7, 16)], [("27b", 1), ("27b", 16)], SLOW),
    ],
)
def test_fold_of_n_rows_is_n_folds_of_one(geometry: str, count: int) -> None:
    s = session(geometry)
    rows = list(prompt(16, seed=11))
    after = [*prompt(16, seed=12)]
    started(s)
    here = s.model.state.snapshot()
    commit(s, rows, count)
    commit(s, after, 1)
    whole = s.model.state.snapshot()
    s.model.state.restore(here)
    for i in range(count):
        commit(s, rows[i:], 1)
    commit(s, after, 1)
    single = s.model.state.snapshot()
    for name in whole.arrays:
        if name.endswith((".state", ".tail")) or name.startswith("attention."):
            assert np.array_equal(whole.arrays[name], single.arrays[name]), name


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_a_dropped_step_leaves_the_state(geometry: str) -> None:
    s = session(geometry)
    started(s)
    here = s.model.state.snapshot()
    commit(s, list(prompt(16, seed=11)), 5)
    want = s.model.state.snapshot()
    s.model.verify()
    want_logits = s.model.read("logits")
    s.model.state.restore(here)
    for seed in (20, 21):
        s.model.write_tokens(prompt(16, seed))
        s.model.verify()
    commit(s, list(prompt(16, seed=11)), 5)
    got = s.model.state.snapshot()
    assert (got.length, got.accepted) == (want.length, want.accepted)
    s.model.verify()
    assert np.array_equal(s.model.read("logits"), want_logits)


@pytest.mark.parametrize("length", [1, 32, 90])
def test_a_restored_snapshot_goes_on_like_the_original(length: int) -> None:
    s = session()
    started(s, length)
    here = s.model.state.snapshot()
    commit(s, list(prompt(16, seed=11)), 7)
    commit(s, list(prompt(16, seed=12)), 16)
    want = bits(s.model.state.snapshot())
    answer(s, Request(prompt=prompt(100, 9), max_tokens=30), DflashDrafter())
    s.model.state.restore(here)
    commit(s, list(prompt(16, seed=11)), 7)
    commit(s, list(prompt(16, seed=12)), 16)
    got = bits(s.model.state.snapshot())
    same = [n for n in want if not n.startswith("drafter.")]
    assert [n for n in same if got[n] != want[n]] == []


def test_one_wait_a_cycle(monkeypatch: pytest.MonkeyPatch) -> None:
    s = session()
    engine, reads = s.model.engine, []
    read = type(engine).read
    monkeypatch.setattr(type(engine), "read", lambda *a, **k: reads.append(1) or read(*a, **k))
    answer(s, Request(prompt=prompt(40, 1), max_tokens=30), DflashDrafter())
    # Besides, one for each of the prompt's two chunks: a cancel must not wait for queued chunks.
    assert len(reads) == s.report().spec.cycles + 2


@pytest.mark.parametrize(("rows", "count"), [(0, 1), (16, 0), (16, 17)])
def test_commit_must_follow_a_verify(rows: int, count: int) -> None:
    s = session()
    started(s)
    if rows:
        s.model.verify()
    with pytest.raises(TransactionError, match=rf"must be 1..{rows} .* \(got {count}\)"):
        s.model.state.commit(count)


@pytest.mark.parametrize("again", [SequenceState.reset, SequenceState.restore])
def test_a_failed_step_must_be_reset_or_restored(
    again: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    s = session()
    started(s)
    before = (s.model.state.snapshot(),) if again == SequenceState.restore else ()
    with monkeypatch.context() as patch:
        patch.setattr(type(s.model.engine), "run", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            s.model.verify()
    with pytest.raises(TransactionError, match="must follow a finished one"):
        s.model.step(Block(cap=1), (), (), ())
    again(s.model.state, *before)
    s.model.verify()


@pytest.mark.parametrize(
    ("geometry", "block", "chunk", "kv"),
    [
        ("27b", 2, 1, "f32"),
        pytest.param("4b", 5, 7, "bf16", marks=SLOW),
        pytest.param("4b", 7, 5, "f32", marks=pytest.mark.slow),
        pytest.param("27b", 8, 64, "fp8", marks=pytest.mark.slow),
        pytest.param("27b", 16, 48, "fp8", marks=pytest.mark.slow),
    ],
)
def test_any_block_chunk_and_cache(
    geometry: str, block: int, chunk: int, kv: Literal["f32", "bf16", "fp8"]
) -> None:
    s = session(geometry, block=block, chunk=chunk, kv=kv)
    request = Request(prompt=prompt(45, seed=8), max_tokens=40)
    truth = plain(s, request)
    for proposer in (DflashDrafter(), erring(truth, 0.2, 1, rows=block), oracle(truth, rows=block)):
        assert answer(s, request, proposer) == truth
