"""Prefixes: named beginnings of prompts, read once and reused by every request that has them.

Invariant: a request that continues from a prefix gives bitwise the same answer as without it. So
its prefill steps must be the same as those of the full prefill. A prefix is therefore held up to
the last whole chunk before its last token: every later step begins where it would have begun. The
rest of the prefix, at most one chunk, is read again with the request, which takes at most one
extra step.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from thor_dflash.core.errors import RequestError
from thor_dflash.core.message_text import show
from thor_dflash.runtime.decoding.loop import check_owner
from thor_dflash.runtime.decoding.model_runner import ModelRunner
from thor_dflash.runtime.decoding.sequence_state import Snapshot
from thor_dflash.runtime.session.prefix_file import StoredPrefix, read_prefix, write_prefix

LONGEST_NAME = 64
"""Characters, as for every name in the wire protocol."""
BUDGET = 1 << 30
"""Default memory for prefixes, bytes: about four of 2000 tokens of the 27B with an FP8 cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefix:
    """A prefix and its stored state."""

    name: str
    tokens: tuple[int, ...]
    """As given to `put`; the first `held` of them need not be read again."""
    pinned: bool
    """Never evicted."""
    snapshot: Snapshot
    bytes: int
    """Memory of the snapshot."""
    build_ms: float

    @property
    def held(self) -> int:
        """Tokens in the snapshot: whole chunks, excluding the last token."""
        return self.snapshot.length

    def begins(self, prompt: Sequence[int]) -> bool:
        """Whether a request with this prompt can continue from here."""
        held = self.held
        return 0 < held < len(prompt) and tuple(prompt[:held]) == self.tokens[:held]


