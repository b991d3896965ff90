"""A grammar as a policy: the answer after the thinking obeys a JSON schema, or its tool calls obey
their frame.

Invariant: a row's mask and forced id depend only on the committed tokens before it, and a forced id
is the only id that its mask would allow. So constrained output is the target's own choice among
legal ids, token by token, with any drafter or none.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from llguidance import LLMatcher

from thor_dflash.core.errors import RequestError
from thor_dflash.core.tensors import Array
from thor_dflash.plugins.accept.record import Record
from thor_dflash.runtime.decoding.block import Block, DecodeProgress, Policy
from thor_dflash.runtime.grammar.compiler import Grammar, Vocabulary

FREE = -1
"""No id is forced after this row."""


@dataclass(frozen=True, slots=True)
class Place:
    """The part of the output that comes next."""

    thinking: bool
    lead: tuple[int, ...] = ()
    """Ids still to come between the thinking and the answer."""
    opening: int = -1
    """Id with which the grammar begins wherever it comes, also in the thinking; -1: none."""
    text: bool = False
    """Any text may come before the opening."""

    @property
    def inside(self) -> bool:
        """Whether the next token is where the grammar applies."""
        return not (self.thinking or self.lead or self.text)

    def after(self, token: int, vocabulary: Vocabulary) -> Place:
        """The place after `token`, where `token` comes before the grammar."""
        if token == self.opening:
            return replace(self, thinking=False, lead=(), text=False)
        if self.thinking:
            if token != vocabulary.end_think:
                return self
            return replace(self, thinking=False, lead=() if self.text else vocabulary.lead)
        if self.text:
            return self
        # A budget's closing message may have other line breaks than the lead; they end it.
        return replace(self, lead=self.lead[1:] if token == self.lead[0] else ())


def leads(ids: Sequence[int], vocabulary: Vocabulary) -> bool:
    """Whether the answer begins after these ids, which follow the thinking, and not among them."""
    place = Place(thinking=False, lead=vocabulary.lead)
    for token in ids:
        if place.inside:
            return False
        place = place.after(token, vocabulary)
    return True


@dataclass(slots=True)
class Walk:
    """Steps a block of drafts through the grammar, row by row, with its own copy of the matcher."""

    grammar: Grammar
    matcher: LLMatcher
    place: Place
    force: bool
    forced: list[int] = field(default_factory=list[int])
    """The id that must follow each row, or FREE."""
    taken: list[int] = field(default_factory=list[int])
    """Legal tokens since the answer began."""
    start: int = -1
    """First row of the answer; -1: none."""
    masks: Array | None = None
    opened: bool = False
    """The opening is among the block's tokens."""

    @property
    def vocabulary(self) -> Vocabulary:
        """The grammar's vocabulary."""
        return self.grammar.vocabulary

    def row(self, given: int) -> int:
        """The id that must follow the next row: `given` by another policy, else the grammar's."""
        if self.place.inside and self.start < 0:
            self.start = len(self.forced)
        self.forced.append(self._only() if given == FREE else given)
        return self.forced[-1]

    def step(self, token: int) -> bool:
        """Advance over the token after the row. False: it is illegal there, or ends the request."""
        if not self.place.inside:
            self.opened = token == self.place.opening
            if self.opened:
                self.matcher = self.grammar.begin(opened=True)
            self.place = self.place.after(token, self.vocabulary)
            return True
        if token in self.vocabulary.stop or not 0 <= token < self.vocabulary.size:
            return False
        legal = self.matcher.try_consume_tokens([token]) == 1
        self.taken += [token] * legal
        return legal

    def make_masks(self, rows: int) -> Array:
        """int32 [rows, W] bit masks: all ids in rows before the answer, then the legal ones."""
        masks = np.full((rows, self.vocabulary.words), -1, np.int32)
        if self.matcher.rollback(len(self.taken)):
            self.vocabulary.masks(self.matcher, self.taken, masks[self.start :])
        if self.matcher.is_error():
            # The matcher has hit one of its limits, so the masks it made may be incomplete.
            masks[self.start :] = 0
        self.masks = masks
        return masks

    def again(self, grammar: Grammar, matcher: LLMatcher, rows: int) -> Array:
        """Make the masks again with another matcher, which is at the beginning of the block."""
        self.matcher = grammar.begin(opened=True) if self.opened else matcher
        matcher.try_consume_tokens(self.taken)
        return self.make_masks(rows)

    def dead(self, row: int) -> bool:
        """Whether no id is legal after a row."""
        if self.masks is None or row < self.start or self.forced[row] != FREE:
            return False
        return not self.masks[row].any()

    def _only(self) -> int:
        if self.place.lead:
            return self.place.lead[0]
        if self.place.thinking or not self.force:
            return FREE
        ahead = self.matcher.compute_ff_tokens()
        # A matcher that has failed offers the stop id.
        return ahead[0] if ahead and not self.matcher.is_error() else FREE


