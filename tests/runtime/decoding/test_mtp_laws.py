"""The laws of the loop with an MTP drafter: it changes how fast, never what, and what it drafts
does not depend on what ran before.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from functools import cache
from typing import Literal

import numpy as np
import pytest
from support.constrained_model import SMALL, asked, package
from support.loop_models import ForcedRuns, RecordedMtp, answer, prompt, session

from thor_dflash.config.decode import GREEDY, BudgetConfig, DraftConfig, SamplingConfig
from thor_dflash.config.engine import EngineConfig
from thor_dflash.core.errors import RequestError
from thor_dflash.core.progress import Silent
from thor_dflash.core.tensors import Array
from thor_dflash.runtime.decoding.block import Block, DecodeProgress, Policy
from thor_dflash.runtime.decoding.draft_chooser import DraftChooser
from thor_dflash.runtime.decoding.lookup import LookupTexts
from thor_dflash.runtime.decoding.mtp import MtpDrafter
from thor_dflash.runtime.decoding.proposers import DflashDrafter, NoDrafter
from thor_dflash.runtime.session import Request, Session, open_session
from thor_dflash.runtime.session.turn_cache import Conversation, TurnCache
from thor_dflash.runtime.vision.picture import Picture

ONE = Request(prompt=prompt(80, seed=1), max_tokens=20)
DRAWN = replace(ONE, sampling=SamplingConfig(temperature=1.0, top_k=20, top_p=0.95, seed=11))
RUNS = ForcedRuns({2: (9, 8, 7), 8: (5,), 12: (4, 3, 2, 1, 0, 6)})


@cache
def mtp() -> Session:
    return session(mtp=True, reuse=4 << 20)


def forget(s: Session) -> None:
    """Make a session one in which nothing ran."""
    s.turns = TurnCache(s.model)
    s.model.state.log.chunks.clear()


class LookupFirst(Policy):
    """Leaves the first blocks to lookup."""

    def shape(self, progress: DecodeProgress, block: Block) -> Block:
        return block if len(progress.tokens) > 8 else block.undrafted("test")


def ring(s: Session) -> Array:
    """The keys of all rows but those that the last block may not have taken in."""
    keys = s.model.state.snapshot().arrays["drafter.0.k"]
    return keys[:, 1 : len(ONE.prompt) + ONE.max_tokens - s.model.block]


def drafted(s: Session, request: Request, drafter: RecordedMtp | None = None) -> object:
    """The answer, and every block that was drafted for it."""
    drafter = drafter or RecordedMtp()
    return answer(s, request, drafter, (RUNS,)), drafter.blocks


@pytest.mark.parametrize("request_", [ONE, pytest.param(DRAWN, marks=pytest.mark.slow)])
def test_its_answer_is_the_plain_answer(request_: Request) -> None:
    s = mtp()
    for policies in ((), (RUNS,)):
        truth = answer(s, request_, NoDrafter(), policies)
        assert answer(s, request_, MtpDrafter(), policies) == truth
    assert len(set(truth)) > 5


def test_beside_lookup_it_misses_no_row() -> None:
    """Rows of blocks that it did not draft are taken in before it drafts again, also more of them
    than a block has.
    """
    s = mtp()
    plain = answer(s, ONE, NoDrafter())
    texts = LookupTexts(session=((*ONE.prompt[-4:], *plain[:13], 1, 2, 3),))
    own, alone = RecordedMtp(), RecordedMtp()
    poison = Request(prompt=prompt(130, 5), max_tokens=3)
    answer(s, poison, MtpDrafter())
    chooser = DraftChooser(own, ONE.prompt, lambda: texts)
    assert answer(s, ONE, chooser, (LookupFirst(),)) == plain
    assert {"session", "drafter"} <= s.report().spec.sources.keys()
    got = ring(s)
    answer(s, poison, MtpDrafter())
    answer(s, ONE, alone)
    assert not s.model.state.behind, "what it has taken in is held no more"
    np.testing.assert_allclose(got, ring(s), atol=1e-4)
    places = {tuple(before): drafts for before, drafts, _ in alone.blocks}
    found = {len(before): drafts == places[tuple(before)] for before, drafts, _ in own.blocks}
    assert all(found.values())
    assert max(found) - len(ONE.prompt) > 13, "it drafted behind the text"


def test_each_draft_is_drawn_with_the_noise_of_its_place() -> None:
    """At this temperature the noise decides nearly alone, and the target's is the same."""
    s, hot = mtp(), replace(ONE, sampling=SamplingConfig(temperature=100.0, seed=3))
    answer(s, hot, MtpDrafter())
    spec = s.report().spec
    assert spec.accepted > 0.8 * (ONE.max_tokens - spec.cycles)
    assert spec.accept_len > 3, "of 3 drafts and one more"


