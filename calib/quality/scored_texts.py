"""The texts on which both packages are compared: the reference's own answers, and given texts."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from thor_dflash.calib import plan_requests
from thor_dflash.calib.planbench import FAMILIES, Task, heldout, judge
from thor_dflash.config.quality import QualityConfig
from thor_dflash.core.errors import RequestError
from thor_dflash.core.progress import Progress
from thor_dflash.runtime.session import Session

THINKING, PLAN, TEXT = "thinking", "plan", "text"
"""Classes of tokens; `text` for those of a document without a class."""
PROSE = Path(__file__).parents[1] / "data" / "prose.txt"
"""English that comes with the program; its source is in calib/data/__init__.py."""
LEAST = 16
"""Fewest scored tokens of the last part of a document in several; a shorter one is left out."""


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive tokens of one class that are scored."""

    label: str
    begin: int
    """Index of the first token, at least 1."""
    end: int


@dataclass(frozen=True, slots=True)
class ScoredText:
    """Tokens that both packages read."""

    name: str
    tokens: tuple[int, ...]
    spans: tuple[Span, ...]
    """Adjacent, up to the last token."""
    own: bool = False
    """Whether the reference wrote it: an answer to a task."""

    @property
    def begin(self) -> int:
        """Index of the first scored token."""
        return self.spans[0].begin


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOutcome:
    """A package's own answer to one task."""

    task: str
    tokens: int
    committed: float
    """Tokens that the cycles committed."""
    cycles: int
    valid: bool
    reason: str = ""
    """Why not."""


@dataclass(frozen=True, slots=True)
class PlanAnswer:
    """An answer with its tokens."""

    outcome: PlanOutcome
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]


def answer_tasks(
    session: Session, config: QualityConfig, label: str, progress: Progress
) -> list[PlanAnswer]:
    """Answer the held-out planning tasks, greedily; of every two of a family one thinks.

    Raises:
        RequestError: the package has no tokenizer or no chat template, or a prompt does not fit.
    """
    made: list[PlanAnswer] = []
    with progress.task(f"{label}: planning", config.tasks, "tasks") as bar:
        for i, task in enumerate(heldout(config.tasks)):
            made.append(_answer(session, task, i // len(FAMILIES) % 2 == 0, config))
            bar.advance(1)
    return made


def _answer(session: Session, task: Task, thinking: bool, config: QualityConfig) -> PlanAnswer:
    request = plan_requests.request_of(session, task, thinking=thinking, most=config.max_tokens)
    tokens = plan_requests.tokens_of(session.generate(request))
    spec = session.report().spec
    verdict = judge(task, plan_requests.answer_of(session, request.prompt, tokens))
    outcome = PlanOutcome(
        task=f"{task.name}, thinking {'on' if thinking else 'off'}",
        tokens=len(tokens),
        committed=spec.cycles * spec.accept_len,
        cycles=spec.cycles,
        valid=verdict.valid,
        reason=verdict.reason,
    )
    return PlanAnswer(outcome, request.prompt, tokens)


def text_of_answer(answer: PlanAnswer, end_think: int | None) -> ScoredText:
    """The answer with its prompt, of which only the answer is scored."""
    tokens = (*answer.prompt, *answer.tokens)
    begin, end = len(answer.prompt), len(tokens)
    split = begin
    if end_think in answer.tokens:
        split += answer.tokens.index(end_think) + 1
    spans = (Span(THINKING, begin, split), Span(PLAN, split, end))
    kept = tuple(span for span in spans if span.begin < span.end)
    return ScoredText(answer.outcome.task, tokens, kept, own=True)


def parts_of_text(
    name: str, label: str, tokens: Sequence[int], config: QualityConfig, limit: int
) -> list[ScoredText]:
    """A document as texts of at most `quality.window` tokens, and at most the context `limit`.

    Raises:
        RequestError: it is so short that nothing is scored.
    """
    window = min(config.window, limit)
    begin = max(1, config.skip)
    if len(tokens) <= begin:
        raise RequestError(
            f"{name} must have more than {begin} tokens, the first quality.skip of which are not "
            f"scored (got {len(tokens)})"
        )
    made: list[ScoredText] = []
    for at in range(0, len(tokens), window):
        part = tuple(tokens[at : at + window])
        if at == 0 or len(part) >= begin + LEAST:
            where = name if len(tokens) <= window else f"{name}, from token {at}"
            made.append(ScoredText(where, part, (Span(label or TEXT, begin, len(part)),)))
    return made


def sha256(texts: Sequence[ScoredText]) -> str:
    """Of the token ids and of what is scored."""
    digest = hashlib.sha256()
    for text in texts:
        spans = [(span.label, span.begin, span.end) for span in text.spans]
        digest.update(repr((len(text.tokens), spans)).encode())
        digest.update(np.array(text.tokens, "<i4").tobytes())
    return digest.hexdigest()