@dataclass(slots=True)
class Constrain(Policy):
    """The grammar policy of one request. See Policy in runtime/decoding/block.py."""

    grammar: Grammar
    place: Place
    force: bool = True
    """Replace drafts by ids that the grammar forces; else use masks alone. Same output."""
    seconds: float = 0.0
    """Time spent on walks and masks."""
    _matcher: LLMatcher = field(init=False)
    _answered: list[int] = field(default_factory=list[int])
    """Tokens that the matcher has consumed since it began."""
    _opened: bool = False
    """It began after the opening."""
    _walk: Walk | None = None
    """The walk over the last block."""

    def __post_init__(self) -> None:
        self._matcher = self.grammar.begin()

    def shape(self, progress: DecodeProgress, block: Block) -> Block:
        """Ask to see the drafts."""
        return replace(block, look=self.look)

    def judge(self, progress: DecodeProgress, block: Block, record: Record) -> int:
        """Commit only the rows before one that nothing may follow. The next block begins with that
        row, commits none, and so ends the request.
        """
        dead = record.fault >= 0 and self._walk is not None and self._walk.dead(record.fault)
        return record.fault if dead else record.count

    def observe(self, progress: DecodeProgress, committed: int) -> None:
        """Follow the committed tokens."""
        self.follow(progress.tokens[len(progress.tokens) - committed :])

    def follow(self, tokens: Sequence[int]) -> None:
        """Advance place and matcher over these tokens."""
        vocabulary = self.grammar.vocabulary
        for token in tokens:
            if not self.place.inside:
                if token == self.place.opening:
                    self._matcher, self._opened = self.grammar.begin(opened=True), True
                self.place = self.place.after(token, vocabulary)
            elif token not in vocabulary.stop:
                self._answered.append(token)
                self._matcher.consume_token(token)

    def look(self, tokens: tuple[int, ...], block: Block) -> Block:
        """See Look. Masks are made later, while the verify runs."""
        begin = time.perf_counter()
        walk = Walk(self.grammar, self._matcher.deep_copy(), self.place, self.force)
        self._walk, rows = walk, len(tokens)
        given = (*block.forced, *[FREE] * (rows - len(block.forced)))
        cap = rows
        for row in range(rows):
            must = walk.row(given[row])
            if row < rows - 1 and not walk.step(tokens[row + 1] if must == FREE else must):
                cap = row + 1
                break
        self.seconds += time.perf_counter() - begin
        seen = replace(block, forced=tuple(walk.forced), cap=min(block.cap, cap))
        return seen if walk.start < 0 else replace(seen, mask=lambda: self._masks(walk, rows))

    def _masks(self, walk: Walk, rows: int) -> Array:
        begin = time.perf_counter()
        masks = walk.make_masks(rows)
        if walk.matcher.is_error():
            self._renew()
            masks = walk.again(self.grammar, self._matcher.deep_copy(), rows)
        if walk.matcher.is_error():
            self.grammar.spent.set()
        self.seconds += time.perf_counter() - begin
        return masks

    def _renew(self) -> None:
        """Continue with a newly compiled grammar. Matchers of one grammar share what they compute,
        and some limits count all of it; other requests' computations must not end this request.
        """
        self.grammar.spent.set()
        try:
            self.grammar = self.grammar.anew()
        except RequestError:
            return  # compiling takes too long now; the old matcher's limit makes this a dead end
        self._matcher = self.grammar.begin(opened=self._opened)
        self._matcher.try_consume_tokens(self._answered)


@dataclass(frozen=True, slots=True)
class ForbidToken(Policy):
    """One id is never chosen: the opening of a tool call, if no tool may be called."""

    token: int
    rows: int
    """Of a block."""
    vocabulary: int
    """Ids."""

    def shape(self, progress: DecodeProgress, block: Block) -> Block:
        """Mask the id in every row."""
        return replace(block, mask=self._masks)

    def _masks(self) -> Array:
        bits = np.full((self.rows, -(-self.vocabulary // 32)), -1, np.int32).view(np.uint32)
        bits[:, self.token // 32] &= np.uint32(~(1 << self.token % 32) & 0xFFFFFFFF)
        return bits.view(np.int32)
