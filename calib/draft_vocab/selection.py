"""Which ids: those that must be there, then the frequent ones, then the lowest.

Source of the order: EAGLE-3's vocabulary mapping; of a fixed list for a drafter that was not
trained with it: FR-Spec (arXiv 2502.14856).
"""

from __future__ import annotations

import hashlib
import json
import string
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from thor_dflash.calib.planbench import FAMILIES, sample
from thor_dflash.config.build import CLOSING_MESSAGE
from thor_dflash.core.errors import RequestError
from thor_dflash.core.strict_records import as_list, as_table
from thor_dflash.package.tokenizer_files import added_tokens, addressed_ids, stop_tokens
from thor_dflash.runtime.text.tokenizer import END_THINK, THINK, TOOL_MARKS, Tokenizer

PLANS = 600
"""Plans of training tasks whose tokens are all in the list."""
INDENTS = (None, 0, 2, 4)
"""Layouts of a plan's JSON: a compact one, and with this indent."""
PUNCTUATION = 3
"""Longest run of punctuation that must be in the list if it is one token."""
HELD = 10
"""One document of so many is not counted: coverage is measured on it."""
WRITTEN = (THINK, END_THINK, *TOOL_MARKS, "<|im_start|>", "<|im_end|>")
"""Added tokens that a template or a model writes in an answer."""
THINKING = "thinking"


@dataclass(frozen=True, slots=True)
class AnswerTokens:
    """What a model has written, or would: one answer."""

    label: str
    """Class of text: plan, ..."""
    tokens: tuple[int, ...]
    thought: int = 0
    """How many of the first tokens are thinking, a class of its own."""
    refused: tuple[int, ...] = ()
    """Indices of tokens in place of which the drafter, with all ids, has another."""
    unseen: bool = False
    """Whether it has names that no counted answer has: only coverage is measured on it."""

    @property
    def held(self) -> bool:
        """Whether it is left out of the counts."""
        if self.unseen:
            return True
        digest = hashlib.sha256(repr(self.tokens).encode()).digest()
        return digest[0] % HELD == 0


@dataclass(frozen=True, slots=True)
class Coverage:
    """Tokens of held-out answers, and how many a list holds."""

    tokens: int
    covered: int

    @property
    def share(self) -> float:
        """From 0 to 1."""
        return self.covered / self.tokens


@dataclass(slots=True)
class Candidates:
    """The ids of a vocabulary in the order in which a list takes them."""

    forced: frozenset[int]
    ids: tuple[int, ...]
    """All that may be in a list, the forced ones first."""
    held: list[AnswerTokens] = field(default_factory=list[AnswerTokens])

    def list_of(self, size: int) -> list[int]:
        """The list of this size, ascending.

        Raises:
            RequestError: it is odd, holds not all that must be there, or there are not so many ids.
        """
        least, most = len(self.forced), len(self.ids)
        if size % 2 or not least <= size <= most:
            raise RequestError(
                f"--size must be an even number from {least}, what must be there, to {most} "
                f"(got {size})"
            )
        return sorted(self.ids[:size])

    def coverage(self, size: int) -> dict[str, Coverage]:
        """Coverage of the held-out answers by class, and of `all`."""
        kept = set(self.ids[:size])
        found: dict[str, list[int]] = {"all": [0, 0]}
        for answer in self.held:
            parts = {
                THINKING: answer.tokens[: answer.thought],
                answer.label: answer.tokens[answer.thought :],
                "all": answer.tokens,
            }
            for label, tokens in parts.items():
                if tokens:
                    row = found.setdefault(label, [0, 0])
                    row[0] += len(tokens)
                    row[1] += sum(token in kept for token in tokens)
        return {label: Coverage(*row) for label, row in found.items()}


def candidates(
    directory: Path, answers: Sequence[AnswerTokens], schemas: Sequence[dict[str, Any]] = ()
) -> Candidates:
    """Order the ids of a target's tokenizer by what its answers hold.

    Raises:
        RequestError: there are too few answers.
        PackageError, CheckpointError: the tokenizer cannot be read.
    """
    text = Tokenizer.load(directory)
    counted = [answer for answer in answers if answer.tokens and not answer.held]
    held = [answer for answer in answers if answer.tokens and answer.held]
    if not counted or not held:
        raise RequestError(
            f"draft-vocab must have answers to count, and others to measure coverage on, about "
            f"one in {HELD} (got {len(counted)} and {len(held)})"
        )
    counts = Counter(token for answer in counted for token in answer.tokens)
    added = {token.id for token in added_tokens(directory)}
    known = range(addressed_ids(directory))
    forced = frozenset(i for i in _forced(directory, text, schemas) if i in known)
    by_count = sorted(counts, key=lambda i: (-counts[i], i))
    # Added tokens that no answer has are marks of images, sounds and the like.
    rest = (i for i in known if i not in added)
    order = dict.fromkeys((*sorted(forced), *by_count, *rest))
    return Candidates(forced, tuple(order), held)


def _forced(directory: Path, text: Tokenizer, schemas: Sequence[dict[str, Any]]) -> set[int]:
    """What a list must have: otherwise some answers could never be drafted."""
    made = set(stop_tokens(directory))
    made |= {token.id for token in added_tokens(directory) if token.content in WRITTEN}
    marks = set(string.punctuation.encode())
    for i in range(addressed_ids(directory)):
        word = text.bytes_of(i)
        if len(word) == 1 or (len(word) <= PUNCTUATION and word and marks.issuperset(word)):
            made.add(i)
    for literal in (CLOSING_MESSAGE, *_plans(), *_literals(schemas)):
        made.update(text.encode(literal))
    return made


def _plans() -> Iterator[str]:
    for i in range(PLANS):
        task = sample(FAMILIES[i % len(FAMILIES)], f"vocabulary{i}", "train")
        plan = json.loads(task.plan)
        yield task.plan
        yield json.dumps(plan, indent=INDENTS[i % len(INDENTS)])


def _literals(value: object) -> Iterator[str]:
    """The strings of schemas, as an answer has them: keys, and values of enumerations."""
    for item in as_list(value) or (as_table(value) or {}).values():
        yield from _literals(item)
    for key in as_table(value) or {}:
        yield json.dumps(key)
    if isinstance(value, str):
        yield json.dumps(value)
