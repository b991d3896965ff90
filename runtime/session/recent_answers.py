"""The last answers of each session, in which the drafts of its next answer are searched."""

from __future__ import annotations

import threading
import time
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

TOKENS = 1 << 18
"""Most tokens kept, of all sessions together: 2 MiB."""
BEFORE = 8
"""Tokens of the prompt's end that are kept with an answer: where the next one begins, too."""


@dataclass(slots=True)
class RecentAnswers:
    """Answers as token ids, by session. The least recently used session is forgotten first.
    Thread-safe.
    """

    each: int = 4
    """Answers kept of a session; 0: none."""
    clock: Callable[[], float] = time.monotonic
    _tokens: int = 0
    _kept: OrderedDict[str, deque[array[int]]] = field(
        default_factory=OrderedDict[str, "deque[array[int]]"]
    )
    _used: dict[str, float] = field(default_factory=dict[str, float])
    """When a session's answers were last kept or searched, s."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def of(self, session: str) -> tuple[tuple[int, ...], ...]:
        """The answers of a session, the oldest first."""
        with self._lock:
            found = self._kept.get(session)
            if found is None:
                return ()
            self._touch(session)
            return tuple(tuple(one) for one in found)

    def drop(self, session: str) -> None:
        """Forget a session."""
        with self._lock:
            self._forget(session)

    def expire(self, idle_s: float) -> float | None:
        """Forget the sessions of which no request has used answers for so long. Return in how many
        seconds the next one is due, if any."""
        now = self.clock()
        with self._lock:
            for session in [name for name, used in self._used.items() if now - used >= idle_s]:
                self._forget(session)
            return min(self._used.values()) + idle_s - now if self._used else None

    def _touch(self, session: str) -> None:
        self._kept.move_to_end(session)
        self._used[session] = self.clock()

    def _forget(self, session: str) -> None:
        self._tokens -= sum(map(len, self._kept.pop(session, ())))
        self._used.pop(session, None)

    def keep(self, session: str, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """Keep an answer, also a part of one."""
        # Tokens of an image are negative, and no output has them.
        one = array("i", (*(token for token in prompt[-BEFORE:] if token >= 0), *answer))
        if not (self.each and answer) or len(one) > TOKENS:
            return
        with self._lock:
            kept = self._kept.setdefault(session, deque())
            self._touch(session)
            kept.append(one)
            self._tokens += len(one)
            if len(kept) > self.each:
                self._tokens -= len(kept.popleft())
            while self._tokens > TOKENS:
                name, oldest = next(iter(self._kept.items()))
                self._tokens -= len(oldest.popleft())
                if not oldest:
                    self._forget(name)
