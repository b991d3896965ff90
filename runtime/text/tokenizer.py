"""Text to token ids and back: tokenizer, chat template, and splitting thinking from the answer.

Rules of decoded text
    Special tokens (such as `<|im_end|>`) are left out. Added tokens that the tokenizer does not
    mark as special (`<think>`, `<tool_call>`) are text and are printed.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any, cast

from tokenizers import AddedToken, decoders
from tokenizers import Tokenizer as HfTokenizer

from thor_dflash.core.errors import PackageError, RequestError, ThorError
from thor_dflash.core.message_text import check_utf8, show
from thor_dflash.package import tokenizer_files as files
from thor_dflash.runtime.text.chat_template import Template
from thor_dflash.runtime.text.messages import chat
from thor_dflash.runtime.text.template_process import NOTHING
from thor_dflash.runtime.text.thinking import Marks, TextPiece, Thinking
from thor_dflash.runtime.text.token_bounds import least_bytes, longest
from thor_dflash.runtime.text.tool_calls import CallPiece, Tool, ToolCallParser

THINK, END_THINK = "<think>", "</think>"
TOOL_MARKS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
OPTIONS = frozenset(("enable_thinking", "preserve_thinking", "reasoning_effort"))
"""Variables of chat templates that a request may set."""
RESERVED = frozenset(("messages", "tools", "documents", "add_generation_prompt"))
"""Variables that have their own place in a request."""
RECALLED = 8192
"""Tokens whose bytes are cached: more than a robot's plans ever use."""


