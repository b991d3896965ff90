"""Automatic reuse: a turn of a conversation prefills only what the turns before it have not.

What a prompt needs of an earlier one is in two parts. The **caches** hold rows by position: the
live ones stay where they are, and inside a conversation nothing of them is copied. The **light
state** (recurrent states, convolution tails, the drafter's sliding rings) holds only the newest
position, so it is copied at the boundaries where later prompts continue. When another conversation
is about to overwrite chunks of the caches that a kept boundary needs, these chunks are swapped out.

Invariant: a request that continues from here gives bitwise the answer of an empty session. Steps of
other sizes give other bits, so only whole chunks are reused: see kv_log.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from thor_dflash.runtime.decoding.kv_log import NOTHING_HASHED, Digest, HashedPrompt, hashed
from thor_dflash.runtime.decoding.model_runner import ModelRunner
from thor_dflash.runtime.decoding.sequence_state import Snapshot
from thor_dflash.runtime.decoding.telemetry import NO_REUSE, ReuseReport
from thor_dflash.runtime.session.state_pages import StatePages, page_runs
from thor_dflash.runtime.text.packed_ids import ID_BYTES
from thor_dflash.runtime.text.prompt_segments import Boundary

KEPT: Mapping[Boundary, int] = {"system": 1, "user": 1, "prompt": 2}
"""Boundaries of a kind that are kept along one conversation, the newest ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """Where a prompt may be continued by a later one, and who may continue it."""

    boundaries: tuple[tuple[int, Boundary], ...] = ()
    """Tokens of the prompt up to each boundary, and its kind; any order."""
    scope: str = ""
    """Only prompts of the same scope share state."""
    session: str = ""
    """Its name, if it has one: a hint which boundaries will not be continued."""

    @property
    def key(self) -> str:
        """Scope and name."""
        return f"{self.scope}\0{self.session}"


NO_CONVERSATION = Conversation()


@dataclass(slots=True, eq=False)
class _Kept:
    """The light state at a boundary."""

    chain: tuple[Digest, ...]
    """The chunks before it."""
    kind: Boundary
    session: str
    """Scope and name of the conversation; empty for the end of a system turn, which many share."""
    pages: tuple[int, ...]
    """Hold the light state, as StatePages.light has it."""
    scope: str
    ids: bytes
    """The whole prompt that it was kept from, as HashedPrompt."""
    used: float
    """When a request was last at it or past it, s."""
    ended: bool = False
    """Its conversation has ended: it is not found any more, and the decoding thread releases it."""


class Lease:
    """A promise that a boundary stays until the request that was admitted with it begins. It ends
    with its last reference, so that no request that leaves the queue can forget to end it."""

    __slots__ = ("__weakref__", "digest")

    def __init__(self, digest: Digest) -> None:
        self.digest = digest


@dataclass(slots=True)
class TurnTotals:
    """Counts since the session was opened."""

    queries: int = 0
    """Prompt tokens looked up."""
    hits: int = 0
    """Of them, tokens that were not read."""
    evicted: dict[Boundary, int] = field(default_factory=lambda: dict.fromkeys(KEPT, 0))
    """Boundaries dropped for lack of memory, by kind."""
    expired: int = 0
    """Boundaries dropped because no turn used them for long."""
    ahead: int = 0
    """Tokens read before a turn needed them."""
    swapped_out: int = 0
    """Bytes."""
    swapped_in: int = 0
    """Bytes."""
    swap_ms: float = 0.0
    """As in ReuseReport."""


