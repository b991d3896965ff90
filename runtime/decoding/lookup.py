"""Lookup drafts: what followed the newest tokens where they last occurred in a text at hand.

The texts are earlier answers of the session, texts given with the request, the prompt, and the
output so far. All lie in one suffix automaton, so a committed token costs constant time and a draft
of k tokens costs k.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from thor_dflash.core.results import DraftSource
from thor_dflash.runtime.decoding.suffix_automaton import NO_MATCH, SuffixAutomaton

LookupWay = Literal["follow", "jump", "over"]
"""How a draft goes on: the place in the text goes on from the last one, is another one, or is the
last one behind a token that differed."""

GIVEN = 1 << 14
"""Most tokens of earlier answers that are searched, and as many of texts given with the request."""
IMAGE = -(1 << 30)
"""Stands for every token of an image: no output has it, so nothing is found across it."""
PROMPT = 1 << 15
"""Most tokens of the prompt that are searched: its end."""
OUTPUT = 1 << 15
"""Most tokens of the output that are searched: its beginning."""
PART = 256
"""Tokens indexed before other threads may run: less than a millisecond."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LookupTexts:
    """Texts that an answer may repeat, besides its prompt; token ids, the oldest first."""

    session: tuple[tuple[int, ...], ...] = ()
    """Earlier answers of the session, each with the end of its prompt."""
    drafts: tuple[tuple[int, ...], ...] = ()
    """Given with the request, as the answer after the thinking may have them."""


NO_TEXTS = LookupTexts()


@dataclass(frozen=True, slots=True)
class LookupDraft:
    """A draft and the match that it continues."""

    tokens: tuple[int, ...]
    source: DraftSource
    match: int
    """Tokens before the draft that are equal in the text, but for those passed over."""
    at: int
    """Index of the first of them in the text."""
    way: LookupWay


class LookupIndex:
    """The texts of one request, searchable."""

    def __init__(self, texts: LookupTexts, prompt: Sequence[int]) -> None:
        """Index the texts and the prompt."""
        self._automaton = SuffixAutomaton()
        self._starts: list[int] = []
        self._sources: list[DraftSource] = []
        self._full = False
        """The output is longer than the part of it that is searched."""
        self._match = NO_MATCH
        """Its match, once it is."""
        self._next = -1
        """Where the output is followed: index of the token expected next; -1: nowhere."""
        self._run = 0
        """Tokens that were followed there."""
        self._way: LookupWay = "follow"
        for text in newest(texts.session, GIVEN):
            self._add("session", text)
        for text in newest(texts.drafts, GIVEN):
            self._add("drafts", text)
        self._add("prompt", [t if t >= 0 else IMAGE for t in prompt[-PROMPT:]])
        self._begin("output")
        self._limit = len(self._automaton) + OUTPUT

    def __len__(self) -> int:
        """Tokens that are searched, and one between two texts."""
        return len(self._automaton)

    def _begin(self, source: DraftSource) -> None:
        self._starts.append(len(self._automaton))
        self._sources.append(source)

    def _add(self, source: DraftSource, text: Sequence[int]) -> None:
        if self._starts:
            self._automaton.extend([-1 - len(self._starts)])
        self._begin(source)
        for at in range(0, len(text), PART):
            self._automaton.extend(text[at : at + PART])
            time.sleep(0)  # lets a thread that decodes take the interpreter's lock

    def commit(self, tokens: Sequence[int], followed: LookupDraft | None, forced: int = 0) -> None:
        """Append output. `followed`: the draft, for what comes after so many `forced` ids, whose
        place is kept.
        """
        self._next = -1
        if followed is not None:
            self._follow(tokens[forced:], followed)
        fits = max(0, self._limit - len(self))
        self._automaton.extend(tokens[:fits])
        if fits < len(tokens):
            before = self._match if self._full else self._automaton.match
            self._match = self._automaton.follow(before, tokens[fits:])
            self._full = True

    def _follow(self, tokens: Sequence[int], draft: LookupDraft) -> None:
        """Keep the place of a draft if at most one token differed."""
        text, at = self._automaton.text, draft.at
        there = text[at : at + len(tokens)]
        wrong = [i for i, (x, y) in enumerate(zip(tokens, there, strict=False)) if x != y]
        if len(there) == len(tokens) and len(wrong) <= 1:
            self._next, self._run = at + len(tokens), draft.match + len(tokens) - len(wrong)
            self._way = "over" if wrong else "follow"

    def drafts(self, forced: Sequence[int], count: int) -> list[LookupDraft]:
        """What may follow the output and then these ids, up to `count` tokens each: what followed
        the longest match, and what follows where the last draft was.
        """
        found = self._automaton
        match = self._match if self._full else found.match
        if forced:
            match, self._next = found.follow(match, forced), -1
        drafts: list[LookupDraft] = []
        while match.length and not drafts:
            at = found.end(match) + 1
            if at and (tokens := self._read(at, count, forced)):
                way: LookupWay = "follow" if at == self._next else "jump"
                drafts.append(LookupDraft(tokens, self._source(at), match.length, at, way))
            match = found.shorter(match)
        at = self._next
        if at >= 0 and drafts[:1] != [] and drafts[0].at == at:
            return drafts
        if at >= 0 and (tokens := self._read(at, count, forced)):
            drafts.append(LookupDraft(tokens, self._source(at), self._run, at, self._way))
        return drafts

    def _source(self, at: int) -> DraftSource:
        return self._sources[bisect_right(self._starts, at - 1) - 1]

    def _read(self, at: int, count: int, forced: Sequence[int]) -> tuple[int, ...]:
        """The tokens from `at` up to the end of their text. The output goes on with what is
        drafted: it may be periodic.
        """
        tokens = [*self._automaton.text[at : at + count]]
        end = next((i for i, token in enumerate(tokens) if token < 0), -1)
        if end >= 0:
            return tuple(tokens[:end])
        if len(tokens) < count:
            tokens += forced
        period = len(tokens)
        tokens += [tokens[i % period] for i in range(count - period)] if period else []
        return tuple(tokens[:count])


def newest(texts: Sequence[Sequence[int]], limit: int) -> list[Sequence[int]]:
    """The newest texts with at most `limit` tokens together; the oldest of them may lack its
    beginning."""
    kept: list[Sequence[int]] = []
    for text in reversed(texts):
        if limit <= 0:
            break
        kept.append(text[-limit:])
        limit -= len(text)
    return kept[::-1]
