"""Prefixes: named beginnings of prompts, read once and continued from by every request.

Law: a request that continues from a prefix gives the bits it gives without it. Its prefill steps
must then be the very steps of the full prefill, so a prefix is held up to the last whole chunk
before its last token: every later step begins where it would have begun. The rest of the prefix,
at most one chunk, is read again with the request, in a step the request needs anyway or in one
more.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from thor_dflash.errors import RequestError
from thor_dflash.runtime.model import Model
from thor_dflash.runtime.prefix_file import Stored, read_prefix, write_prefix
from thor_dflash.runtime.state import Snapshot

LONGEST_NAME = 64
"""Characters, as of every name on the wire."""
BUDGET = 1 << 30
"""Memory where nobody says, bytes: about four of 2000 tokens of the 27B with an FP8 cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefix:
    """What is held under a name."""

    name: str
    tokens: tuple[int, ...]
    """As they were put; `held` of them need not be read again."""
    pinned: bool
    """Never evicted."""
    snapshot: Snapshot
    bytes: int
    """Of the snapshot, in memory."""
    build_ms: float

    @property
    def held(self) -> int:
        """Tokens in the snapshot: whole chunks, and not the last token."""
        return self.snapshot.length

    def begins(self, prompt: Sequence[int]) -> bool:
        """Whether a request with this prompt can continue from here."""
        held = self.held
        return 0 < held < len(prompt) and tuple(prompt[:held]) == self.tokens[:held]


@dataclass(slots=True)
class Prefixes:
    """The prefixes of one session. `put` and `load` belong to the thread that decodes."""

    model: Model
    budget: int = BUDGET
    """Memory for all of them, bytes."""
    _kept: OrderedDict[str, Prefix] = field(default_factory=OrderedDict[str, Prefix])
    """The least recently used first."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def put(
        self,
        name: str,
        tokens: Sequence[int],
        *,
        pinned: bool = True,
        stopped: Callable[[], bool] = lambda: False,
    ) -> Prefix | None:
        """Read `tokens` and keep the state under `name`, in place of what was there.

        Ends a request that is under way. `stopped` is asked before every step; once it says so,
        nothing is kept and None returned.

        Raises:
            RequestError: a bad name, tokens that no prompt may begin with, or no room.
        """
        tokens = tuple(tokens)
        self._check(name, tokens)
        held = held_of(len(tokens), self.model.chunk)
        need = self.bytes_of(held)
        self._room(name, need)
        start = time.perf_counter()
        snapshot = self._read(tokens[:held], stopped)
        if snapshot is None:
            return None
        spent = 1e3 * (time.perf_counter() - start)
        return self._keep(
            Prefix(
                name=name,
                tokens=tokens,
                pinned=pinned,
                snapshot=snapshot,
                bytes=need,
                build_ms=spent,
            )
        )

    def list(self) -> tuple[Prefix, ...]:
        """All of them, the least recently used first."""
        with self._lock:
            return tuple(self._kept.values())

    def drop(self, name: str) -> bool:
        """Forget one; whether it was there."""
        with self._lock:
            return self._kept.pop(name, None) is not None

    def find(self, prompt: Sequence[int]) -> Prefix | None:
        """The one that saves most of this prompt."""
        found = [prefix for prefix in self.list() if prefix.begins(prompt)]
        return max(found, key=lambda prefix: prefix.held, default=None)

    def use(self, prompt: Sequence[int]) -> Snapshot | None:
        """The state to continue this prompt from."""
        prefix = self.find(prompt)
        if prefix is None:
            return None
        with self._lock:
            if prefix.name in self._kept:
                self._kept.move_to_end(prefix.name)
        return prefix.snapshot

    def bytes_of(self, held: int) -> int:
        """Memory of a snapshot of so many tokens, bytes."""
        return sum(spec.nbytes({}) for spec in self.model.state.layout(held).values())

    def save(self, name: str, path: Path) -> Prefix:
        """Write one to disk, whole or not at all; the one that was written.

        Raises:
            RequestError: there is none of that name, or the file cannot be written.
        """
        with self._lock:
            prefix = self._kept.get(name)
        if prefix is None:
            raise RequestError(f"prefix must be one that was put (got {name})")
        stored = Stored(name=name, tokens=prefix.tokens, pinned=prefix.pinned, held=prefix.held)
        write_prefix(path, self.model, stored, prefix.snapshot)
        return prefix

    def load(self, path: Path) -> Prefix:
        """Keep what `save` wrote, under its old name.

        Raises:
            PackageError: damaged, or of another package, version or capacity.
            RequestError: no room.
        """
        start = time.perf_counter()
        stored, snapshot = read_prefix(path, self.model, self.budget)
        need = self.bytes_of(stored.held)
        self._check(stored.name, stored.tokens)
        self._room(stored.name, need)
        spent = 1e3 * (time.perf_counter() - start)
        return self._keep(
            Prefix(
                name=stored.name,
                tokens=stored.tokens,
                pinned=stored.pinned,
                snapshot=snapshot,
                bytes=need,
                build_ms=spent,
            )
        )

    def _check(self, name: str, tokens: Sequence[int]) -> None:
        if not 0 < len(name) <= LONGEST_NAME:
            raise RequestError(f"prefix must have a name of 1 to {LONGEST_NAME} (got {name!r})")
        limit, vocab = self.model.limit, self.model.manifest.target.vocab
        if not 0 < len(tokens) < limit:
            raise RequestError(
                f"prefix must be 1 to {limit - 1} tokens, which leaves room for an answer "
                f"(got {len(tokens)})"
            )
        for i, token in enumerate(tokens):
            if not 0 <= token < vocab:
                raise RequestError(f"prefix[{i}] must be 0 to {vocab - 1} (got {token})")

    def _room(self, name: str, need: int) -> None:
        """Refuse what cannot fit even when everything that may go is gone."""
        fixed = sum(p.bytes for p in self.list() if p.pinned and p.name != name)
        if fixed + need > self.budget:
            raise RequestError(
                f"prefix must fit the {self.budget} bytes for prefixes, {fixed} of them pinned "
                f"(got {need} bytes)"
            )

    def _keep(self, prefix: Prefix) -> Prefix:
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
        model.state.reset()
        for start in range(0, len(tokens), chunk):
            if stopped():
                return None
            # The rings too, whoever drafts: a request with a drafter may come.
            model.prefill(tokens[start : start + chunk], observe=True)
        return model.state.snapshot()


def held_of(length: int, chunk: int) -> int:
    """How much of a prefix is kept, tokens: whole chunks, and at least its last token is not.

    The last token of a prompt begins the first block, so a prompt that is all prefix needs it.
    """
    return max(0, length - 1) // chunk * chunk
