"""Reads documents to run a model on: a file of JSON lines, each a chat, a text or token ids.

{"messages": [{"role": "user", "content": "..."}, ...]}   rendered by the chat template
{"text": "..."}                                            as it is
{"tokens": [1, 2, 3]}                                      as they are
and, in any of them, "class": a name by which results are grouped
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from thor_dflash.config.calibrate import CalibrateConfig
from thor_dflash.core.errors import RequestError
from thor_dflash.core.message_text import cut, nearest, show
from thor_dflash.core.strict_records import as_list, as_table, read_text, unique_keys
from thor_dflash.runtime.text.tokenizer import Tokenizer

KINDS = ("messages", "text", "tokens")
CLASS = "class"


@dataclass(frozen=True, slots=True)
class TokenDocument:
    """One line of a file."""

    label: str
    """Its class; "" for none."""
    tokens: tuple[int, ...]
    begin: int = 0
    """First token of the last answer, if asked for: all tokens of a chat that ends with a request
    are before it, and none of a text.
    """


def read_documents(
    path: Path,
    tokenizer: Tokenizer | None,
    vocab: int,
    limit: int | None = None,
    *,
    answers: bool = False,
) -> list[TokenDocument]:
    """Read a file of at least one document; empty lines are left out. `answers`: find where the
    answer of each begins.

    tokenizer: of the model; None: only token ids can be read.
    vocab: number of token ids of the model.
    limit: largest file, bytes; None: as `read_text`.
    Raises:
        RequestError: names file, line and field.
    """
    try:
        text = read_text(path, limit)
    except OSError as e:
        raise RequestError(f"{path} must be a readable file (got: {e.strerror})") from e
    except ValueError as e:
        raise RequestError(f"{path} must be a text in UTF-8 (got: {e})") from e
    found = list(_documents(path, text, tokenizer, vocab, answers=answers))
    if not found:
        raise RequestError(f"{path} must hold at least one document (got none)")
    return found


def beginnings(
    documents: Sequence[tuple[int, ...]], config: CalibrateConfig, longest: int
) -> list[tuple[int, ...]]:
    """Return the beginnings of the documents, as many tokens together as the configuration says.

    longest: context that the model was made for, tokens.
    """
    left, made = config.tokens, list[tuple[int, ...]]()
    for tokens in documents:
        part = tokens[: min(config.context, longest, left)]
        if part:
            made.append(part)
        left -= len(part)
    return made


def _documents(
    path: Path, text: str, tokenizer: Tokenizer | None, vocab: int, *, answers: bool
) -> Iterator[TokenDocument]:
    # Not splitlines, which also splits at characters that JSON strings may hold.
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            value: object = json.loads(line, object_pairs_hook=unique_keys)
        except (ValueError, RecursionError) as e:
            raise RequestError(f"{where} must be JSON (got: {e})") from e
        fields = as_table(value) or {}
        if other := next((key for key in fields if key not in (*KINDS, CLASS)), None):
            near = nearest(other, (*KINDS, CLASS))
            raise RequestError(f"{where}: unknown key {cut(other)} ({near})")
        kinds = [key for key in fields if key != CLASS]
        if len(kinds) != 1 or kinds[0] not in KINDS:
            rule = f"an object with one of {', '.join(KINDS)} and perhaps {CLASS}"
            raise RequestError(f"{where} must be {rule} (got {show(value)})")
        label = fields.get(CLASS, "")
        if not isinstance(label, str):
            raise RequestError(f"{where}: {CLASS} must be a string (got {show(label)})")
        try:
            tokens = _tokens(kinds[0], fields[kinds[0]], tokenizer)
            begin = _answer(fields[kinds[0]], tokens, tokenizer) if answers else 0
        except RequestError as e:
            raise RequestError(f"{where}: {e}") from e
        _check_ids(tokens, vocab, where)
        yield TokenDocument(label, tokens, begin)


def _tokens(kind: str, value: object, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    if kind == "tokens":
        ids = as_list(value) or []
        if not ids or not all(type(i) is int for i in ids):
            raise RequestError(f"tokens must be a list of integers, not empty (got {show(value)})")
        return tuple(i for i in ids if isinstance(i, int))
    if tokenizer is None:
        raise RequestError(f"{kind} must go with a model that has a tokenizer (got {show(value)})")
    if kind == "messages":
        return tuple(tokenizer.encode(tokenizer.render(value, thinking=True)))
    if not isinstance(value, str) or not value:
        raise RequestError(f"text must be a string, not empty (got {show(value)})")
    return tuple(tokenizer.encode(value))


def _answer(value: object, tokens: tuple[int, ...], tokenizer: Tokenizer | None) -> int:
    """Where the last answer of a chat begins: where its tokens part from those of the chat without
    it.
    """
    chat = as_list(value) or []
    last = as_table(chat[-1]) if chat else None
    if last is None:
        return 0  # a text, or token ids
    if last.get("role") != "assistant":
        return len(tokens)
    before = _tokens("messages", chat[:-1], tokenizer) if len(chat) > 1 else ()
    same = (a == b for a, b in zip(before, tokens, strict=False))
    return next((i for i, equal in enumerate(same) if not equal), min(len(before), len(tokens)))


def _check_ids(tokens: tuple[int, ...], vocab: int, where: str) -> None:
    for i, token in enumerate(tokens):
        if not 0 <= token < vocab:
            raise RequestError(f"{where}: tokens[{i}] must be 0 to {vocab - 1} (got {show(token)})")
