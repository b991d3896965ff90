"""Chooses where the drafts of each block come from: a text that the answer repeats, or the drafter.

Forced ids come first in any block. Then a match in a text, if it is worth more than the drafter's
block: the drafter is skipped, but takes in the committed rows as always. All numbers that decide
are known to the host before the block: lengths of matches, and what earlier blocks committed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace

from thor_dflash.core.results import DraftSource
from thor_dflash.plugins.accept.record import STRICT
from thor_dflash.runtime.decoding.block import NO_TAIL, Block, DecodeProgress, DraftTail
from thor_dflash.runtime.decoding.lookup import (
    NO_TEXTS,
    LookupDraft,
    LookupIndex,
    LookupTexts,
    LookupWay,
)
from thor_dflash.runtime.decoding.model_runner import ModelRunner
from thor_dflash.runtime.decoding.proposers import NoDrafter, Proposal, Proposer
from thor_dflash.runtime.engines.protocol import Call

HELD = 1 << 12
"""Most tokens of a reused prompt that are searched: its end. Indexing the prompt's other tokens
takes less time than reading them."""
NEWEST = 0.1
"""Weight of the newest block in the average of the drafter, once there were a few."""
BETTER, WORSE = 0.15, 0.5
"""Weight of the newest block in the average of a text, by whether it raises the average: a text
that goes wrong should be left at once."""
EDGE = 0.07
"""Share of the drafter's tokens by which a text must be longer to be used in its place."""
NEWER = 0.3
"""Weight of the newest block in the comparison of a text with the drafter."""
FIRST = 0.75
"""Share of its rows that a drafter's block is taken to commit before there was one."""
TRUST: Mapping[LookupWay, float] = {"follow": 0.85, "jump": 0.4, "over": 0.4}
"""Share of a text's drafts that is taken to be right before one was compared."""
REACH = 15
"""Tokens for which an earlier answer is expected to go on as matched. A prompt or the output itself
does so only behind a long match: a robot's plan repeats its frame, with other names in it."""
LONG = 64
"""Matched tokens behind which a prompt or the output is expected to go on for as many more; behind
half of them, for a quarter."""

_builders = ThreadPoolExecutor(1, thread_name_prefix="lookup")


@dataclass(slots=True)
class DraftWorth:
    """What drafts are worth: moving averages over the blocks of one request."""

    drafter: float
    """Tokens committed by a block of the drafter."""
    blocks: int = 0
    """Blocks of the drafter."""
    edge: float = 0.0
    """Tokens by which the best text would have been longer than the drafter's blocks: a text that
    is right where the drafter is, too, saves nothing."""
    right: dict[tuple[DraftSource, LookupWay], float] = field(
        default_factory=dict[tuple[DraftSource, LookupWay], float]
    )
    """Share of a text's drafts that was right."""

    def of(self, draft: LookupDraft) -> float:
        """Tokens that a block with this draft is expected to commit."""
        return 1 + self._share(draft) * _reach(draft)

    def drafted(self, count: int) -> None:
        """Note that a block of the drafter committed `count` tokens."""
        self.blocks += 1
        self.drafter += max(NEWEST, 1 / (self.blocks + 1)) * (count - self.drafter)

    def paired(self, draft: LookupDraft, tokens: Sequence[int], width: int) -> None:
        """Note what a text had where the drafter's block committed `tokens`, of up to `width`."""
        pairs = enumerate(zip(draft.tokens, tokens, strict=False))
        wrong = next((i for i, (x, y) in pairs if x != y), None)
        # Where the drafter stopped and the text goes on, the text is expected to go on for longer.
        text = max(self.of(draft), len(tokens)) if wrong is None else wrong + 1
        self.edge += NEWER * (min(text, width) - len(tokens) - self.edge)

    def compared(self, draft: LookupDraft, tokens: Sequence[int]) -> None:
        """Note what was committed where a text had this draft, whether or not it was used."""
        seen = max(1, min(len(tokens), int(_reach(draft))))
        pairs = enumerate(zip(draft.tokens, tokens, strict=False))
        right = next((i for i, (x, y) in pairs if x != y), seen)
        share, now = self._share(draft), min(1.0, right / seen)
        share += (BETTER if now > share else WORSE) * (now - share)
        self.right[draft.source, draft.way] = share

    def _share(self, draft: LookupDraft) -> float:
        return self.right.get((draft.source, draft.way), TRUST[draft.way])


def _reach(draft: LookupDraft) -> float:
    """Drafts that are right if the text goes on as long as such texts do."""
    expected = REACH if draft.source in ("drafts", "session") else draft.match**2 / LONG
    return min(len(draft.tokens), expected)