@dataclass(slots=True)
class PrefixCache:
    """The prefixes of one session. Call `put` and `load` only on the decoding thread."""

    model: ModelRunner
    budget: int = BUDGET
    """Memory for all of them, bytes."""
    _kept: OrderedDict[str, Prefix] = field(default_factory=OrderedDict[str, Prefix])
    """Least recently used first."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def put(
        self,
        name: str,
        tokens: Sequence[int],
        *,
        pinned: bool = True,
        stopped: Callable[[], bool] = lambda: False,
    ) -> Prefix | None:
        """Prefill `tokens` and keep the state under `name`, replacing any prefix of that name.

        This ends a request that is under way. `stopped` is called before every step; once it
        returns true, nothing is kept and None is returned.

        Raises:
            RequestError: a bad name, tokens that no prompt may begin with, or not enough memory.
            TransactionError: a request began meanwhile; nothing is kept.
        """
        tokens = tuple(tokens)
        self._check(name, tokens)
        held = cached_length(len(tokens), self.model.chunk)
        need = self.bytes_of(held)
        self._check_fits(name, need)
        start = time.perf_counter()
        snapshot = self._read(tokens[:held], stopped)
        if snapshot is None:
            return None
        return self._keep(StoredPrefix(name, tokens, pinned, held), snapshot, need, start)

    def list(self) -> tuple[Prefix, ...]:
        """All prefixes, least recently used first."""
        with self._lock:
            return tuple(self._kept.values())

    def drop(self, name: str) -> bool:
        """Remove a prefix; return whether it existed."""
        with self._lock:
            return self._kept.pop(name, None) is not None

    def find(self, prompt: Sequence[int]) -> Prefix | None:
        """The prefix that saves the most tokens of this prompt, if any."""
        found = [prefix for prefix in self.list() if prefix.begins(prompt)]
        return max(found, key=lambda prefix: prefix.held, default=None)

    def use(self, prompt: Sequence[int]) -> Snapshot | None:
        """The state to continue this prompt from, if any; marks its prefix as recently used."""
        prefix = self.find(prompt)
        if prefix is None:
            return None
        with self._lock:
            if prefix.name in self._kept:
                self._kept.move_to_end(prefix.name)
        return prefix.snapshot

    def bytes_of(self, held: int) -> int:
        """Memory of a snapshot of `held` tokens, bytes."""
        return sum(spec.nbytes({}) for spec in self.model.state.layout(held).values())

    def save(self, name: str, path: Path) -> Prefix:
        """Write a prefix to disk atomically and return it.

        Raises:
            RequestError: there is no prefix of that name, or the file cannot be written.
        """
        with self._lock:
            prefix = self._kept.get(name)
        if prefix is None:
            raise RequestError(f"prefix must be one that is kept (got {show(name)})")
        stored = StoredPrefix(
            name=name, tokens=prefix.tokens, pinned=prefix.pinned, held=prefix.held
        )
        write_prefix(path, self.model, stored, prefix.snapshot)
        return prefix

    def load(self, path: Path) -> Prefix:
        """Load a file that `save` wrote and keep the prefix under its old name.

        Raises:
            PackageError: the file is damaged, or of another package, version or capacity.
            RequestError: not enough memory.
        """
        start = time.perf_counter()
        stored, snapshot = read_prefix(path, self.model, self.budget)
        need = self.bytes_of(stored.held)
        self._check(stored.name, stored.tokens)
        self._check_fits(stored.name, need)
        return self._keep(stored, snapshot, need, start)

    def _check(self, name: str, tokens: Sequence[int]) -> None:
        if not 0 < len(name) <= LONGEST_NAME:
            raise RequestError(
                f"name of a prefix must be 1 to {LONGEST_NAME} characters (got {show(name)})"
            )
        limit, vocab = self.model.limit, self.model.manifest.target.vocab
        if not 0 < len(tokens) < limit:
            raise RequestError(
                f"prefix must be 1 to {limit - 1} tokens, so that an answer fits "
                f"(got {len(tokens)})"
            )
        for i, token in enumerate(tokens):
            if not 0 <= token < vocab:
                raise RequestError(f"prefix[{i}] must be 0 to {vocab - 1} (got {token})")

    def _check_fits(self, name: str, need: int) -> None:
        """Refuse a prefix that would not fit even if every evictable one were evicted."""
        fixed = sum(p.bytes for p in self.list() if p.pinned and p.name != name)
        if fixed + need > self.budget:
            raise RequestError(
                f"prefix must fit the memory for prefixes: {self.budget} bytes, of which pinned "
                f"ones take {fixed} (got {need} bytes)"
            )

    def _keep(self, stored: StoredPrefix, snapshot: Snapshot, need: int, start: float) -> Prefix:
        prefix = Prefix(
            name=stored.name,
            tokens=stored.tokens,
            pinned=stored.pinned,
            snapshot=snapshot,
            bytes=need,
            build_ms=1e3 * (time.perf_counter() - start),
        )
        with self._lock:
            self._kept.pop(prefix.name, None)
            over = sum(p.bytes for p in self._kept.values()) + prefix.bytes - self.budget
            for old in [p for p in self._kept.values() if not p.pinned]:
                if over > 0:
                    over -= self._kept.pop(old.name).bytes
            self._kept[prefix.name] = prefix
        return prefix

    def _read(self, tokens: tuple[int, ...], stopped: Callable[[], bool]) -> Snapshot | None:
        model, chunk = self.model, self.model.chunk
        with model.alone:
            model.state.reset()
            begun = model.state.begun
        for start in range(0, len(tokens), chunk):
            # Without the lock: it is the caller's code, and may wait for a thread that wants it.
            if stopped():
                return None
            with model.alone:
                check_owner(model, begun)
                # Fill the drafter's rings too: a later request may use the drafter.
                model.prefill(tokens[start : start + chunk], observe=True)
        with model.alone:
            check_owner(model, begun)
            return model.state.snapshot()


def cached_length(length: int, chunk: int) -> int:
    """Tokens of a prefix that are kept: whole chunks, without at least its last token.

    The last token of a prompt begins the first block, so a prompt that is all prefix needs it.
    """
    return max(0, length - 1) // chunk * chunk
