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
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from thor_dflash.runtime.decoding.kv_log import Digest, chunk_digests
from thor_dflash.runtime.decoding.model_runner import ModelRunner
from thor_dflash.runtime.decoding.sequence_state import Snapshot, is_record
from thor_dflash.runtime.decoding.telemetry import NO_REUSE, ReuseReport
from thor_dflash.runtime.engines.protocol import Tensor, TensorRows
from thor_dflash.runtime.session.prefix_cache import cached_length
from thor_dflash.runtime.text.prompt_segments import Boundary

KEPT = {"system": 1, "user": 1, "prompt": 2}
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


@dataclass(slots=True)
class TurnTotals:
    """Counts since the session was opened."""

    queries: int = 0
    """Prompt tokens looked up."""
    hits: int = 0
    """Of them, tokens that were not read."""
    evicted: int = 0
    """Boundaries dropped for lack of memory."""
    swapped_out: int = 0
    """Bytes."""
    swapped_in: int = 0
    """Bytes."""


@dataclass(slots=True)
class TurnCache:
    """The boundaries of the conversations of one session.

    All but `held` must be called on the decoding thread.
    """

    model: ModelRunner
    totals: TurnTotals = field(default_factory=TurnTotals)
    _kept: OrderedDict[Digest, _Kept] = field(default_factory=OrderedDict[Digest, _Kept])
    """By its last chunk; least recently used first."""
    _stored: dict[Digest, int] = field(default_factory=dict[Digest, int])
    """Chunk -> page that holds its rows of the caches."""
    _users: Counter[Digest] = field(default_factory=Counter[Digest])
    """Boundaries that need a chunk."""
    _evicted: OrderedDict[Digest, None] = field(default_factory=OrderedDict[Digest, None])
    """The last boundaries dropped, to say why nothing was reused."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _pages: Pages | None = None
    _last: tuple[tuple[int, ...], str, int, tuple[Digest, ...]] | None = None
    """Prompt, scope, size of a chunk and chunks of the last lookup."""

    def held(self, prompt: Sequence[int], scope: str) -> int:
        """Tokens of a prompt up to the boundary that it would continue from now. Thread-safe."""
        found = self._find(self.chain(prompt, scope)) if self.model.reuse else None
        return len(found.chain) * self.model.chunk if found else 0

    @property
    def bytes(self) -> int:
        """Memory in use."""
        pages = self._pages
        return (pages.count - len(pages.free)) * pages.nbytes if pages else 0

    def __len__(self) -> int:
        """Boundaries kept."""
        return len(self._kept)

    # ---- a request

    def chain(self, prompt: Sequence[int], scope: str) -> tuple[Digest, ...]:
        """The whole chunks of a prompt without its last token. Thread-safe."""
        chunk, last = self.model.chunk, self._last
        # A request is looked up several times, and 28,000 ids take a millisecond.
        if last is not None and last[0] is prompt and last[1:3] == (scope, chunk):
            return last[3]
        found = chunk_digests(prompt[: cached_length(len(prompt), chunk)], chunk, scope)
        if isinstance(prompt, tuple):
            self._last = prompt, scope, chunk, found
        return found

    def _find(self, chain: Sequence[Digest]) -> _Kept | None:
        """The longest boundary of a prompt's beginning whose chunks are all there."""
        with self._lock:
            for digest in reversed(chain):
                kept = self._kept.get(digest)
                if kept and all(self._there(i, d) for i, d in enumerate(kept.chain)):
                    return kept
        return None

    def _there(self, index: int, digest: Digest) -> bool:
        return digest in self._stored or self.model.state.log.holds(index, digest)

    def _touch(self, kept: _Kept) -> None:
        """Mark a boundary as used, and the earlier ones of its prompt as used after it."""
        with self._lock:
            for digest in reversed(kept.chain):
                if digest in self._kept:
                    self._kept.move_to_end(digest)

    def continue_from(self, chain: tuple[Digest, ...], start: TurnStart) -> ReuseReport:
        """Put the state where a prompt with these chunks continues; return what was reused."""
        rows, conversation, prefix, length = (
            start.rows,
            start.conversation,
            start.prefix,
            len(start.prompt),
        )
        began, chunk, state = time.perf_counter(), self.model.chunk, self.model.state
        if found := self._find(chain):
            self._touch(found)  # so that making space evicts others first
        self._leave(chain, rows, conversation)
        found = self._find(chain)
        held = len(found.chain) * chunk if found else 0
        if prefix is not None and prefix.length > held:
            state.restore(prefix)
            report = ReuseReport("prefix", prefix.length, "")
        elif found is not None:
            self._restore(found)
            report = ReuseReport(found.kind, held, "")
        else:
            state.reset()
            report = ReuseReport(why=self._why(chain))
        state.log.expect(chain, chunk, report.held // chunk)
        self.totals.queries += length
        self.totals.hits += report.held
        return replace(report, swap_ms=1e3 * (time.perf_counter() - began))

    def _leave(self, chain: tuple[Digest, ...], rows: int, conversation: Conversation) -> None:
        """Save what boundaries need of the chunks that a request is about to overwrite."""
        log, chunk = self.model.state.log, self.model.chunk
        for kept in [k for k in self._kept.values() if k.session == _name(conversation)]:
            if conversation.session and not _one_prompt(kept.chain, chain):
                self._release(kept)
        same = next((i for i, d in enumerate(chain) if not log.holds(i, d)), len(chain))
        for index in range(same, min(len(log.chunks), -(-rows // chunk) + 1)):
            digest = log.chunks[index]
            if digest is not None and self._users[digest] and digest not in self._stored:
                self._swap_out(index, digest)

    def _swap_out(self, index: int, digest: Digest) -> None:
        pages = self.layout()
        if (page := self._take(1)) is None:
            return  # the boundaries that need it are not found any more
        at, rows = page[0] * pages.nbytes, pages.chunk_rows(index, self.model.chunk)
        self.model.engine.swap_out(at, rows)
        self.totals.swapped_out += pages.cache_bytes
        if self._users[digest]:  # they may have been evicted for this page
            self._stored[digest] = page[0]
        else:
            pages.free.extend(page)

    def _restore(self, kept: _Kept) -> None:
        """Continue from a boundary."""
        engine, pages, log = self.model.engine, self.layout(), self.model.state.log
        for index, digest in enumerate(kept.chain):
            if not log.holds(index, digest):
                log.writing(index * self.model.chunk, self.model.chunk)
                at = self._stored[digest] * pages.nbytes
                engine.swap_in(at, pages.chunk_rows(index, self.model.chunk))
                self.totals.swapped_in += pages.cache_bytes
        for page, parts in zip(kept.pages, pages.light, strict=True):
            engine.swap_in(page * pages.nbytes, parts)
        self.totals.swapped_in += pages.light_bytes
        self.model.state.resume(len(kept.chain) * self.model.chunk)

    def keep(self, chain: tuple[Digest, ...], kind: Boundary, conversation: Conversation) -> None:
        """Keep the state after these chunks, which is the current one."""
        log, pages = self.model.state.log, self.layout()
        session = "" if kind == "system" else _name(conversation)
        if not chain or not all(log.holds(i, d) for i, d in enumerate(chain)):
            return
        if old := self._kept.get(chain[-1]):
            old.kind, old.session = kind, session
        elif (taken := self._take(len(pages.light))) is not None:
            for page, parts in zip(taken, pages.light, strict=True):
                self.model.engine.swap_out(page * pages.nbytes, parts)
            self.totals.swapped_out += pages.light_bytes
            kept = _Kept(chain, kind, session, tuple(taken))
            with self._lock:
                self._kept[chain[-1]] = kept
                self._users.update(chain)
        self._thin(chain, kind)

    def _thin(self, chain: tuple[Digest, ...], kind: Boundary) -> None:
        """Keep only the newest boundaries of a kind along a prompt."""
        along = [self._kept[d] for d in reversed(chain) if d in self._kept]
        for kept in [k for k in along if k.kind == kind][KEPT[kind] :]:
            self._release(kept)

    # ---- memory

    def layout(self) -> Pages:
        """How the reserved memory is used."""
        if self._pages is None:
            self._pages = Pages.of(self.model)
        return self._pages

    def _take(self, count: int) -> list[int] | None:
        """Pages, for which the least recently used boundaries are evicted; None: there are not so
        many."""
        pages = self.layout()
        if count > pages.count:
            return None
        while len(pages.free) < count:
            kept = next(iter(self._kept.values()), None)
            if kept is None:
                return None
            self._release(kept)
            self.totals.evicted += 1
            self._evicted[kept.chain[-1]] = None
            if len(self._evicted) > 4096:
                self._evicted.popitem(last=False)
        taken, pages.free[:] = pages.free[:count], pages.free[count:]
        return taken

    def _release(self, kept: _Kept) -> None:
        pages = self.layout()
        with self._lock:
            del self._kept[kept.chain[-1]]
            pages.free.extend(kept.pages)
            for digest in kept.chain:
                self._users[digest] -= 1
                if not self._users[digest]:
                    del self._users[digest]
                    if (page := self._stored.pop(digest, None)) is not None:
                        pages.free.append(page)

    def _why(self, chain: Sequence[Digest]) -> Literal["first", "diverged", "evicted"]:
        if any(digest in self._evicted for digest in chain):
            return "evicted"
        return "diverged" if self._kept else "first"


def _name(conversation: Conversation) -> str:
    return f"{conversation.scope}\0{conversation.session}"


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
    """TensorRows of the caches that the request may write."""
    conversation: Conversation
    prefix: Snapshot | None
    report: ReuseReport = NO_REUSE
    _chain: tuple[Digest, ...] = ()
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
        self._chain = cache.chain(self.prompt, self.conversation.scope)
        self.report = cache.continue_from(self._chain, self)
        order: list[Boundary] = ["prompt", "user", "system"]
        for at, kind in sorted(self.conversation.boundaries, key=lambda b: order.index(b[1])):
            # A boundary within a chunk is kept at the end of the last whole chunk before it.
            self._wanted[min(at // cache.model.chunk, len(self._chain))] = kind
        self.prefilled()

    def prefilled(self) -> None:
        """See PromptStart."""
        chunks, within = divmod(self.cache.model.state.length, self.cache.model.chunk)
        if not within and (kind := self._wanted.get(chunks)):
            self.cache.keep(self._chain[:chunks], kind, self.conversation)


@dataclass(slots=True)
class Pages:
    """Pages of equal size in the reserved memory. Each holds the rows of one chunk of every cache,
    or a part of a light state.
    """

    nbytes: int
    count: int
    free: list[int]
    caches: tuple[Tensor, ...]
    """[heads, rows, width] each, rows by position."""
    cache_bytes: int
    """Bytes of one chunk of all of them."""
    light: tuple[tuple[TensorRows, ...], ...]
    """The tensors of a light state, page by page."""
    light_bytes: int

    @classmethod
    def of(cls, model: ModelRunner) -> Pages:
        """Pages of one model's states; `model.chunk` must not change any more."""
        layers = model.manifest.drafter.layers if model.manifest.drafter else ()
        full = tuple(f"drafter.{i}." for i, layer in enumerate(layers) if not layer.window)
        caches: list[Tensor] = []
        light: list[TensorRows] = []
        for name, tensor in model.state.tensors.items():
            if name.startswith(("attention.", *full)):
                caches.append(tensor)
            elif not is_record(name):
                light.append(TensorRows(tensor))
        cache_bytes = sum(TensorRows(tensor, 0, model.chunk).nbytes for tensor in caches)
        nbytes = max([cache_bytes, *(rows.nbytes for rows in light)])
        packed: list[list[TensorRows]] = []
        for rows in sorted(light, key=lambda rows: -rows.nbytes):
            fits = (page for page in packed if _size(page) + rows.nbytes <= nbytes)
            if (page := next(fits, None)) is not None:
                page.append(rows)
            else:
                packed.append([rows])
        count = model.reuse // nbytes
        return cls(
            nbytes=nbytes,
            count=count,
            free=list(range(count)),
            caches=tuple(caches),
            cache_bytes=cache_bytes,
            light=tuple(tuple(page) for page in packed),
            light_bytes=_size(light),
        )

    def chunk_rows(self, index: int, chunk: int) -> list[TensorRows]:
        """The rows of one chunk of every cache."""
        return [TensorRows(tensor, index * chunk, (index + 1) * chunk) for tensor in self.caches]


def _size(parts: Sequence[TensorRows]) -> int:
    return sum(rows.nbytes for rows in parts)
