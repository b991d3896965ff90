"""Chooses where the drafts of each block come from: a text that the answer repeats, or the drafter.

Forced ids come first in any block. Then a match in a text, if it is worth more than the drafter's
block: the drafter is skipped, but takes in the committed rows as always. All numbers that decide
are known to the host before the block: lengths of matches, and what earlier blocks committed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from thor_dflash.core.results import DraftSource
from thor_dflash.plugins.accept.record import STRICT
from thor_dflash.runtime.decoding.block import Block, DecodeProgress
from thor_dflash.runtime.decoding.lookup import (
    NO_TEXTS,
    LookupDraft,
    LookupIndex,
    LookupTexts,
    LookupWay,
)
from thor_dflash.runtime.decoding.model_runner import ModelRunner
from thor_dflash.runtime.decoding.proposers import Proposal, Proposer
from thor_dflash.runtime.engines.protocol import Call

HELD = 1 << 12
"""Most tokens of a reused prompt that are searched: its end. Indexing the prompt's other tokens
takes less time than reading them."""
NEWEST = 0.1
"""Weight of the newest block in the average of the drafter, once there were a few."""
BETTER, WORSE = 0.15, 0.5
"""Weight of the newest block in the average of a text, by whether it raises the average: a text
that goes wrong should be left at once."""
FIRST = 12.0
"""Tokens that a drafter's block is taken to commit before there was one."""
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

    drafter: float = FIRST
    """Tokens committed by a block of the drafter."""
    blocks: int = 0
    """Blocks of the drafter."""
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
class _Run:
    """One request under way."""

    index: LookupIndex
    worth: DraftWorth
    seen: int = 0
    """Committed tokens of which note was taken."""
    drafts: list[LookupDraft] = field(default_factory=list[LookupDraft])
    """The drafts of texts for the block under way, the best first."""
    drafter: bool = False
    """Whether the drafter drafted that block, in full width."""


class DraftChooser:
    """A proposer that takes drafts from texts or from another proposer."""

    def __init__(
        self, drafter: Proposer, prompt: Sequence[int], texts: LookupTexts = NO_TEXTS
    ) -> None:
        self.drafter = drafter
        self._prompt = prompt
        self._texts = texts
        self._index: Future[LookupIndex] | None = None
        self._run: _Run | None = None

    def begin(self, model: ModelRunner, rows: int) -> int:
        """See Proposer. The texts are indexed on another thread while the prompt is prefilled."""
        start = max(0, model.state.length - HELD)
        self._index = _builders.submit(LookupIndex, self._texts, self._prompt[start:])
        self._run = None
        return self.drafter.begin(model, rows)

    def propose(self, model: ModelRunner, progress: DecodeProgress, block: Block) -> Proposal:
        """See Proposer."""
        run = self._started()
        self._learn(run, progress)
        run.drafts, run.drafter = [], False
        free = model.block - 1 - len(block.forced)
        if free > 0 and block.relaxed.rule == STRICT:
            found = run.index.drafts(block.forced, free)
            run.drafts = sorted(found, key=run.worth.of, reverse=True)
        best = run.drafts[0] if run.drafts else None
        if best is None or (block.draft and run.worth.of(best) < run.worth.drafter):
            run.drafter = block.draft and block.cap == model.block and not block.forced
            return self.drafter.propose(model, progress, block)
        if block.draft:
            model.catch_up()
        model.write_tokens([progress.last, *block.forced, *best.tokens])
        return Proposal(len(block.forced) + len(best.tokens), source=best.source)

    def observe(self, model: ModelRunner, block: Block) -> Sequence[Call]:
        """See Proposer. The drafter takes in every block, also those that it did not draft."""
        return self.drafter.observe(model, block)

    def committed(self, model: ModelRunner, block: Block, count: int) -> None:
        """See Proposer."""
        self.drafter.committed(model, block, count)

    def _started(self) -> _Run:
        if self._run is None:
            assert self._index is not None
            self._run = _Run(self._index.result(), DraftWorth())
        return self._run

    def _learn(self, run: _Run, progress: DecodeProgress) -> None:
        """Take note of what the last block committed."""
        tokens = progress.tokens[run.seen :]
        if not tokens:
            return
        run.seen = len(progress.tokens)
        if run.drafter:
            run.worth.drafted(len(tokens))
        for draft in run.drafts:
            run.worth.compared(draft, tokens)
        run.index.commit(tokens, run.drafts[0] if run.drafts else None)