class Tokenizer:
    """The tokenizer and the chat template of a package."""

    def __init__(self, tokenizer: HfTokenizer, special: frozenset[int], template: Template) -> None:
        self._tokenizer = tokenizer
        self._special = special
        self._template = template
        self.think = tokenizer.token_to_id(THINK)
        """Id that opens thinking, or None."""
        self.end_think = tokenizer.token_to_id(END_THINK)
        """Id that closes thinking, or None."""
        self.tools = tuple(
            i for i in (tokenizer.token_to_id(mark) for mark in TOOL_MARKS) if i is not None
        )
        """Ids of the marks around tool calls and their responses, as far as they exist."""
        self.recall = lru_cache(RECALLED)(self.bytes_of)
        """`bytes_of`, cached: an answer uses the same few tokens again and again."""

    @property
    def marks(self) -> Marks | None:
        """The thinking marks, or None if one of them is missing."""
        if self.think is None or self.end_think is None:
            return None
        return Marks(self.think, self.end_think)

    @property
    def takes_tools(self) -> bool:
        """Whether chats may have tools."""
        return self.call_marks is not None and "tools" in self._template.variables

    @property
    def call_marks(self) -> tuple[int, int] | None:
        """The ids that open and close a tool call, or None if one of them is missing."""
        opening, closing = map(self._tokenizer.token_to_id, TOOL_MARKS[:2])
        return None if opening is None or closing is None else (opening, closing)

    def has_added(self, word: str) -> bool:
        """Whether the text is always split before and after this word, which is one id."""
        return any(
            token.content == word and not (token.lstrip or token.rstrip or token.single_word)
            for token in self._tokenizer.get_added_tokens_decoder().values()
        )

    def spelling(self, token: int) -> str:
        """The text that becomes this added token; empty for an unused id."""
        return self._tokenizer.id_to_token(token) or ""

    @property
    def options(self) -> frozenset[str]:
        """Variables of the chat template that a request may set."""
        return self._template.variables & OPTIONS

    @property
    def chats(self) -> bool:
        """Whether there is a chat template."""
        return self._template.given

    @classmethod
    def load(cls, directory: Path) -> Tokenizer:
        """Read the tokenizer files of a package or a checkpoint.

        Raises:
            PackageError: tokenizer.json is missing or unsupported, or the chat template is invalid.
            CheckpointError: tokenizer_config.json is not valid.
        """
        path = directory / files.TOKENIZER
        with _faults(PackageError, f"{path} must be a tokenizer"):
            # Not from_file: it takes no path whose bytes are not UTF-8.
            tokenizer = HfTokenizer.from_buffer(path.read_bytes())
        if not isinstance(tokenizer.decoder, decoders.ByteLevel):
            kind = type(tokenizer.decoder).__name__
            raise PackageError(f"{path}: decoder must be ByteLevel (got {kind})")
        tokenizer.no_padding()
        tokenizer.no_truncation()
        special = _add_missing(tokenizer, directory)
        return cls(tokenizer, special, Template.load(directory))

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`; text that spells an added token becomes that token.

        Raises:
            RequestError: `text` holds lone surrogates: its source was not UTF-8. Or the tokenizer
                cannot split it: the pattern of Qwen's fails at ten million spaces in a row.
        """
        check_utf8("text", text)
        with _faults(RequestError, "text must be one that the tokenizer can split"):
            # A batch of one, because `encode` holds the interpreter's lock: with a long text it
            # would stop every other thread for a second. Without offsets, which nobody reads.
            return self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def least(self, text: str) -> int:
        """A lower bound on the tokens of `text`; 0 if the tokenizer gives none. Does not encode,
        which would take a second and 200 MB per megabyte.

        Raises:
            RequestError: as `encode`.
        """
        check_utf8("text", text)
        most = self._most
        return 0 if most is None else -(-least_bytes(text) // most)

    @cached_property
    def _most(self) -> int | None:
        # Cached, because this takes half a second for a large vocabulary.
        return longest(json.loads(self._tokenizer.to_str()), _BYTES.keys())

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`; bytes that are not UTF-8 become U+FFFD."""
        stream = self.stream()
        return stream.feed(ids) + stream.end()

    def grammar_json(self) -> str:
        """The tokenizer as JSON for a grammar: bytes map only to the tokens that spell them. Added
        tokens are special and get a content that no text spells; the normalizer is removed.
        """
        table = json.loads(self._tokenizer.to_str())
        table["normalizer"], vocab = None, table["model"]["vocab"]
        for token in table["added_tokens"]:
            unspelt = f"\0added {token['id']}\0"
            # The tokenizer takes a token's id from the vocabulary if it is there, else the next
            # free id.
            if token["content"] in vocab:
                vocab[unspelt] = vocab.pop(token["content"])
            token |= {"special": True, "normalized": False, "content": unspelt}
        return json.dumps(table)

    def stream(self) -> Stream:
        """A decoder for an answer that arrives piece by piece."""
        return Stream(self)

    def render(
        self,
        messages: object,
        thinking: bool,
        tools: Sequence[object] = (),
        options: Mapping[str, object] = NOTHING,
        pictures: int = 0,
    ) -> str:
        """The prompt of a chat that shows so many pictures, up to where the assistant's answer
        begins.

        Raises:
            RequestError: `messages` is not a chat, or the template refuses it, or `options` has a
                variable that the template does not read.
        """
        for name in options:
            if name not in self._template.variables or name in RESERVED:
                known = ", ".join(sorted(self.options)) or "none"
                raise RequestError(
                    f"chat_template_kwargs must have names that the template reads: {known} "
                    f"(got {show(name)})"
                )
        every = {"enable_thinking": thinking, **options}
        return self._template.render(chat(messages, pictures), tools=tools, options=every)

    def bytes_of(self, token: int) -> bytes:
        """Bytes that one token adds to the text; none for a special token or an unused id."""
        word = None if token in self._special else self._tokenizer.id_to_token(token)
        if word is None:
            return b""
        if all(char in _BYTES for char in word):
            return bytes(_BYTES[char] for char in word)
        return word.encode()  # an added token with characters outside the byte alphabet


class Stream:
    """Decodes an answer as it arrives. A character is returned once its last byte has arrived."""

    def __init__(self, text: Tokenizer) -> None:
        self._text = text
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, ids: Iterable[int]) -> str:
        """The text these ids complete."""
        return self._utf8.decode(b"".join(map(self._text.recall, ids)))

    def end(self) -> str:
        """Text that was held back: U+FFFD if the answer stopped inside a character, else ""."""
        return self._utf8.decode(b"", True)


class Answer:
    """An answer as it arrives, split into thinking, text and tool calls.

    The prompt decides whether it starts inside thinking: a chat template may have opened the block
    already. An answer that does not start inside may open one with its first token.
    """

    def __init__(self, text: Tokenizer, prompt: Sequence[int], tools: Sequence[Tool] = ()) -> None:
        """`tools`: those that may be called; without any, a call is text."""
        self._text = text
        self._stream = text.stream()
        marks, calls = text.marks, text.call_marks if tools else None
        if marks and calls:
            marks = replace(marks, call=calls[0])
        self._state = Thinking(marks, prompt)
        self._tokens: list[int] = []
        self._thinking = 0
        self._written: list[str] = []
        self._call_pieces: list[CallPiece] = []
        self.calls: ToolCallParser | None = None
        """The calls so far; None: none may be made."""
        if calls:
            self.calls = ToolCallParser({tool.name: tool for tool in tools}, calls, text.recall)

    @property
    def thinking_tokens(self) -> int:
        """Tokens of the thinking block so far, its marks included."""
        return self._thinking

    def feed(self, tokens: Sequence[int]) -> list[TextPiece]:
        """The pieces of text that these tokens complete, without empty ones."""
        return [piece for token in tokens for piece in self._one(token)]

    def end(self) -> list[TextPiece]:
        """The text held back at the end of the answer, if any."""
        calls = self.calls.end() if self.calls is not None else ()
        return [*self._rest(), *self._answered(calls)]

    def take_calls(self) -> list[CallPiece]:
        """The parts of calls since the last time that this was called."""
        taken, self._call_pieces = self._call_pieces, []
        return taken

    def thinking(self) -> str:
        """The text of the thinking block without its marks."""
        marks = (self._text.think, self._text.end_think)
        runs = groupby(self._tokens[: self._thinking], marks.__contains__)
        # Run by run: halves of a character on both sides of a mark do not form a character.
        return "".join(self._text.decode(run) for mark, run in runs if not mark).strip("\n")

    def text(self) -> str:
        """The text after the thinking block, without tool calls."""
        calls = self.calls is not None
        rest = (
            "".join(self._written) if calls else self._text.decode(self._tokens[self._thinking :])
        )
        return rest.lstrip("\n") if self._thinking else rest

    def _one(self, token: int) -> Iterator[TextPiece]:
        self._tokens.append(token)
        if token in (self._text.think, self._text.end_think):
            yield from self._rest()  # a mark is its own piece, even after an incomplete character
        inside = self._state.feed(token)
        if inside:
            self._thinking = len(self._tokens)
        elif self.calls is not None:
            yield from self._rest()  # of a thinking that a call has ended
            yield from self._answered(self.calls.feed(token))
            return
        if text := self._stream.feed((token,)):
            yield TextPiece(text, inside)

    def _rest(self) -> Iterator[TextPiece]:
        if rest := self._stream.end():
            yield TextPiece(rest, self._state.inside)

    def _answered(self, pieces: Iterable[str | CallPiece]) -> Iterator[TextPiece]:
        for piece in pieces:
            if isinstance(piece, CallPiece):
                self._call_pieces.append(piece)
            else:
                self._written.append(piece)
                yield TextPiece(piece, thinking=False)


def open_at_end(text: Tokenizer, prompt: Sequence[int]) -> bool:
    """Whether the answer to this prompt begins inside the thinking block."""
    return Thinking(text.marks, prompt).inside


@contextmanager
def _faults(error: type[ThorError], rule: str) -> Generator[None]:
    """Report whatever the library raises as `error`. It raises plain Exception for bad input, and a
    panic of its Rust code is not even that.
    """
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as e:
        raise error(f"{rule} (got: {e})") from e


def _add_missing(tokenizer: HfTokenizer, directory: Path) -> frozenset[int]:
    """Add the tokens that only tokenizer_config.json lists; return every special id."""
    added = files.added_tokens(directory)
    for token in added:
        if tokenizer.id_to_token(token.id) is not None:
            continue
        word = AddedToken(token.content, normalized=False)
        cast("Any", tokenizer).add_tokens([word])
        given = tokenizer.token_to_id(token.content)
        if given != token.id:
            raise PackageError(
                f"{directory / files.TOKENIZER_CONFIG}: id of {show(token.content)} must be "
                f"{given}, the next free one (got {token.id})"
            )
    return frozenset(token.id for token in added if token.special)


def _byte_alphabet() -> dict[str, int]:
    """Characters of byte-level BPE: printable bytes are themselves, the rest begin at U+0100."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    chars = {chr(byte): byte for byte in plain}
    return chars | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTES = _byte_alphabet()
