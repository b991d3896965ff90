"""Grammars of a package: its tokenizer in llguidance, and the schemas compiled for it."""

from __future__ import annotations

import json
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar, cast

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer

from thor_dflash.core.errors import CompilerBusy, PackageError, RequestError
from thor_dflash.core.tensors import Array
from thor_dflash.runtime.grammar.schema import JsonSchema, read
from thor_dflash.runtime.grammar.tools import ToolUse, call_grammar
from thor_dflash.runtime.text.tokenizer import Tokenizer

COMPILE_S = 2.0
"""Maximum compile time, seconds: no plan is made meanwhile. A plan's schema takes 10 ms."""
STACK = 64 << 20
"""Stack of the thread that compiles, bytes: llguidance recurses into a schema, some 5 KB for each
of up to MAX_LEVELS. The default depends on the shell, and may be 2 MB."""
KEPT = 16
"""Compiled grammars cached. A robot has one for each recent set of skills and objects."""
LEAD = "\n\n"
"""What chat templates put between the thinking block and the answer."""
ESCAPES = 'nrbtf\\"'
"""Allowed JSON escape chars. Not u: \\u could spell a declared key in another way, or half a
surrogate pair."""
JSON: dict[str, Any] = {"whitespace_flexible": False, "json_allowed_escapes": ESCAPES}
_COMMON = r'[^"\\\x00-\x1F\x7F\u2028\u2029]'
SLICES = [r"[\x20\x0A\x0D\x09]+", *(_COMMON + times for times in ("{1,10}", "{1,30}", "+"))]
"""Sets of tokens whose masks are computed once. They are llguidance's own for JSON, but without the
line ends that ECMA-262 excludes from `.`: a set counts only where all of it is legal."""
SILENT = 0
"""llguidance's log level: no output on stderr. Errors are read from the matcher."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Grammar:
    """A compiled schema. Shared by requests: each copies the matcher."""

    source: str
    """Compact JSON of the schema, or Lark text."""
    matcher: LLMatcher
    """At the beginning of the answer, with its first mask computed."""
    vocabulary: Vocabulary
    warnings: tuple[str, ...]
    """What can make an answer grow without end."""
    compile_ms: float
    anew: Callable[[], Grammar]
    """Compiles it again if it is spent. Raises RequestError, as Grammars.compile."""
    opening: int = -1
    """Id that opens a tool call; -1: the grammar has none."""
    opened: LLMatcher | None = None
    """After the opening."""
    free: bool = False
    """Any text may come before the opening."""
    spent: threading.Event = field(default_factory=threading.Event)
    """A matcher hit a limit. All copies share what was computed, so none can continue."""

    def begin(self, *, opened: bool = False) -> LLMatcher:
        """A matcher at the beginning, or after the opening."""
        matcher = self.opened if opened else self.matcher
        assert matcher is not None
        return matcher.deep_copy()

    def takes(self, ids: list[int]) -> bool:
        """Whether an answer may begin with these ids.

        Raises:
            RequestError: the schema exceeds a limit of llguidance there.
        """
        matcher = self.matcher.deep_copy()
        taken = matcher.try_consume_tokens(ids) == len(ids)
        if matcher.is_error():
            text = f"schema must be within llguidance's limits (got: {reason(matcher)})"
            raise RequestError(text)
        return taken


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Token ids and masks as a grammar needs them."""

    size: int
    """Ids from here on are padding."""
    stop: frozenset[int]
    """Legal where the answer may end, and nowhere else."""
    lead: tuple[int, ...]
    """Ids between the end of thinking and the answer."""
    end_think: int
    """Id that closes thinking; -1 if there is none."""
    executor: LLExecutor

    @property
    def words(self) -> int:
        """Int32 words of one mask."""
        return -(-self.size // 32)

    def masks(self, matcher: LLMatcher, tokens: list[int], out: Array) -> None:
        """Fill `out`, int32 [1 + len(tokens), W]: ids legal now, and after each of the tokens.

        The matcher's position does not change. If it fails on the way, `out` may be incomplete.
        """
        assert out.flags.c_contiguous, out.strides
        rows, words = out.shape
        if not tokens:  # the executor requires draft tokens
            matcher.unsafe_compute_mask_ptr(out.ctypes.data, 4 * words)
            return
        self.executor.unsafe_compute_mask_ptr_with_draft_token(
            [(matcher, 0, tokens)], out.ctypes.data, 4 * words, rows
        )

    def dead(self, matcher: LLMatcher) -> bool:
        """Whether nothing can follow, not even a stop id."""
        if matcher.is_error():
            return True
        if matcher.is_accepting():
            return False
        if forced := matcher.compute_ff_tokens():
            # An infinite text is forced until it hits a limit, which only consuming it reports.
            return not matcher.deep_copy().consume_token(forced[0])
        row = np.zeros((1, self.words), np.int32)
        self.masks(matcher, [], row)
        return matcher.is_error() or not row.any()


@dataclass(slots=True)
class Grammars:
    """Compiles schemas for one package and caches the latest. Thread-safe."""

    text: Tokenizer
    vocab: int
    """Ids from here on are padding."""
    stop: tuple[int, ...]
    """The package's stop ids."""
    limits: LLParserLimits = field(default_factory=lambda: LLParserLimits(verbose_errors=False))
    """Limits on the work of the compiler and of one mask."""
    seconds: float = COMPILE_S
    _tokenizer: LLTokenizer = field(init=False)
    _vocabulary: Vocabulary = field(init=False)
    _kept: OrderedDict[str, Grammar] = field(default_factory=OrderedDict[str, Grammar])
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _compiler: threading.Lock = field(default_factory=threading.Lock)
    """One compilation at a time: one that timed out still occupies a core."""

    def __post_init__(self) -> None:
        if not self.stop:
            raise PackageError(
                "a grammar must have a package with stop tokens, to end with (got one without)"
            )
        try:
            self._tokenizer = LLTokenizer(
                self.text.grammar_json(),
                n_vocab=self.vocab,
                eos_token=list(self.stop),
                slices=SLICES,
            )
        except (ValueError, OverflowError) as e:
            raise PackageError(f"the tokenizer must be one that llguidance reads (got: {e})") from e
        close = self.text.end_think
        self._vocabulary = Vocabulary(
            self.vocab,
            frozenset(self.stop),
            tuple(self.text.encode(LEAD)),
            -1 if close is None else close,
            LLExecutor(1),  # one thread: a block uses one matcher; decoding needs the other cores
        )

    def compile(self, schema: str | Mapping[str, Any] | JsonSchema) -> Grammar:
        """The grammar of a schema: JSON without white space, keys in the schema's order.

        Raises:
            RequestError: the schema is invalid, too large, too slow to compile, or unsupported.
            CompilerBusy: another schema is being compiled, and has not ended in the time for one.
        """
        found = schema if isinstance(schema, JsonSchema) else read(schema)
        return self._once("schema", found.text, lambda: self._compile(found))

    def compile_calls(self, use: ToolUse, answer: JsonSchema | None = None) -> Grammar:
        """The grammar of the tool calls of a request, or of an answer that may be given instead.

        Raises:
            RequestError: the package has no marks for tool calls, or as `compile`.
            CompilerBusy: as `compile`.
        """
        marks = self.text.call_marks
        if marks is None:
            raise RequestError("tools must be used with a package that has <tool_call> (got none)")
        if answer is not None:
            answer.check_exclusive_bounds()
            answer.check_patterns()
        schema = "" if answer is None else json.dumps({**answer.for_compiler(), "x-guidance": JSON})
        lark = call_grammar(use, marks, schema)
        free = use.choice == "auto" and answer is None
        key = f"{lark}\n// {free}"
        return self._once("tools", key, lambda: self._compile_calls(key, marks[0], free=free))

    def compile_lark(self, lark: str) -> Grammar:
        """The grammar in a text of llguidance's Lark. It must come from this program: the compiler
        takes texts that no answer could satisfy, and marks such as `<|im_end|>`.

        Raises:
            RequestError: as `compile`.
            CompilerBusy: as `compile`.
        """
        return self._once("grammar", lark, lambda: self._compile_lark(lark))

    def _compile_lark(self, lark: str) -> Grammar:
        start = time.perf_counter()
        matcher = self._matcher("grammar", lark)
        spent = 1e3 * (time.perf_counter() - start)
        return Grammar(lark, matcher, self._vocabulary, (), spent, partial(self.compile_lark, lark))

    def _compile_calls(self, lark: str, opening: int, *, free: bool) -> Grammar:
        start = time.perf_counter()
        matcher = self._matcher("tools", lark)
        opened = matcher.deep_copy()
        opened.consume_token(opening)
        spent = 1e3 * (time.perf_counter() - start)
        make = partial(self._compile_calls, lark, opening, free=free)
        anew = partial(self._once, "tools", lark, make)
        return Grammar(lark, matcher, self._vocabulary, (), spent, anew, opening, opened, free)

    def _once(self, what: str, key: str, make: Callable[[], Grammar]) -> Grammar:
        """The grammar of this key: cached, or made by a thread that is given some time. `what` it
        is made of: schema, grammar or tools.
        """
        with self._lock:
            kept = self._kept.get(key)
            if kept is not None and not kept.spent.is_set():
                self._kept.move_to_end(key)
                return kept
        if not self._compiler.acquire(timeout=self.seconds):
            raise CompilerBusy(
                f"{what} must be compiled alone (got a request while another is still being "
                f"compiled after {self.seconds:g} s); send it again later"
            )
        grammar = within(self.seconds, lambda: self._alone(make), self._compiler.release, what)
        with self._lock:
            self._kept[key] = grammar
            while len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        return grammar

    def _alone(self, make: Callable[[], Grammar]) -> Grammar:
        try:
            return make()
        finally:
            self._compiler.release()

    def _compile(self, schema: JsonSchema) -> Grammar:
        start = time.perf_counter()
        schema.check_exclusive_bounds()
        schema.check_patterns()
        try:
            source = LLMatcher.grammar_from_json_schema(
                json.dumps(schema.for_compiler(), ensure_ascii=False),
                overrides=cast("Any", JSON),
            )
        except ValueError as e:
            raise RequestError(f"schema must be what can be compiled (got: {e})") from e
        matcher = self._matcher("schema", source)
        spent = 1e3 * (time.perf_counter() - start)
        anew = partial(self.compile, schema)
        return Grammar(schema.text, matcher, self._vocabulary, schema.warnings(), spent, anew)

    def _matcher(self, what: str, source: str) -> LLMatcher:
        matcher = LLMatcher(self._tokenizer, source, log_level=SILENT, limits=self.limits)
        if matcher.is_error():
            raise RequestError(f"{what} must be what can be compiled (got: {reason(matcher)})")
        if self._vocabulary.dead(matcher):
            raise RequestError(f"{what} must allow some answer (got {_why_dead(matcher)})")
        return matcher


def reason(matcher: LLMatcher) -> str:
    """Return the line of a matcher's error that says what is wrong: the first one or, if that only
    announces others (as for a pattern), both it and the last. "" if there is no error.
    """
    lines = [line.strip() for line in str(matcher.get_error()).splitlines() if line.strip()]
    if not lines:
        return ""
    return f"{lines[0]} {lines[-1].removeprefix('error: ')}" if lines[0].endswith(":") else lines[0]


def _why_dead(matcher: LLMatcher) -> str:
    ahead = matcher.deep_copy()
    if forced := ahead.compute_ff_tokens():
        ahead.consume_token(forced[0])
    limit = reason(ahead)
    return f"one that is too long or too wide: {limit}" if limit else "one that no text satisfies"


def within(
    seconds: float,
    work: Callable[[], T],
    unbegun: Callable[[], None] = lambda: None,
    what: str = "schema",
) -> T:
    """Run `work` on another thread for at most `seconds`; return or raise what it does. `unbegun`
    is called instead if the system gives no thread.

    Raises:
        RequestError: it took longer. It goes on in its own thread until it hits its own limits.
        RuntimeError: the system gives no thread.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as e:  # handed to the caller below, whatever it is
            errors.append(e)

    thread = threading.Thread(target=run, name="grammar", daemon=True)
    before = threading.stack_size(STACK)  # of threads that start from now on, as this one
    try:
        thread.start()
    except RuntimeError:
        unbegun()
        raise
    finally:
        threading.stack_size(before)
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        raise RequestError(f"{what} must compile within {seconds:g} s (got more)")
    return results[0]
