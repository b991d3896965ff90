"""Reads token ids from the tokenizer files of a directory, without loading a tokenizer.

The directory may be a checkpoint (for the builder) or a package (for the runtime).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from thor_dflash.core.errors import CheckpointError
from thor_dflash.core.message_text import show
from thor_dflash.core.strict_records import as_list, as_table

TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
GENERATION_CONFIG = "generation_config.json"
TEMPLATE = "chat_template.jinja"
FILES = (TOKENIZER, TOKENIZER_CONFIG, GENERATION_CONFIG, TEMPLATE)

Table = dict[str, object]


@dataclass(frozen=True, slots=True)
class AddedToken:
    """A token outside the learned vocabulary."""

    id: int
    content: str
    special: bool
    """Whether it is left out of decoded text. As in transformers, one of both files may say so."""


def present(path: Path) -> bool:
    """Whether there is a file.

    Raises:
        CheckpointError: there is something of that name, but no file, as a link to nothing.
    """
    if path.is_file() or not os.path.lexists(path):
        return path.is_file()
    got = "something else" if path.exists() else "a link to nothing"
    raise CheckpointError(f"{path} must be a file (got {got})")


def tokenizer_files(directory: Path) -> tuple[str, ...]:
    """Names of the files to copy into a package; none if there is no tokenizer.json."""
    found = tuple(name for name in FILES if present(directory / name))
    return found if TOKENIZER in found else ()


def read_json(path: Path) -> Table:
    """Read a JSON object; an empty one if there is no such file.

    Raises:
        CheckpointError: the file is not a JSON object in UTF-8.
    """
    if not present(path):
        return {}
    try:
        value: object = json.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise CheckpointError(f"{path} must be readable (got: {e.strerror})") from e
    except (ValueError, RecursionError) as e:
        raise CheckpointError(f"{path} must be JSON (got: {e})") from e
    table = as_table(value)
    if table is None:
        raise CheckpointError(f"{path} must be a JSON object (got {show(value)})")
    return table


def stop_tokens(directory: Path) -> tuple[int, ...]:
    """Ids that end an answer: those of `generation_stops`, then that of `eos_token` of
    tokenizer_config.json, with which a chat template ends a turn. config.json is not used, because
    a chat model's names the wrong id.
    """
    stops = generation_stops(directory)
    return tuple(dict.fromkeys((*stops, *_eos_by_name(directory, needed=not stops))))


def generation_stops(directory: Path) -> tuple[int, ...]:
    """`eos_token_id` of generation_config.json: an id or a list of them; empty if it has none.

    Raises:
        CheckpointError: it is something else.
    """
    path = directory / GENERATION_CONFIG
    eos = read_json(path).get("eos_token_id")
    if eos is None:
        return ()
    listed = as_list(eos)
    ids = [_id(item) for item in ([eos] if listed is None else listed)]
    if None in ids:
        raise CheckpointError(
            f"{path}: eos_token_id must be a token id or a list of them (got {show(eos)})"
        )
    return tuple(i for i in ids if i is not None)


def _id(value: object) -> int | None:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    return None


def _eos_by_name(directory: Path, *, needed: bool) -> tuple[int, ...]:
    """The id of the tokenizer's eos_token. A token that does not exist never ends an answer, which
    is an error only if nothing else does (`needed`).
    """
    name = content(read_json(directory / TOKENIZER_CONFIG).get("eos_token"))
    if name is None:
        return ()
    ids = {token.content: token.id for token in added_tokens(directory)}
    ids |= _learned(directory) if name not in ids else {}
    if name not in ids and not needed:
        return ()
    if name not in ids:
        raise CheckpointError(
            f"{directory / TOKENIZER_CONFIG}: eos_token must be a token of the tokenizer "
            f"(got {show(name)})"
        )
    return (ids[name],)


def content(token: object) -> str | None:
    """The text of a token given as a string or as an object with `content`; else None."""
    table = as_table(token)
    text = token if table is None else table.get("content")
    return text if isinstance(text, str) else None


def added_tokens(directory: Path) -> tuple[AddedToken, ...]:
    """Added tokens in order of id: those of tokenizer.json, and those that only
    tokenizer_config.json lists.
    """
    found = {token.id: token for token in _configured(directory)}
    for token in _built_in(directory):
        other = found.get(token.id, token)
        found[token.id] = replace(token, special=token.special or other.special)
    return tuple(found[i] for i in sorted(found))


def addressed_ids(directory: Path) -> int:
    """One more than the highest id in any tokenizer file; 0 without a tokenizer."""
    ids = [token.id for token in added_tokens(directory)]
    return 1 + max([*ids, *_learned(directory).values()], default=-1)


def _learned(directory: Path) -> dict[str, int]:
    path = directory / TOKENIZER
    model = as_table(read_json(path).get("model", {})) or {}
    vocab = as_table(model.get("vocab", {}))
    if vocab is None:
        raise CheckpointError(f"{path}: model.vocab must be an object (got {show(model['vocab'])})")
    ids = {name: _id(value) for name, value in vocab.items()}
    if bad := [name for name, value in ids.items() if value is None]:
        raise CheckpointError(f"{path}: the id of {bad[0]!r} must be >= 0 (got {vocab[bad[0]]!r})")
    return {name: value for name, value in ids.items() if value is not None}


def _built_in(directory: Path) -> Iterator[AddedToken]:
    path = directory / TOKENIZER
    value = read_json(path).get("added_tokens")
    rows = [] if value is None else as_list(value)
    if rows is None:
        raise CheckpointError(f"{path}: added_tokens must be a list (got {show(value)})")
    for row in rows:
        yield _added(path, (as_table(row) or {}).get("id"), row)


def _configured(directory: Path) -> Iterator[AddedToken]:
    path = directory / TOKENIZER_CONFIG
    value = read_json(path).get("added_tokens_decoder")
    rows = {} if value is None else as_table(value)
    if rows is None:
        raise CheckpointError(f"{path}: added_tokens_decoder must be a table (got {show(value)})")
    for key, row in rows.items():
        # Python refuses to convert thousands of digits.
        yield _added(path, int(key) if key.isdecimal() and len(key) < 20 else key, row)


def _added(path: Path, key: object, row: object) -> AddedToken:
    token, text, table = _id(key), content(row), as_table(row)
    if token is None or text is None or table is None:
        raise CheckpointError(f"{path}: an added token must have id and content (got {show(row)})")
    return AddedToken(token, text, table.get("special") is True)
