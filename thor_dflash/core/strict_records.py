"""Strict conversion between tables (parsed TOML or JSON) and frozen dataclasses.

A dataclass is its own schema: unknown, missing and mistyped keys are refused by their dotted name.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import types
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

from thor_dflash.core.errors import RequestError, ThorError

T = TypeVar("T")

SHOWN = 80
"""Maximum characters of a value in a message."""
LINE = 2000
"""Maximum characters of a message, so that a huge value in one does not flood a terminal or log."""
TEXT_LIMIT = 64 << 20
"""Largest text file, bytes. A device, given by mistake, has no end."""
WORDS = {"int": "an integer", "float": "a number", "bool": "true or false", "str": "a string"}
"""Type name -> how messages describe it."""


def show(value: object) -> str:
    """A value as it would be written in TOML, shortened for a message."""
    cut = value[: SHOWN + 1] if isinstance(value, str | bytes) else value
    text = ""
    # Piece by piece, because encoding a large value completely would be slow.
    try:
        for piece in json.JSONEncoder(default=str, ensure_ascii=False).iterencode(cut):
            text += piece
            if len(text) > SHOWN:
                return text[: SHOWN - 3] + "..."
    except ValueError:  # Python does not print huge integers, which TOML can give in hex
        return text + "a number of thousands of digits"
    return text


_WRITTEN = "\u00a0\u200c\u200d\u3000"
"""Part of ordinary text, though Python does not call them printable: the no-break and ideographic
spaces, and the joiners of Persian, Indic scripts and emoji."""


def visible(text: str, keep: str = "") -> str:
    """`text` with control characters and other unprintable ones, except those in `keep`, escaped: a
    terminal would obey them, and a line break would look like the next line of a log.
    """
    if text.isprintable():  # a logged prompt may have a million characters: do not go through them
        return text
    keep += _WRITTEN
    return "".join(
        c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text
    )


def one_line(text: str) -> str:
    """A message as one line of visible characters."""
    return cut(visible(" ".join(text.split())), LINE)


def cut(text: str, most: int = SHOWN) -> str:
    """`text`, with the middle left out if it has more than `most` characters."""
    if len(text) <= most:
        return text
    end = most // 4
    return f"{text[: most - end - 5]} ... {text[-end:]}"


def check_utf8(what: str, text: str) -> None:
    """Refuse text with lone surrogates: its source was not UTF-8.

    Raises:
        RequestError: `text` has some; names `what`.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as e:
        raise RequestError(f"{what} must be UTF-8 (got: {e.reason} at {e.start})") from e


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


def nearest(name: str, known: Iterable[str], prefix: str = "") -> str:
    """`did you mean x?`, or the known names if none is similar; each with `prefix`."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1)
    if near:
        return f"did you mean {prefix}{near[0]}?"
    return f"known: {', '.join(prefix + other for other in names)}"


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


def read_text(path: Path) -> str:
    """Read a text in UTF-8 of at most TEXT_LIMIT bytes.

    Raises:
        OSError: it cannot be read.
        ValueError: it is larger, or not UTF-8.
    """
    # Read instead of asking for the size, which a device or a pipe does not have.
    with path.open("rb") as file:
        data = file.read(TEXT_LIMIT + 1)
    if len(data) > TEXT_LIMIT:
        raise ValueError(f"more than {TEXT_LIMIT} bytes")
    return data.decode("utf-8")


def load(cls: type[T], path: Path, error: type[ThorError]) -> T:
    """Build `cls` from a JSON file.

    Raises:
        error: it is missing, not JSON, or refused by `decode`; the message begins with the path.
    """
    try:
        value: object = json.loads(read_text(path))
    except OSError as e:
        raise error(f"{path} must be readable (got: {e.strerror})") from e
    except RecursionError as e:
        raise error(f"{path} must be JSON (got lists nested too deep)") from e
    except ValueError as e:
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
    rows = as_table(table)
    if rows is None:
        raise error(f"{where} must be a section (got {show(table)})")
    fields = {f.name: f for f in dataclasses.fields(typing.cast("Any", cls))}
    prefix = f"{where}." if where else ""
    for name in rows:
        if name not in fields:
            raise error(f"unknown key {prefix}{cut(name)} ({nearest(name, fields, prefix)})")
    hints = typing.get_type_hints(cls)
    for name, field in fields.items():
        if name not in rows and _required(field):
            raise error(f"{prefix}{name} must be present (got nothing)")
    return cls(**{k: _value(hints[k], v, prefix + k, error) for k, v in rows.items()})


def _required(field: dataclasses.Field[Any]) -> bool:
    missing = dataclasses.MISSING
    return field.default is missing and field.default_factory is missing


def _value(hint: Any, value: object, where: str, error: type[ThorError]) -> Any:
    if type(value) is int and not -(1 << 63) <= value < 1 << 63:
        # No use of it (as a Python float, in an array, by a library) allows larger ones.
        raise error(f"{where} must be a number of 64 bits (got {show(value)})")
    if dataclasses.is_dataclass(hint):
        return decode(typing.cast("type[Any]", hint), value, where, error)
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return _choice(args, value, where, error)
    if origin is types.UnionType:
        kinds = [arg for arg in args if arg is not type(None)]
        if len(kinds) > 1 and type(value) not in kinds:
            words = " or ".join(WORDS[kind.__name__] for kind in kinds)
            raise error(f"{where} must be {words} (got {show(value)})")
        return value if len(kinds) > 1 else _value(kinds[0], value, where, error)
    if origin is tuple:
        return _items(args[0], value, where, error)
    if origin is not None:
        return _table(args[1], value, where, error)
    return _plain(hint, value, where, error)


def _choice(known: tuple[Any, ...], value: object, where: str, error: type[ThorError]) -> object:
    if value in known:
        return value
    words = " or ".join(show(item) for item in known)
    raise error(f"{where} must be {words} (got {show(value)})")


def _items(hint: Any, value: object, where: str, error: type[ThorError]) -> tuple[Any, ...]:
    items = as_list(value)
    if items is None:
        raise error(f"{where} must be a list (got {show(value)})")
    return tuple(_value(hint, item, f"{where}[{i}]", error) for i, item in enumerate(items))


def _table(hint: Any, value: object, where: str, error: type[ThorError]) -> dict[str, Any]:
    table = as_table(value)
    if table is None:
        raise error(f"{where} must be a table (got {show(value)})")
    return {name: _value(hint, item, f"{where}.{name}", error) for name, item in table.items()}


def _plain(hint: type[Any], value: object, where: str, error: type[ThorError]) -> object:
    if type(value) is hint:  # exact: a bool is not an int here
        return value
    if hint is float and type(value) is int:
        return float(value)
    raise error(f"{where} must be {WORDS[hint.__name__]} (got {show(value)})")
