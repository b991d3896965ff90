"""What policies decide about the next block, before and after the target verifies it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from thor_dflash.core.results import DraftSource
from thor_dflash.core.tensors import Array
from thor_dflash.plugins.accept.record import STRICT, Record
from thor_dflash.runtime.text.thinking import Marks, Thinking

DecodeFinish = Literal["", "stop", "length", "grammar_dead_end"]
"""Why a request is over; "" while it is running."""

BlockPhase = Literal["thinking", "closing", "answer"]
"""The part of the answer that the first row of a block belongs to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptRule:
    """Relaxed acceptance: which drafts are accepted although the target prefers another token."""

    rule: int = STRICT
    top_k: int = 1
    margin: float = 0.0
    close: int = -1
    """Rows from the first draft of this id on, that row included, are accepted strictly."""
    never: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens are drawn. The noise of a position depends on the seed alone, so that drafts,
    cancels and restored prefixes do not change a token (operator `sample`).
    """

    temperature: float
    """Positive."""
    top_k: int = 0
    """0: off."""
    top_p: float = 1.0
    """1: off."""
    min_p: float = 0.0
    """0: off."""
    seed: int
    """0 to 2^64 - 1."""
    rejection: bool = False
    """Whether drafts that were drawn are accepted by rejection sampling. Tokens then depend on
    drafts; their law does not."""

    @property
    def acceptance(self) -> Literal["coupled", "rejection"]:
        """How drafts are accepted, by the name of the option."""
        return "rejection" if self.rejection else "coupled"


@dataclass(frozen=True, slots=True)
class DraftTail:
    """What a text has behind the drafter's last draft, in a block wider than the drafter's."""

    ids: tuple[int, ...]
    source: DraftSource


NO_TAIL = DraftTail((), "output")


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a block is not full width, drafted and exact."""

    what: Literal["capped", "forced", "soft", "gated", "relaxed"]
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """The bounds of the next block. Policies narrow it one after another."""

    cap: int
    """Maximum rows to commit, 1..R."""
    phase: BlockPhase = "answer"
    forced: tuple[int, ...] = ()
    """Ids that must follow rows 0, 1, ...; at most R. A look may set -1: the model chooses."""
    soft: tuple[int, ...] = ()
    """Ids that rows 0, 1, ... choose if within soft_margin of the best; -1: none; at most R."""
    soft_margin: float = 0.0
    """In nats."""
    look: DraftInspection | None = None
    """Must see the drafts before they are verified: splits the step in two. Each waits, the
    first only if there are drafts."""
    mask: Callable[[], Array] | None = None
    """Returns int32 [R, ceil(vocab / 32)], a bit mask of the ids allowed after each row; None: all
    are allowed. Called once, while the verify runs."""
    draft: bool = True
    """Whether to run the drafter."""
    ends: tuple[int, ...] = ()
    """Ids besides the stop ids after which nothing more of the block is committed. They use stop
    slots. `relaxed` never accepts a draft of one of them."""
    drafted: int = 0
    """Tokens after the first that hold a draft or a forced id, 0..R - 1. Set by the loop."""
    relaxed: AcceptRule = AcceptRule()
    sampled: bool = False
    """Whether tokens are drawn, as the model was set up by `write_sampling`. Set by the loop."""
    rejection: bool = False
    """Whether proposers may draw drafts from distributions of their own. Set by the loop."""
    drawn: int = 0
    """The first tokens after row 0 that were drawn so: see Proposal. Set by the loop."""
    source: DraftSource = "drafter"
    """Where its drafts came from. Set by the loop."""
    tail: DraftTail = NO_TAIL
    """For the drafter. Set by a proposer that has texts."""
    reasons: tuple[Reason, ...] = ()

    def capped(self, cap: int, why: str) -> Block:
        """Commit no more than `cap` rows."""
        if cap >= self.cap:
            return self
        return replace(self, cap=cap, reasons=(*self.reasons, Reason("capped", why)))

    def forcing(self, ids: Sequence[int], why: str) -> Block:
        """Commit these ids after rows 0, 1, ..., whatever the target would choose."""
        reasons = (*self.reasons, Reason("forced", why))
        return replace(self, forced=tuple(ids), reasons=reasons)

    def undrafted(self, why: str) -> Block:
        """Do not run the drafter for this block."""
        return replace(self, draft=False, reasons=(*self.reasons, Reason("gated", why)))

    def because(self, before: Block, why: str) -> Block:
        """Add the reasons for what a look changed, compared with the block `before` it."""
        free = not any(token >= 0 for token in before.forced)
        forced = free and any(token >= 0 for token in self.forced)
        found = [Reason("forced", why)] * forced
        found += [Reason("capped", why)] * (self.cap < before.cap)
        return replace(self, reasons=(*self.reasons, *found))

    def holding(
        self, drafts: int, rows: int, drawn: int = 0, source: DraftSource = "drafter"
    ) -> Block:
        """Set `drafted`: `drafts` tokens, plus forced ids that continue directly after them; how
        many of the first were `drawn`; and their source.
        """
        held = drafts
        while held < len(self.forced) and self.forced[held] >= 0:
            held += 1
        return replace(self, drafted=min(held, rows - 1), drawn=drawn, source=source)


class DraftInspection(Protocol):
    """Narrows a block whose drafts are known: sets forced rows, cap and mask."""

    def __call__(self, tokens: tuple[int, ...], block: Block) -> Block:
        """`tokens` [R]: the last committed one and the drafts. A forced id replaces a draft."""
        ...


class DecodeProgress:
    """The progress of one request. Advanced by committed tokens only."""

    def __init__(self, prompt: Sequence[int], marks: Marks | None = None) -> None:
        self.prompt = tuple(prompt)
        self.marks = marks
        """The thinking marks of the vocabulary, if it has them."""
        self.tokens: list[int] = []
        """Tokens committed after the prompt, the stop token included."""
        self.thinking_tokens = 0
        """How many of `tokens` belong to the thinking block, its marks included."""
        self.called = False
        """The thinking ended with the beginning of a tool call."""
        self._thinking = Thinking(marks, self.prompt)

    @property
    def last(self) -> int:
        """The newest committed token."""
        return self.tokens[-1] if self.tokens else self.prompt[-1]

    @property
    def answer_tokens(self) -> int:
        """Tokens committed after the thinking, the stop token included."""
        return len(self.tokens) - self.thinking_tokens

    @property
    def thinking(self) -> bool:
        """Whether the next token belongs to the thinking block."""
        return self._thinking.inside

    def commit(self, tokens: Sequence[int]) -> bool:
        """Append the tokens of one block; return whether thinking ended in it."""
        ended = False
        for token in tokens:
            before = self._thinking.inside
            inside = self._thinking.feed(token)
            self.thinking_tokens += inside
            ended |= (before or inside) and not self._thinking.inside
            self.called |= before and not inside
        self.tokens.extend(tokens)
        return ended


class Policy:
    """Shapes blocks and judges their results; changes nothing by itself. Sees committed tokens,
    never touches state.
    """

    def shape(self, progress: DecodeProgress, block: Block) -> Block:
        """Narrow the next block."""
        return block

    def judge(self, progress: DecodeProgress, block: Block, record: Record) -> int:
        """Return the rows to commit, 0..record.count; 0 ends the request because no token is legal.
        `block` is the block as verified, after any inspection of its drafts.
        """
        return record.count

    def observe(self, progress: DecodeProgress, committed: int) -> None:
        """Take note of what was committed: the last `committed` of progress.tokens."""
