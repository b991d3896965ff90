"""Strict conversion of tables (parsed TOML or JSON) to frozen dataclasses, by msgspec.

A dataclass is its own schema: unknown, missing and mistyped keys are refused by their dotted name.
msgspec converts; this module adds what it lacks: it ignores unknown keys of a dataclass, and its
messages neither name the key of a mapping nor the values that are allowed.
"""

from __future__ import annotations

import dataclasses
import re
import types
import typing
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from thor_dflash.core.errors import ThorError
from thor_dflash.core.message_text import cut, nearest, show

T = TypeVar("T")

TEXT_LIMIT = 64 << 20
"""Largest text file, bytes. A device, given by mistake, has no end."""
WORDS = {"int": "an integer", "float": "a number", "bool": "true or false", "str": "a string"}
"""Type name -> how messages describe it."""


def as_table(value: object) -> dict[str, object] | None:
    """`value` if it is a table, else None."""
    return typing.cast("dict[str, object]", value) if isinstance(value, dict) else None


def as_list(value: object) -> list[object] | None:
    """`value` if it is a list, else None."""
    return typing.cast("list[object]", value) if isinstance(value, list) else None


def unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """The `object_pairs_hook` of a JSON parser that refuses a key given twice: which of its values
    counts is not defined.

    Raises:
        ValueError: names the key.
    """
    values = dict(pairs)
    if len(values) != len(pairs):
        seen = set[str]()
        for name, _ in pairs:
            if name in seen:
                raise ValueError(f"the key {cut(name)!r} twice")
            seen.add(name)
    return values


def encode(record: object) -> Any:
    """A dataclass as a table of plain values; a field that is None is left out."""
    if dataclasses.is_dataclass(record) and not isinstance(record, type):
        pairs = ((f.name, getattr(record, f.name)) for f in dataclasses.fields(record))
        return {name: encode(value) for name, value in pairs if value is not None}
    if isinstance(record, Mapping):
        table = typing.cast("Mapping[str, object]", record)
        return {name: encode(value) for name, value in table.items()}
    if isinstance(record, tuple | list):
        return [encode(item) for item in typing.cast("Iterable[object]", record)]
    return record


def read_text(path: Path | int, limit: int | None = None) -> str:
    """Read a text in UTF-8 of at most `limit` bytes; None: TEXT_LIMIT. `path` may be a descriptor,
    which stays open.

    Raises:
        OSError: it cannot be read.
        ValueError: it is larger, or not UTF-8.
    """
    # Read instead of a query of the size, which a device or a pipe does not have.
    most = limit or TEXT_LIMIT
    with open(path, "rb", closefd=isinstance(path, Path)) as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise ValueError(f"more than {most} bytes")
    return data.decode("utf-8")


def load(cls: type[T], path: Path, error: type[ThorError]) -> T:
    """Build `cls` from a JSON file.

    Raises:
        error: it is missing, not JSON, or refused by `decode`; the message begins with the path.
    """
    try:
        value: object = msgspec.json.decode(read_text(path))
    except OSError as e:
        raise error(f"{path} must be readable (got: {e.strerror})") from e
    except (ValueError, RecursionError) as e:
        raise error(f"{path} must be JSON (got: {e})") from e
    if as_table(value) is None:
        raise error(f"{path} must be a JSON object (got {show(value)})")
    try:
        return decode(cls, value, "", error)
    except error as e:
        raise error(f"{path}: {e}") from e


def decode(cls: type[T], table: object, where: str, error: type[ThorError]) -> T:
    """Build `cls` from a table. `where` is the dotted name of the table, "" at the top.

    Raises:
        error: an unknown, missing or mistyped key, or a value `cls` refuses.
    """
    if keys := _unknown_key(cls, table):
        known, prefix = hints(_bare(_hint_at(cls, keys[:-1]))), _dotted(where, keys[:-1])
        near = nearest(str(keys[-1]), known, f"{prefix}." if prefix else "")
        raise error(f"unknown key {_dotted(prefix, (cut(str(keys[-1])),))} ({near})")
    try:
        return msgspec.convert(table, cls)
    except msgspec.ValidationError as e:
        raise error(_message(str(e), cls, table, where)) from e


# ---- what msgspec lacks --------------------------------------------------------------------------
Keys = tuple[str | int, ...]
"""Keys and indices that lead from a table to a value inside it."""


def _is_record(hint: Any) -> bool:
    return dataclasses.is_dataclass(hint)