def test_the_first_token_of_a_prompt_of_one_has_nothing_to_draft_from() -> None:
    s, one = mtp(), Request(prompt=(5,), max_tokens=8)
    assert answer(s, one, MtpDrafter()) == answer(s, one, NoDrafter())


def test_it_drafts_the_same_after_a_prefix_and_after_another_request() -> None:
    s = mtp()
    want = drafted(s, ONE)
    drafted(s, Request(prompt=prompt(70, 5), max_tokens=9))
    assert drafted(s, ONE) == want
    s.prefixes.put("one", ONE.prompt[:70])
    drafted(s, Request(prompt=(*ONE.prompt[:64], *prompt(20, 6)), max_tokens=9))
    assert drafted(s, ONE) == want
    s.prefixes.drop("one")


def test_it_drafts_the_same_where_another_conversation_left_the_same_beginning() -> None:
    """The row of a chunk's first token needs the target's row before it, of the chunk before."""
    s = mtp()
    turns = [
        Request(
            prompt=(*prompt(70, 1), *prompt(30, seed), *prompt(28, seed + 1)),
            max_tokens=9,
            conversation=Conversation(
                boundaries=((70, "system"), (100, "user"), (128, "prompt")), session=f"{seed}"
            ),
        )
        for seed in (2, 4)
    ]
    want = [(forget(s), drafted(s, turn))[1] for turn in turns]
    forget(s)
    assert [drafted(s, turn) for turn in (*turns, *turns)] == [*want, *want]
    assert s.report().reuse.held == 96


@pytest.mark.slow
def test_limits_of_what_it_sees() -> None:
    s = mtp()
    truth = answer(s, ONE, NoDrafter())
    limits = DraftConfig(), DraftConfig(context=9), DraftConfig(full=30), DraftConfig(seed=20)
    seen = [RecordedMtp(config) for config in limits]
    for drafter in seen:
        assert answer(s, ONE, drafter) == truth
    first = [drafter.blocks[0][1] for drafter in seen]
    assert len({*map(tuple, first)}) > 1, "limits have an effect"


def test_the_other_kind_of_drafter_is_refused() -> None:
    with pytest.raises(RequestError, match="drafter must be mtp"):
        answer(mtp(), ONE, DflashDrafter())
    with pytest.raises(RequestError, match="drafter must be mtp"):
        mtp().admit(replace(ONE, drafter="dflash"))


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [GREEDY, DRAWN.sampling])
def test_under_a_grammar_and_a_budget(sampling: SamplingConfig) -> None:
    with closing(open_session(package(mtp=True), EngineConfig(threads=1), Silent())) as s:
        request = replace(
            asked(True, max_tokens=160),
            grammar=s.grammar(SMALL),
            budget=BudgetConfig(tokens=20, message="\n</think>\n\n"),
            sampling=sampling,
        )
        drafters: tuple[Literal["none", "mtp", "auto"], ...] = ("none", "mtp", "auto")
        answers = [
            [token for chunk in s.generate(replace(request, drafter=one)) for token in chunk.tokens]
            for one in drafters
        ]
    assert answers[0] == answers[1] == answers[2]
    assert len(answers[0]) > 10


@pytest.mark.slow
def test_with_an_image_in_the_prompt() -> None:
    """Rows of an image have a token that no embedding stands for, and positions of their own."""
    s = session("seeing", mtp=True)
    pixels = np.random.default_rng(3).integers(0, 256, (96, 128, 3), dtype=np.uint8)
    ids, found = (*prompt(40, 1), 240, 241, 242, *prompt(30, 2)), list[object]()
    for drafter in (NoDrafter(), MtpDrafter()):
        images = s.images(ids, [Picture(pixels)])
        assert images is not None
        shown = Request(prompt=images.prompt, max_tokens=16, images=images)
        found.append(answer(s, shown, drafter, (RUNS,)))
    assert found[0] == found[1]
