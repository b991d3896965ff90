"""Tokens, times and speculation of one request, as they are reported everywhere: by a session, on
the command line, in a profile and on the wire.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

DraftSource = Literal["drafter", "drafts", "session", "prompt", "output"]
"""Where a draft comes from: the package's drafter, or a text: given with the request, an earlier
answer of the session, the prompt, or the output so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens of one request."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens taken from a prefix instead of being computed."""
    thinking_tokens: int = 0
    """Tokens of the thinking block, its marks included."""
    output_tokens: int = 0
    """Tokens of the answer: without the thinking and without a stop token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Times of one request, ms. ttft_ms, ttfa_ms and e2e_ms count from its arrival."""

    queue_ms: float = 0.0
    prefill_ms: float = 0.0
    ttft_ms: float = 0.0
    """Time to the first committed token."""
    ttfa_ms: float | None = None
    """Time to the first token of the answer, after the thinking."""
    decode_ms: float = 0.0
    """From the end of the prefill to the end of the request."""
    e2e_ms: float = 0.0
    tok_s: float = 0.0
    """Tokens per second of decoding, thinking included, excluding the first token and the prefill.
    """
    grammar_ms: float = 0.0
    """Time to compile the schema; 0 if it was cached."""
    energy_j: Mapping[str, float] | None = None
    """Joules per power rail of the board from the start of the run to its end, including the idle
    draw of the board; None if the machine has no readable power sensors."""


@dataclass(frozen=True, slots=True)
class DraftCounts:
    """Drafts of one source."""

    blocks: int = 0
    drafted: int = 0
    """Tokens; without forced ids."""
    accepted: int = 0
    """Of them, those that were committed."""

    def plus(self, other: DraftCounts) -> DraftCounts:
        """The sum of both."""
        return DraftCounts(
            self.blocks + other.blocks,
            self.drafted + other.drafted,
            self.accepted + other.accepted,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """Statistics of one request's speculative decoding. R: rows of a block."""

    cycles: int = 0
    """Verify steps."""
    drafted: int = 0
    """Tokens drafted."""
    accepted: int = 0
    """Drafted tokens that were committed."""
    accept_len: float = 0.0
    """Committed tokens per cycle, including the target's own one."""
    forced: int = 0
    """Committed tokens that a grammar or a budget forced."""
    accept_hist: tuple[int, ...] = ()
    """[R] number of cycles that committed 1, 2, ... R tokens."""
    accepted_per_position: tuple[int, ...] = ()
    """[R - 1] how often the draft at this position was committed."""
    sources: Mapping[DraftSource, DraftCounts] = field(
        default_factory=dict[DraftSource, DraftCounts]
    )
    """Where the drafts came from."""


def rate(tokens: int, decode_ms: float) -> float:
    """`tok_s` of `tokens` that took `decode_ms` after the prefill."""
    return 1e3 * max(0, tokens - 1) / decode_ms if decode_ms else 0.0