@cache
def hints(cls: Any) -> dict[str, Any]:
    """Field -> its type, constraints included."""
    return typing.get_type_hints(cls, include_extras=True)


def _bare(hint: Any) -> Any:
    """A type without its constraints, and without None."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return _bare(args[0])
    kinds = [kind for kind in args if kind is not types.NoneType]
    return (
        _bare(kinds[0]) if origin in (types.UnionType, typing.Union) and len(kinds) == 1 else hint
    )


def _inner(hint: Any) -> Any:
    """The type of the items of a list or a mapping."""
    return [kind for kind in typing.get_args(hint) if kind is not Ellipsis][-1]


def _hint_at(cls: Any, keys: Keys) -> Any:
    hint = cls
    for key in keys:
        hint = _bare(hint)
        hint = hints(hint)[str(key)] if _is_record(hint) else _inner(hint)
    return hint


@cache
def _has_records(hint: Any) -> bool:
    hint = _bare(hint)
    return _is_record(hint) or any(map(_has_records, typing.get_args(hint)))


@cache
def _records(cls: Any) -> dict[str, Any]:
    """The fields that hold further dataclasses."""
    return {name: _bare(hint) for name, hint in hints(cls).items() if _has_records(hint)}


def _unknown_key(hint: Any, value: object) -> Keys:
    """The keys that lead to the first key that its dataclass lacks; empty if there is none."""
    inside: Iterable[tuple[str | int, Any, object]] = ()
    if _is_record(hint):
        table, known = as_table(value) or {}, hints(hint)
        if unknown := next((key for key in table if key not in known), None):
            return (unknown,)
        inside = ((key, kind, table[key]) for key, kind in _records(hint).items() if key in table)
    elif _has_records(hint):
        items = as_list(value)
        pairs = (as_table(value) or {}).items() if items is None else enumerate(items)
        inside = ((key, _bare(_inner(hint)), item) for key, item in pairs)
    for key, kind, item in inside:
        if keys := _unknown_key(kind, item):
            return (key, *keys)
    return ()


def _message(text: str, cls: Any, table: object, where: str) -> str:
    """A message of msgspec as one of ours."""
    text, _, path = text.partition(" - at `$")
    keys, value = Keys(), table
    for name, index in re.findall(r"\.(\w+)|\[(\d+|\.\.\.)\]", path):
        if index == "...":  # some key of a mapping
            kind = _inner(_bare(_hint_at(cls, keys)))
            items = (as_table(value) or {}).items()
            keys += (next(key for key, item in items if _is_refused(item, kind)),)
        else:
            keys += (name or int(index),)
        value = typing.cast("Any", value)[keys[-1]]
    if missing := re.match(r"Object missing required field `(\w+)`", text):
        return f"{_dotted(where, (*keys, missing[1]))} must be present (got nothing)"
    return f"{_dotted(where, keys)} must be {_rule(_hint_at(cls, keys), text)} (got {show(value)})"


def _is_refused(value: object, hint: Any) -> bool:
    try:
        msgspec.convert(value, hint)
    except msgspec.ValidationError:
        return True
    return False


def _dotted(where: str, keys: Keys) -> str:
    parts = (f"[{key}]" if isinstance(key, int) else f".{key}" for key in keys)
    return (where + "".join(parts)).removeprefix(".")


def _rule(hint: Any, text: str) -> str:
    """What the values of a type must be."""
    if text == "Number out of range":
        return "a number of 64 bits"
    if ", got" not in text and typing.get_origin(hint) is Annotated:
        return bounds(hint)
    return _kind(_bare(hint))


def bounds(hint: Any) -> str:
    """The range of a type with constraints."""
    meta = next(m for m in typing.get_args(hint) if isinstance(m, msgspec.Meta))
    if meta.le is None:
        return f"> {meta.gt}" if meta.ge is None else f">= {meta.ge}"
    return (
        f"above {meta.gt} and at most {meta.le}" if meta.ge is None else f"{meta.ge} to {meta.le}"
    )


def _kind(hint: Any) -> str:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return " or ".join(map(show, args))
    if origin in (types.UnionType, typing.Union):
        return " or ".join(map(_kind, args))
    if origin is tuple:
        return "a list" if Ellipsis in args else f"a list of {len(args)}"
    if _is_record(hint):
        return "a section"
    return "a table" if origin else WORDS[hint.__name__]