@dataclass(slots=True)
class TurnCache:
    """The boundaries of the conversations of one session.

    What is not marked as thread-safe must be called on the decoding thread.
    """

    model: ModelRunner
    clock: Callable[[], float] = time.monotonic
    totals: TurnTotals = field(default_factory=TurnTotals)
    _kept: OrderedDict[Digest, _Kept] = field(default_factory=OrderedDict[Digest, _Kept])
    """By its last chunk; least recently used first."""
    _stored: dict[Digest, int] = field(default_factory=dict[Digest, int])
    """Chunk -> page that holds its rows of the caches."""
    _users: Counter[Digest] = field(default_factory=Counter[Digest])
    """Boundaries that need a chunk."""
    _evicted: OrderedDict[Digest, None] = field(default_factory=OrderedDict[Digest, None])
    """The last boundaries dropped, to say why nothing was reused."""
    _leases: weakref.WeakSet[Lease] = field(default_factory=weakref.WeakSet[Lease])
    _lock: threading.Lock = field(default_factory=threading.Lock)
    """Guards the boundaries, their users and the leases."""
    _pages: StatePages | None = None
    _last: tuple[tuple[int, ...], str, int, HashedPrompt] | None = None
    """Prompt, scope, size of a chunk and result of the last lookup."""

    def held(self, prompt: Sequence[int], scope: str) -> int:
        """Tokens of a prompt up to the boundary that it would continue from now. Thread-safe."""
        if not self.model.reuse:
            return 0
        chunks = self.hashed(prompt, scope).chunks
        with self._lock:
            found = self._find(chunks)
        return len(found.chain) * self.model.chunk if found else 0

    def lease(self, prompt: Sequence[int], scope: str) -> Lease | None:
        """Keep the boundary that a prompt would continue from, if there is one. Thread-safe."""
        if not self.model.reuse:
            return None
        chunks = self.hashed(prompt, scope).chunks
        with self._lock:
            if (found := self._find(chunks)) is None:
                return None
            self._leases.add(lease := Lease(found.chain[-1]))
        return lease

    def end(self, lease: Lease) -> None:
        """End a lease: its request begins. Thread-safe."""
        with self._lock:
            self._leases.discard(lease)

    def drop(self, conversation: Conversation) -> int:
        """End a conversation by its name; return how many of its boundaries are forgotten. The one
        that a waiting request was admitted with stays. Thread-safe."""
        with self._lock:
            leased = self._leased()
            found = [
                kept
                for digest, kept in self._kept.items()
                if kept.session == conversation.key and not kept.ended and digest not in leased
            ]
            for kept in found:
                kept.ended = True
        return len(found)

    def expire(self, idle_s: float) -> float | None:
        """Drop the boundaries that no request has used for so long, but for ends of system turns,
        which belong to no conversation. Return in how many seconds the next one is due, if any."""
        now = self.clock()
        mortal = [kept for kept in self._kept.values() if kept.kind != "system"]
        due = [kept for kept in mortal if now - kept.used >= idle_s]
        self.totals.expired += self._drop(due)
        rest = [kept.used for kept in mortal if kept not in due]
        return max(0.0, min(rest) + idle_s - now) if rest else None

    @property
    def bytes(self) -> int:
        """Memory in use."""
        pages = self._pages
        return (pages.count - len(pages.free)) * pages.nbytes if pages else 0

    def __len__(self) -> int:
        """Boundaries kept. Thread-safe."""
        with self._lock:
            return sum(not kept.ended for kept in self._kept.values())

    # ---- a request

    def hashed(self, prompt: Sequence[int], scope: str) -> HashedPrompt:
        """The whole chunks of a prompt without its last token. Thread-safe."""
        chunk, last = self.model.chunk, self._last
        earlier = NOTHING_HASHED
        if last is not None and last[1:3] == (scope, chunk):
            earlier = last[3]
            if last[0] is prompt:  # a request is looked up several times
                return earlier
        found = hashed(prompt, chunk, scope, earlier)
        if isinstance(prompt, tuple):
            self._last = prompt, scope, chunk, found
        return found

    def _find(self, chain: Sequence[Digest]) -> _Kept | None:
        """The longest boundary of a prompt's beginning whose chunks are all there. With the lock
        held."""
        for digest in reversed(chain):
            kept = self._kept.get(digest)
            if kept is None or kept.ended:
                continue
            if all(self._available(i, d) for i, d in enumerate(kept.chain)):
                return kept
        return None

    def _available(self, index: int, digest: Digest) -> bool:
        """Whether the rows of a chunk are in the live caches or in a page."""
        return digest in self._stored or self.model.state.log.holds(index, digest)

    def _touch(self, kept: _Kept) -> None:
        """Mark a boundary as used, and the earlier ones of its prompt as used after it."""
        for digest in reversed(kept.chain):
            if digest in self._kept:
                self._kept.move_to_end(digest)
                self._kept[digest].used = self.clock()

    def continue_from(self, prompt: HashedPrompt, start: TurnStart) -> ReuseReport:
        """Put the state where a prompt continues; return what was reused."""
        chain, prefix, length = prompt.chunks, start.prefix, len(start.prompt)
        began, chunk, state = time.perf_counter(), self.model.chunk, self.model.state
        self._drop([kept for kept in self._kept.values() if kept.ended])
        common = self._common(prompt, start.conversation.scope)
        with self._lock:
            if found := self._find(chain):
                self._touch(found)  # so that making space evicts others first
        self._save_overwritten(chain, start.rows, start.conversation)
        with self._lock:
            found = self._find(chain)
        held = len(found.chain) * chunk if found else 0
        if prefix is not None and prefix.length > held:
            state.restore(prefix)
            report = ReuseReport("prefix", prefix.length, why="")
        elif found is not None:
            self._restore(found)
            report = ReuseReport(found.kind, held, why="")
        else:
            state.reset()
            report = ReuseReport(why=self._miss_reason(chain))
        state.log.expect(chain, chunk, report.held // chunk)
        if not start.ahead:
            self.totals.queries += length
            self.totals.hits += report.held
        reread = max(0, min(common, length - 1) - report.held)
        report = replace(report, reread=reread, diverged_at=common)
        return replace(report, swap_ms=self._swapped(began))

    def _common(self, prompt: HashedPrompt, scope: str) -> int:
        """Tokens in common with the kept prompt that has most of them."""
        found = 0
        for kept in reversed(self._kept.values()):  # the newest first, with which most others lose
            at = slice(found * ID_BYTES, (found + 1) * ID_BYTES)
            if kept.scope == scope and prompt.ids[at] == kept.ids[at] != b"":
                found = max(found, prompt.common(kept.ids))
        return found

    def _swapped(self, began: float) -> float:
        """Count the time since `began` as one of copies; return it, ms."""
        ms = 1e3 * (time.perf_counter() - began)
        self.totals.swap_ms += ms
        return ms

    def _save_overwritten(
        self, chain: tuple[Digest, ...], rows: int, conversation: Conversation
    ) -> None:
        """Save what boundaries need of the chunks that a request is about to overwrite."""
        log, chunk = self.model.state.log, self.model.chunk
        if conversation.session:
            own = [k for k in self._kept.values() if k.session == conversation.key]
            self._drop([kept for kept in own if not _one_prompt(kept.chain, chain)])
        same = next((i for i, d in enumerate(chain) if not log.holds(i, d)), len(chain))
        lost = range(same, min(len(log.chunks), -(-rows // chunk) + 1))
        with self._lock:
            promised = {d for k in map(self._kept.get, self._leased()) if k for d in k.chain}
        # What is promised goes first, while there is memory.
        order = sorted(lost, key=lambda i: log.chunks[i] not in promised)
        found = {i: digest for i in order if (digest := log.chunks[i]) is not None}
        self._swap_out({i: d for i, d in found.items() if d not in self._stored})

    def _swap_out(self, wanted: Mapping[int, Digest]) -> None:
        """Save chunks by their index that boundaries need, as far as there is memory. Neighbours go
        to neighbouring pages, to be copied together."""
        pages, taken, found = self.layout(), list[int](), list[int]()
        for index, digest in wanted.items():
            if self._users[digest]:
                if (free := self._take_pages(1)) is None:
                    break  # the boundaries that need the others are not found any more
                taken += free
                found.append(index)
        # The boundaries that need a chunk may have been evicted for a page.
        found = sorted(index for index in found if self._users[wanted[index]])
        taken.sort()
        pages.release(taken[len(found) :])
        for index, page, count in page_runs(found, taken):
            rows = pages.chunk_rows(index, self.model.chunk)
            self.model.engine.swap_out(page * pages.nbytes, rows, count, pages.nbytes)
        self.totals.swapped_out += len(found) * pages.cache_bytes
        with self._lock:
            self._stored.update(zip((wanted[index] for index in found), taken, strict=False))

    def _restore(self, kept: _Kept) -> None:
        """Continue from a boundary."""
        engine, pages, log = self.model.engine, self.layout(), self.model.state.log
        lost = [i for i, digest in enumerate(kept.chain) if not log.holds(i, digest)]
        for index, page, count in page_runs(lost, [self._stored[kept.chain[i]] for i in lost]):
            log.writing(index * self.model.chunk, count * self.model.chunk)
            rows = pages.chunk_rows(index, self.model.chunk)
            engine.swap_in(page * pages.nbytes, rows, count, pages.nbytes)
        self.totals.swapped_in += len(lost) * pages.cache_bytes
        for page, parts in zip(kept.pages, pages.light, strict=True):
            engine.swap_in(page * pages.nbytes, parts)
        self.totals.swapped_in += pages.light_bytes
        self.model.state.resume(len(kept.chain) * self.model.chunk)

    def keep(
        self, prompt: HashedPrompt, chunks: int, kind: Boundary, conversation: Conversation
    ) -> float:
        """Keep the state after these first chunks of a prompt, which is the current one. Return the
        time that it took, ms."""
        began, chain = time.perf_counter(), prompt.chunks[:chunks]
        log, pages = self.model.state.log, self.layout()
        session = "" if kind == "system" else conversation.key
        if not chain or not all(log.holds(i, d) for i, d in enumerate(chain)):
            return 0.0
        if old := self._kept.get(chain[-1]):
            old.kind, old.session, old.ids = kind, session, prompt.ids
            old.used, old.ended = self.clock(), False
        elif (taken := self._take_pages(len(pages.light))) is not None:
            for page, parts in zip(taken, pages.light, strict=True):
                self.model.engine.swap_out(page * pages.nbytes, parts)
            self.totals.swapped_out += pages.light_bytes
            kept = _Kept(
                chain, kind, session, tuple(taken), conversation.scope, prompt.ids, self.clock()
            )
            with self._lock:
                self._kept[chain[-1]] = kept
                self._users.update(chain)
        self._drop_older(chain, kind)
        return self._swapped(began)

    def _drop_older(self, chain: tuple[Digest, ...], kind: Boundary) -> None:
        """Keep only the newest boundaries of a kind along a prompt."""
        along = [self._kept[d] for d in reversed(chain) if d in self._kept]
        self._drop([k for k in along if k.kind == kind][KEPT[kind] :])

    # ---- memory

    def layout(self) -> StatePages:
        """How the reserved memory is used."""
        if self._pages is None:
            self._pages = StatePages.of(self.model)
        return self._pages

    def _take_pages(self, count: int) -> list[int] | None:
        """Take free pages, for which the least recently used boundaries are evicted. Return them in
        order; None: there are not so many."""
        pages = self.layout()
        if count > pages.count:
            return None
        while len(pages.free) < count:
            kept = next((k for k in self._kept.values() if self._drop([k])), None)
            if kept is None:
                return None
            self.totals.evicted[kept.kind] += 1
            self._evicted[kept.chain[-1]] = None
            if len(self._evicted) > 4096:
                self._evicted.popitem(last=False)
        taken, pages.free[:] = pages.free[:count], pages.free[count:]
        return taken

    def _leased(self) -> set[Digest]:
        """The boundaries that waiting requests were admitted with. With the lock held."""
        return {lease.digest for lease in self._leases}

    def _drop(self, unwanted: Iterable[_Kept]) -> int:
        """Release boundaries, but for those that are leased; return how many."""
        with self._lock:
            leased = self._leased()
            found = [kept for kept in unwanted if kept.chain[-1] not in leased]
            for kept in found:
                self._release(kept)
        return len(found)

    def _release(self, kept: _Kept) -> None:
        """Forget a boundary and free its pages, and those of chunks that no other one needs. With
        the lock held."""
        pages = self.layout()
        del self._kept[kept.chain[-1]]
        given = list(kept.pages)
        for digest in kept.chain:
            self._users[digest] -= 1
            if not self._users[digest]:
                del self._users[digest]
                if (page := self._stored.pop(digest, None)) is not None:
                    given.append(page)
        pages.release(given)

    def _miss_reason(
        self, chain: Sequence[Digest]
    ) -> Literal["first", "diverged", "evicted", "too_short"]:
        """Why a prompt continues from no boundary, as ReuseReport.why."""
        if not chain:
            return "too_short"
        if any(digest in self._evicted for digest in chain):
            return "evicted"
        return "diverged" if self._kept else "first"


def _one_prompt(one: Sequence[Digest], other: Sequence[Digest]) -> bool:
    """Whether one of two chains begins with the other."""
    last = min(len(one), len(other)) - 1
    return last < 0 or one[last] == other[last]


@dataclass(slots=True)
class TurnStart:
    """Begins one request, and keeps the state at its boundaries as its prefill passes them."""

    cache: TurnCache
    prompt: tuple[int, ...]
    rows: int
    """Rows of the caches that the request may write."""
    conversation: Conversation
    prefix: Snapshot | None
    lease: Lease | None = None
    """Of the boundary that it was admitted with."""
    ahead: bool = False
    """No request asks for it yet."""
    report: ReuseReport = NO_REUSE
    _hashed: HashedPrompt = NOTHING_HASHED
    _wanted: dict[int, Boundary] = field(default_factory=dict[int, Boundary])
    """Chunks up to a boundary -> its kind."""

    def begin(self) -> None:
        """See PromptStart."""
        cache = self.cache
        if not cache.model.reuse:
            if self.prefix:
                cache.model.state.restore(self.prefix)
                self.report = ReuseReport("prefix", self.prefix.length)
            else:
                cache.model.state.reset()
            return
        self._hashed = cache.hashed(self.prompt, self.conversation.scope)
        self.report = cache.continue_from(self._hashed, self)
        if self.lease is not None:
            cache.end(self.lease)
        order: list[Boundary] = ["prompt", "user", "system"]
        for at, kind in sorted(self.conversation.boundaries, key=lambda b: order.index(b[1])):
            # A boundary within a chunk is kept at the end of the last whole chunk before it.
            self._wanted[min(at // cache.model.chunk, len(self._hashed.chunks))] = kind
        self.prefilled()

    def prefilled(self) -> None:
        """See PromptStart."""
        chunks, within = divmod(self.cache.model.state.length, self.cache.model.chunk)
        if not within and (kind := self._wanted.get(chunks)):
            self.keep(chunks, kind)

    def keep(self, chunks: int, kind: Boundary) -> None:
        """Keep the current state, which is that after so many chunks of the prompt."""
        ms = self.cache.keep(self._hashed, chunks, kind, self.conversation)
        self.report = replace(self.report, swap_ms=self.report.swap_ms + ms)