@dataclass(slots=True)
class DraftChoice:
    """The choices of one request."""

    index: LookupIndex
    worth: DraftWorth
    width: int
    """Rows of a block."""
    _drafts: list[LookupDraft] = field(default_factory=list[LookupDraft])
    """Of texts, for the block under way; the best first."""
    _forced: int = 0
    """Forced ids that come before them."""
    _cap: int = 0
    """Rows of it that may be committed if it is the drafter's, else 0."""

    def choose(
        self, forced: Sequence[int], count: int, *, drafter: bool, cap: int = 0
    ) -> LookupDraft | None:
        """The text's draft for the next block, of up to `count` tokens after the forced ids; None:
        it is the drafter's, if there is a `drafter`. At most `cap` rows are committed; 0: all.
        """
        found = self.index.drafts(forced, count) if count > 0 else []
        self._forced = len(forced)
        self._drafts = sorted(found, key=self.worth.of, reverse=True)
        best = self._drafts[0] if self._drafts else None
        worse = best is not None and self.worth.of(best) < self.worth.drafter
        if best is None or (drafter and (worse or self.worth.edge <= EDGE * self.worth.drafter)):
            self._cap = (cap or self.width) * drafter
            return None
        self._cap = 0
        return best

    def tail(self, drafts: int) -> DraftTail:
        """What the best text has behind so many drafts of the drafter, if these follow it."""
        if not self._drafts or self._forced > drafts:
            return NO_TAIL
        best = self._drafts[0]
        return DraftTail(best.tokens[drafts - self._forced :], best.source)

    def learn(self, tokens: Sequence[int]) -> None:
        """Take note of what that block committed."""
        drafted = tokens[self._forced :]
        if self._cap == self.width and not self._forced:
            self.worth.drafted(len(tokens))
        if self._cap and self._drafts and drafted:
            self.worth.paired(self._drafts[0], drafted, self._cap - self._forced)
        for draft in self._drafts if drafted else ():
            self.worth.compared(draft, drafted)
        self.index.commit(tokens, self._drafts[0] if self._drafts else None, self._forced)
        self._drafts, self._forced, self._cap = [], 0, 0


class DraftChooser:
    """A proposer that takes drafts from texts or from another proposer."""

    def __init__(
        self,
        drafter: Proposer,
        prompt: Sequence[int],
        texts: Callable[[], LookupTexts] = lambda: NO_TEXTS,
    ) -> None:
        """`texts` is called when the request begins: the one before it may have just ended."""
        self.drafter = drafter
        self._prompt = prompt
        self._texts = texts
        self._index: Future[LookupIndex] | None = None
        self._choice: DraftChoice | None = None
        self._seen = 0
        """Committed tokens that the choice learnt of."""

    def begin(self, model: ModelRunner, rows: int) -> int:
        """See Proposer. The texts are indexed on another thread while the prompt is prefilled."""
        start = max(0, model.state.length - HELD)
        self._index = _builders.submit(LookupIndex, self._texts(), self._prompt[start:])
        self._choice, self._seen = None, 0
        return self.drafter.begin(model, rows)

    def propose(self, model: ModelRunner, progress: DecodeProgress, block: Block) -> Proposal:
        """See Proposer."""
        if self._choice is None:
            assert self._index is not None
            self._choice = DraftChoice(
                self._index.result(), DraftWorth(FIRST * model.block), model.block
            )
        if tokens := progress.tokens[self._seen :]:
            self._choice.learn(tokens)
            self._seen = len(progress.tokens)
        # Relaxed acceptance takes near misses of the drafter, not of a text.
        count = model.block - 1 - len(block.forced) if block.relaxed.rule == STRICT else 0
        drafter = block.draft and not isinstance(self.drafter, NoDrafter)
        found = self._choice.choose(block.forced, count, drafter=drafter, cap=block.cap)
        if found is None:
            tail = self._choice.tail(model.drafts)
            return self.drafter.propose(model, progress, replace(block, tail=tail))
        model.write_tokens([progress.last, *block.forced, *found.tokens])
        return Proposal(len(block.forced) + len(found.tokens), source=found.source)

    def observe(self, model: ModelRunner, block: Block) -> Sequence[Call]:
        """See Proposer. The drafter takes in every block, also those that it did not draft."""
        return self.drafter.observe(model, block)

    def committed(self, model: ModelRunner, block: Block, count: int) -> None:
        """See Proposer."""
        self.drafter.committed(model, block, count)
