"""The laws of the loop and of reuse, with images in the prompt: bit for bit, on a real engine."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from support.loop_models import DEAD, answer, erring, hostile, prompt, session

from thor_dflash.config.decode import SamplingConfig
from thor_dflash.core.errors import RequestError
from thor_dflash.core.progress import Silent
from thor_dflash.runtime.decoding.proposers import DflashDrafter, NoDrafter
from thor_dflash.runtime.measure.score import score
from thor_dflash.runtime.session import Request, Session
from thor_dflash.runtime.session.turn_cache import Conversation, TurnCache
from thor_dflash.runtime.vision.picture import Picture

MEMORY = 4 << 20
MARK = (240, 241, 242)
"""An image, as a template writes it."""
GREEDY, DRAWN = SamplingConfig(), SamplingConfig(temperature=0.8, top_p=0.9, seed=7)


def picture(seed: int, rows: int = 6, columns: int = 8) -> Picture:
    """Random pixels of rows x columns tokens / 2."""
    size = rows * 16, columns * 16, 3
    return Picture(np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8))


@pytest.fixture
def s() -> Session:
    """A session that keeps turns and images; those that a test adds are forgotten."""
    found = session("seeing", reuse=MEMORY)
    found.turns = TurnCache(found.model)
    found.model.state.log.chunks.clear()
    return found


def request(
    s: Session,
    ids: tuple[int, ...],
    *pictures: Picture,
    sampling: SamplingConfig = GREEDY,
    tokens: int = 24,
) -> Request:
    """A request of ids with marks, which a later one may continue from its end."""
    images = s.images(ids, pictures)
    asked = images.prompt if images else ids
    end = Conversation(boundaries=((len(asked), "prompt"),))
    return Request(
        prompt=asked, max_tokens=tokens, images=images, conversation=end, sampling=sampling
    )


def empty(s: Session, asked: Request) -> list[int]:
    """The answer of a session that keeps nothing, without a drafter. The images are new to it."""
    bare = session("seeing")
    assert asked.images is None or not asked.images.pictures or bare.encoder is not s.encoder
    fresh = replace(asked.images, encoded={}, encode_ms={}) if asked.images else None
    return answer(bare, replace(asked, images=fresh), NoDrafter())


CHAT = (*prompt(9, 1), *MARK, *prompt(4, 2), *MARK, *MARK, *prompt(30, 3))


@pytest.mark.parametrize(
    ("kind", "sampling"),
    [("real", GREEDY), ("hostile", GREEDY), ("dead", GREEDY), ("real", DRAWN), ("erring", DRAWN)],
)
def test_any_drafter_gives_the_plain_answer(
    s: Session, kind: str, sampling: SamplingConfig
) -> None:
    asked = request(s, CHAT, picture(1), picture(2, 2, 10), picture(3, 4, 4), sampling=sampling)
    truth = empty(s, asked)
    assert len(set(truth)) > 5, "a model that repeats itself shows nothing"
    drafters = {
        "real": DflashDrafter(),
        "hostile": hostile(truth),
        "erring": erring(truth, 0.2, 5),
        "dead": DEAD,
    }
    assert answer(s, asked, drafters[kind]) == truth


def test_an_answer_depends_on_the_picture_and_its_place(s: Session) -> None:
    pictures = picture(1), picture(2)
    ids = (*prompt(9, 1), *MARK, *prompt(4, 2), *MARK, *prompt(30, 3))
    answers = [
        tuple(empty(s, request(s, ids, *shown)))
        for shown in (pictures, pictures[::-1], (pictures[0], picture(1, 8, 6)))
    ]
    assert len(set(answers)) == 3


def test_a_turn_with_a_new_frame_reads_only_what_is_new(s: Session) -> None:
    first = request(s, CHAT, picture(1), picture(2), picture(3))
    assert answer(s, first, DflashDrafter()) == empty(s, first)
    ids = (*CHAT, *prompt(11, 4), *MARK, *prompt(40, 5))
    second = request(s, ids, picture(1), picture(2), picture(3), picture(4))
    assert answer(s, second, DflashDrafter()) == empty(s, second)
    assert s.report().reuse.held == len(first.prompt) // 32 * 32 > 0
    assert s.encoder
    assert s.encoder.totals.images - s.encoder.totals.hits >= 4


def test_another_picture_of_the_same_size_is_never_reused(s: Session) -> None:
    for seed in (1, 2):  # the last pixel alone differs
        shown = picture(1)
        shown.pixels[-1, -1, -1] ^= seed
        ids = (*prompt(70, 1), *MARK, *prompt(60, 2))
        asked = request(s, ids, shown)
        assert answer(s, asked, DflashDrafter()) == empty(s, asked)
        assert s.report().reuse.held <= 64, "the chunks before the picture at most"


def test_two_conversations_with_pictures_interleaved(s: Session) -> None:
    histories = [list(prompt(50, 20 + i)) for i in range(2)]
    shown: list[list[Picture]] = [[], []]
    for step in range(2):
        for i, history in enumerate(histories):
            history += [*MARK, *prompt(30, 100 + 10 * step + i)]
            shown[i].append(picture(10 * step + i))
            asked = request(s, tuple(history), *shown[i], tokens=8)
            assert answer(s, asked, DflashDrafter()) == empty(s, asked)
    assert s.turns.totals.swapped_in > 0


def test_text_after_images_is_as_on_a_session_that_saw_none(s: Session) -> None:
    """Nothing of an image stays behind: neither its shift nor its rows."""
    text, bare = request(s, prompt(90, 8)), session("seeing")
    want = answer(bare, text, DflashDrafter())
    answer(s, request(s, CHAT, picture(1), picture(2), picture(3)), DflashDrafter())
    assert answer(s, text, DflashDrafter()) == want
    left, other = (one.model.state.snapshot().arrays for one in (s, bare))
    assert all(np.array_equal(array, other[name]) for name, array in left.items())


def test_what_is_read_without_a_request_has_no_images(s: Session) -> None:
    """A prefix, and tokens to score, after a prompt whose images come first and shift the rest."""
    begin, text = prompt(70, 31), request(s, (*prompt(70, 31), *prompt(20, 32)))
    want, scores = empty(s, text), score(session("seeing"), begin, False, Silent())
    answer(s, request(s, (*MARK, *prompt(90, 33)), picture(1)), DflashDrafter())
    assert all(map(np.array_equal, score(s, begin, False, Silent()).values(), scores.values()))
    answer(s, request(s, (*MARK, *prompt(90, 33)), picture(1)), DflashDrafter())
    assert s.prefixes.put("text", begin)
    try:
        assert answer(s, text, DflashDrafter()) == want
        assert s.report().reuse.boundary == "prefix"
    finally:
        s.prefixes.drop("text")


def test_a_snapshot_within_an_answer_keeps_its_images(s: Session) -> None:
    asked = request(s, CHAT, picture(5), picture(6), picture(7))
    want = empty(s, asked)
    model, run = s.model, s.run(asked, DflashDrafter())
    chosen = list(next(chunk for chunk in run if chunk.tokens).tokens)
    here = model.state.snapshot()
    run.close()
    answer(s, request(s, prompt(90, 8)), NoDrafter())
    model.state.restore(here)
    while len(chosen) < len(want):
        model.write_tokens(chosen[-1:])
        model.verify()
        chosen.append(int(model.read("logits")[0].argmax()))
        model.state.commit(1)
    assert chosen[: len(want)] == want


def test_a_cancelled_prompt_leaves_nothing_behind(s: Session) -> None:
    asked = request(s, CHAT, picture(5), picture(6), picture(7))
    want = empty(s, asked)
    for steps in (1, 3):
        run = s.run(asked, DflashDrafter())
        for _ in range(steps):
            next(run)
        run.close()
        assert answer(s, asked, DflashDrafter()) == want


def test_rows_of_images_are_kept_within_their_memory(
    s: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = s.encoder
    assert encoder is not None
    monkeypatch.setattr(encoder, "budget", 2 * 12 * 64 * 4)
    before = encoder.totals.hits
    ids = (*prompt(5, 1), *MARK, *prompt(5, 2))
    for seed in (51, 52, 53, 53, 51):
        asked = request(s, ids, picture(seed), tokens=2)
        assert answer(s, asked, NoDrafter()) == empty(s, asked)
    assert encoder.totals.hits - before == 1, "only the last but one was still there"


def test_marks_and_pictures_must_be_as_many(s: Session) -> None:
    for pictures in ((), (picture(1), picture(2))):
        with pytest.raises(RequestError, match="images"):
            s.images((1, *MARK, 2), pictures)
    with pytest.raises(RequestError, match="end with a text"):
        s.images((1, 240, 241), (picture(1),))
    with pytest.raises(RequestError, match="vision tower"):
        session("27b").images((1, 2), (picture(1),))
