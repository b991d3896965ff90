"""Answers of a package to training tasks, to count what it writes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from thor_dflash.calib import plan_requests
from thor_dflash.calib.draft_vocab.selection import AnswerTokens
from thor_dflash.calib.planbench import FAMILIES, sample
from thor_dflash.calib.planbench.task import Split
from thor_dflash.core.errors import RequestError
from thor_dflash.core.progress import Progress
from thor_dflash.runtime.decoding.telemetry import BlockDrafts
from thor_dflash.runtime.session import Session

UNSEEN = 3
"""One round of the families of so many is of held-out tasks, whose nouns no other task has."""
LONGEST = 2048
"""Longest answer, tokens."""


@dataclass(frozen=True, slots=True)
class Rollouts:
    """What a package wrote, and how fast."""

    answers: list[AnswerTokens]
    accept_length: float
    """Committed tokens a cycle."""


def roll_out(session: Session, count: int, progress: Progress) -> Rollouts:
    """Answer tasks greedily; of every two of a family one thinks.

    Raises:
        RequestError: the package has no tokenizer, no chat template or no drafter.
    """
    if session.manifest.drafter is None:
        raise RequestError("--package must have a drafter (got one without)")
    end = plan_requests.tokenizer_of(session).end_think
    made: list[AnswerTokens] = []
    committed = cycles = 0.0
    with progress.task("answering", count, "tasks") as bar:
        for i in range(count):
            # A robot meets names that nobody counted, and so do the held-out tasks.
            unseen = i // len(FAMILIES) % UNSEEN == UNSEEN - 1
            split: Split = "heldout" if unseen else "train"
            task = sample(FAMILIES[i % len(FAMILIES)], f"rollout{i}", split)
            thinking = i // len(FAMILIES) // UNSEEN % 2 == 0
            request = plan_requests.request_of(session, task, thinking=thinking, most=LONGEST)
            tokens = plan_requests.tokens_of(session.generate(request))
            report = session.report()
            spec = report.spec
            committed += spec.cycles * spec.accept_len
            cycles += spec.cycles
            thought = tokens.index(end) + 1 if end is not None and end in tokens else 0
            wrong = tuple(refused(report.drafts, len(tokens)))
            made.append(AnswerTokens("plan", tokens, thought, wrong, unseen))
            bar.advance(1)
    return Rollouts(made, committed / max(1.0, cycles))


def refused(blocks: Sequence[BlockDrafts], count: int) -> Iterator[int]:
    """Yield the indices, in an answer of `count` tokens, of those that were drafted otherwise."""
    begin = 0
    for block in blocks:
        at = begin + block.accepted
        if block.accepted < block.drafted and at < count:
            yield at
        begin = at + 1
