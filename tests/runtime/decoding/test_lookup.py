"""The automaton against a search by hand, and what an index drafts."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from thor_dflash.runtime.decoding import lookup
from thor_dflash.runtime.decoding.draft_chooser import DraftChoice, DraftWorth
from thor_dflash.runtime.decoding.lookup import LookupDraft, LookupIndex, LookupTexts
from thor_dflash.runtime.decoding.suffix_automaton import NO_MATCH, SuffixAutomaton

TEXT = st.lists(st.integers(0, 3), max_size=40)
QUICK = settings(max_examples=60, deadline=None, derandomize=True)


def longest(text: list[int], end: list[int]) -> int:
    """The longest end of `end` that occurs in `text`."""
    fits = [n for n in range(len(end) + 1) if any(
        text[i : i + n] == end[len(end) - n :] for i in range(len(text) - n + 1)
    )]  # fmt: skip
    return max(fits)


@QUICK
@given(text=TEXT)
def test_the_match_is_the_longest_end_that_occurs_earlier(text: list[int]) -> None:
    automaton = SuffixAutomaton()
    for count, token in enumerate(text, 1):
        automaton.extend([token])
        match = automaton.match
        assert match.length == longest(text[: count - 1], text[1:count])
        if match.length:
            at = automaton.end(match)
            assert text[at - match.length + 1 : at + 1] == text[count - match.length : count]
            assert at < count - 1
        while (shorter := automaton.shorter(match)).length:
            assert shorter.length < match.length
            match, at = shorter, automaton.end(shorter)
            here = text[at - match.length + 1 : at + 1]
            assert at < 0 or here == text[count - match.length : count]


@QUICK
@given(text=TEXT, tokens=TEXT)
def test_tokens_can_be_followed_without_being_appended(text: list[int], tokens: list[int]) -> None:
    automaton = SuffixAutomaton()
    automaton.extend(text)
    assert automaton.follow(NO_MATCH, tokens).length == longest(text, tokens)
    assert [*automaton.text] == text


def index(
    prompt: list[int], drafts: list[list[int]] | None = None, session: list[list[int]] | None = None
) -> LookupIndex:
    texts = LookupTexts(
        drafts=tuple(map(tuple, drafts or ())), session=tuple(map(tuple, session or ()))
    )
    return LookupIndex(texts, prompt)


def test_a_draft_is_what_followed_and_names_its_text() -> None:
    found = index([1, 2, 3], drafts=[[2, 3, 10, 11]], session=[[1, 2, 3, 20, 21, 22]])
    [draft] = found.drafts((), 2)
    assert (draft.tokens, draft.source, draft.match) == ((20, 21), "session", 3)
    found = index([9, 2, 3], drafts=[[2, 3, 10, 11]], session=[[2, 3, 20]])
    [draft] = found.drafts((), 5)
    assert (draft.tokens, draft.source) == ((10, 11), "drafts"), "the newest, up to its end"


def test_a_match_does_not_go_on_in_another_text() -> None:
    found = index([5, 1, 2], drafts=[[7, 1], [2, 8]])
    [draft] = found.drafts((), 4)
    assert (draft.tokens, draft.match) == ((8,), 1)


def test_a_periodic_output_goes_on() -> None:
    found = index([7])
    found.commit([1, 2, 3, 1, 2], None)
    [draft] = found.drafts((), 8)
    assert (draft.tokens, draft.source) == ((3, 1, 2, 3, 1, 2, 3, 1), "output")
    [draft] = found.drafts((3,), 6)
    assert draft.tokens == (1, 2, 3, 1, 2, 3)


def test_forced_ids_come_before_the_draft() -> None:
    found = index([1], session=[[5, 6, 7, 8]])
    assert found.drafts((), 4) == []
    [draft] = found.drafts((5, 6), 4)
    assert draft.tokens == (7, 8)
    found.commit([5, 6, 7], draft, 2)
    assert [d.tokens for d in found.drafts((), 4)] == [(8,)]
    choice = DraftChoice(index([1], session=[[5, 6, *range(20, 60)]]), DraftWorth(12), 16)
    best = choice.choose((5, 6), 13, drafter=False)
    assert best is not None
    before = choice.worth.of(best)
    choice.learn([5, 6, *best.tokens])
    assert choice.worth.of(best) > before, "forced ids are no part of what a draft is compared with"


def test_a_text_must_have_been_longer_than_the_drafters_blocks() -> None:
    text = [*range(20, 90)]
    choice = DraftChoice(index([1], session=[[1, *text]]), DraftWorth(6), 16)
    for at in (0, 6):
        assert choice.choose((), 15, drafter=True) is None
        choice.learn(text[at : at + 6])  # the drafter stops there; the text goes on
    best = choice.choose((), 15, drafter=True)
    assert best is not None
    assert best.tokens == tuple(text[12:27])


def test_a_block_that_was_cut_tells_nothing_of_the_drafter() -> None:
    choice = DraftChoice(index([1], session=[[1, *range(20, 90)]]), DraftWorth(12), 16)
    for forced, cap in (((), 3), ((7, 8), 0)):
        assert choice.choose(forced, 13, drafter=True, cap=cap) is None
        choice.learn([*forced, 99])
        assert (choice.worth.drafter, choice.worth.blocks) == (12, 0)
    choice.choose((), 15, drafter=True)
    choice.learn([99])
    assert choice.worth.drafter < 12
    draft = LookupDraft(tuple(range(15)), "session", 9, 9, "follow")
    choice.worth.edge = 0
    choice.worth.paired(draft, range(3), 3)
    assert choice.worth.edge == 0, "the text could not have been longer"
    choice.worth.paired(draft, range(3), 16)
    assert choice.worth.edge > 0


def test_a_place_is_kept_behind_one_token_that_differs() -> None:
    found = index([1, 2], drafts=[[1, 2, 3, 4, 5, 6, 7, 8]])
    [draft] = found.drafts((), 3)
    found.commit([3, 99], draft)
    [over] = found.drafts((), 3)
    assert (over.tokens, over.way, over.match) == ((5, 6, 7), "over", 3)
    assert found.drafts((96,), 3) == [], "an id is forced there that the text does not have"
    found.commit([], over)
    found.commit([5, 6], over)
    followed = found.drafts((), 3)
    assert {d.tokens for d in followed} == {(7, 8)}
    found.commit([98, 97], followed[0])
    assert found.drafts((), 3) == [], "two differ"


def test_memory_is_bounded(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    for name in ("GIVEN", "PROMPT", "OUTPUT"):
        monkeypatch.setattr(lookup, name, 8)
    found = index([*range(100)], [[*range(50)], [*range(100, 105)]], [[*range(200, 300)]])
    found.commit([*range(300, 400)], None)
    assert len(found) == 4 * 8 + 3
    for token in (101, 102):
        found.commit([token], None)
    [draft] = found.drafts((), 2)
    assert (draft.tokens, draft.match) == ((103, 104), 2), "what is not indexed is matched"
