"""Grammars of a package: its tokenizer as llguidance sees it, and the schemas compiled for it."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer

from thor_dflash.errors import PackageError, RequestError
from thor_dflash.runtime.policies.grammar_schema import check_near, lint, text_of
from thor_dflash.runtime.text import Text
from thor_dflash.tensors import Array

COMPILE_S = 2.0
"""Longest compilation, seconds: a plan's takes ten milliseconds, and nothing plans meanwhile."""
KEPT = 16
"""Compiled grammars held. A robot has one for each set of skills and objects it lately saw."""
LEAD = "\n\n"
"""What chat templates put between the thinking block and the answer."""
ESCAPES = 'nrbtf\\"'
"""Letters of escapes. Not u: by its code a declared key would pass for another one, and half a
surrogate pair for a character."""
SILENT = 0
"""llguidance's log level: it would print to stderr, and errors are read from the matcher."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Grammar:
    """A compiled schema. Shared by requests: each takes a matcher of its own."""

    schema: str
    """Compact JSON."""
    matcher: LLMatcher
    """At the beginning, its first mask computed."""
    vocabulary: Vocabulary
    warnings: tuple[str, ...]
    """What can make an answer grow without end."""
    compile_ms: float
    anew: Callable[[], Grammar]
    """Compiled once more where it is spent. Raises RequestError, as Grammars.compile."""
    spent: threading.Event = field(default_factory=threading.Event)
    """A matcher ran into a limit. They share what was computed, so none goes on from here."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Ids as a grammar needs them."""

    size: int
    """Ids from here on are padding."""
    stop: frozenset[int]
    """Legal where the answer may end, and nowhere else."""
    lead: tuple[int, ...]
    """Between the end of thinking and the answer."""
    end_think: int
    """Id that closes thinking; -1 where there is none."""
    executor: LLExecutor

    @property
    def words(self) -> int:
        """Of one mask."""
        return -(-self.size // 32)

    def masks(self, matcher: LLMatcher, tokens: list[int], out: Array) -> None:
        """Fill int32 [1 + len(tokens), W] of `out`: ids legal now, and after each of the tokens.

        The matcher is left as it was. If it failed on the way, `out` is not all there is.
        """
        assert out.flags.c_contiguous, out.strides
        rows, words = out.shape
        if not tokens:  # the executor takes drafts only
            matcher.unsafe_compute_mask_ptr(out.ctypes.data, 4 * words)
            return
        self.executor.unsafe_compute_mask_ptr_with_draft_token(
            [(matcher, 0, tokens)], out.ctypes.data, 4 * words, rows
        )

    def dead(self, matcher: LLMatcher) -> bool:
        """Whether nothing can follow, not even the end."""
        if matcher.is_error():
            return True
        if matcher.is_accepting():
            return False
        if forced := matcher.compute_ff_tokens():
            # A text without end is forced until it meets a limit, which only who takes it is told.
            return not matcher.deep_copy().consume_token(forced[0])
        row = np.zeros((1, self.words), np.int32)
        self.masks(matcher, [], row)
        return matcher.is_error() or not row.any()


@dataclass(slots=True)
class Grammars:
    """Compiles schemas for one package and keeps the latest. Any thread may ask."""

    text: Text
    vocab: int
    """Ids from here on are padding."""
    stop: tuple[int, ...]
    """The package's stop ids."""
    limits: LLParserLimits = field(default_factory=lambda: LLParserLimits(verbose_errors=False))
    """Fuel of the compiler and of one mask."""
    seconds: float = COMPILE_S
    _tokenizer: LLTokenizer = field(init=False)
    _vocabulary: Vocabulary = field(init=False)
    _kept: OrderedDict[str, Grammar] = field(default_factory=OrderedDict[str, Grammar])
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _compiler: threading.Lock = field(default_factory=threading.Lock)
    """One at a time: a compilation that is no longer waited for still has a core."""

    def __post_init__(self) -> None:
        if not self.stop:
            raise PackageError(
                "a grammar must have stop tokens to end with (got a package of none)"
            )
        try:
            self._tokenizer = LLTokenizer(
                self.text.grammar_json(),
                n_vocab=self.vocab,
                eos_token=list(self.stop),
                slices=LLTokenizer.json_slices(),
            )
        except (ValueError, OverflowError) as e:
            raise PackageError(f"the tokenizer must be one that llguidance reads (got: {e})") from e
        close = self.text.end_think
        self._vocabulary = Vocabulary(
            self.vocab,
            frozenset(self.stop),
            tuple(self.text.encode(LEAD)),
            -1 if close is None else close,
            LLExecutor(1),  # one thread: a block is one matcher's, and decoding has the others
        )

    def compile(self, schema: str | Mapping[str, Any]) -> Grammar:
        """The grammar of a schema: JSON without white space, keys in the schema's order.

        Raises:
            RequestError: the schema is not one, is too much, or uses what is not supported.
        """
        text = text_of(schema)
        with self._lock:
            if text in self._kept and not self._kept[text].spent.is_set():
                self._kept.move_to_end(text)
                return self._kept[text]
        if not self._compiler.acquire(timeout=self.seconds):
            raise RequestError("schema must wait for another one (got one that compiles too long)")
        grammar = within(self.seconds, lambda: self._alone(text))
        with self._lock:
            self._kept[text] = grammar
            while len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        return grammar

    def _alone(self, text: str) -> Grammar:
        try:
            return self._compile(text)
        finally:
            self._compiler.release()

    def _compile(self, text: str) -> Grammar:
        start = time.perf_counter()
        check_near(text)
        try:
            source = LLMatcher.grammar_from_json_schema(
                text,
                overrides={"whitespace_flexible": False, "json_allowed_escapes": ESCAPES},
            )
        except ValueError as e:
            raise RequestError(f"schema must be one that can be compiled (got: {e})") from e
        matcher = LLMatcher(self._tokenizer, source, log_level=SILENT, limits=self.limits)
        if matcher.is_error():
            reason = matcher.get_error().strip().partition("\n")[0]
            raise RequestError(f"schema must be one that can be compiled (got: {reason})")
        if self._vocabulary.dead(matcher):
            raise RequestError("schema must allow some answer (got one that no text satisfies)")
        spent = 1e3 * (time.perf_counter() - start)
        anew = partial(self.compile, text)
        return Grammar(text, matcher, self._vocabulary, lint(text), spent, anew)


def within(seconds: float, work: Callable[[], T]) -> T:
    """What `work` returns or raises; not waited for longer than `seconds`.

    Raises:
        RequestError: it took longer. It goes on until its fuel is spent, on a thread of its own.
    """
    results: list[T] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            results.append(work())
        except Exception as e:  # handed to the caller below, whatever it is
            errors.append(e)

    thread = threading.Thread(target=run, name="grammar", daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        raise RequestError(f"schema must compile within {seconds:g} s (got one that does not)")
    return results[0]
