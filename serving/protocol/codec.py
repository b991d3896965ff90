"""Decodes requests and encodes replies, in JSON or msgpack, distinguished by the first byte."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from types import UnionType
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin

import msgspec
from msgspec import Raw, Struct, structs

from thor_dflash.core.bounds import LARGEST
from thor_dflash.core.errors import PlanError
from thor_dflash.core.message_text import nearest, show, visible
from thor_dflash.core.strict_records import WORDS, as_list, as_table
from thor_dflash.serving.protocol import messages
from thor_dflash.serving.protocol.errors import bad_request

T = TypeVar("T")
Name = Literal["json", "msgpack"]

UNKNOWN = "must be a field of TDP/1"
"""Error text for an unknown field."""
NAME = 64
"""Most characters of a received name that an error message repeats."""
DEPTH = 64
"""Deepest nesting of a request's free-form values: above any schema, far below the interpreter's
recursion limit."""
HEAD_BYTES = 1024
"""Most bytes of a field of the head, as encoded. A longer one is none that could be valid."""
FREE_FORM_BYTES = 1 << 17
"""Most bytes of a free-form field of a request, as encoded, and of its unknown fields together."""
MOST_IMAGES = 1024
"""Most images of a request that are decoded."""
SHOWN_BYTES = 1 << 16
"""Most bytes of a top-level field that are decoded to show a faulty value in it."""

KINDS = {
    **WORDS,
    "array": "a list",
    "object": "an object",
    "bytes": "bytes, which are base64 in JSON",
}
"""msgspec's names of types, in words."""
OPERATIONS: dict[str, type[messages.Request]] = {
    "plan": messages.PlanRequest,
    "cancel": messages.Cancel,
    "validate": messages.Validate,
    "prefix.put": messages.PrefixPut,
    "prefix.drop": messages.PrefixDrop,
    "session.drop": messages.SessionDrop,
    **dict.fromkeys(
        ("hello", "ping", "health", "stats", "prefix.list", "drain", "shutdown"), messages.Simple
    ),
}


@dataclass(frozen=True, slots=True)
class Codec:
    """One of the two encodings."""

    name: Name

    def encode(self, message: object) -> bytes:
        """Encode a message as its one body frame."""
        if self.name == "json":
            return msgspec.json.encode(message)
        return msgspec.msgpack.encode(message)

    def decode(self, body: bytes, kind: type[T]) -> T:
        """Decode a value of type `kind`.

        Raises:
            PlanError: bad_request, naming the field if one is at fault.
        """
        try:
            return cast("T", _decoder(self.name, cast("Any", kind)).decode(body))
        except msgspec.ValidationError as e:
            raise _explain(e, kind, lambda name: self._field(body, name)) from e
        except (msgspec.DecodeError, ValueError, OverflowError) as e:
            text = str(e)[:200]
            raise bad_request(f"body must be valid {self.name} (got: {text})") from e
        except RecursionError as e:
            text = "body must be nested less deeply (got more levels than can be read)"
            raise bad_request(text) from e

    def split(self, body: bytes) -> dict[str, Raw]:
        """Return the fields of a body with their values still encoded.

        Raises:
            PlanError: as `decode`.
        """
        return self.decode(body, dict[str, Raw])

    def _field(self, body: bytes, name: str) -> dict[str, Any]:
        """Decode one field of a body, unless it is too long to be shown."""
        value = self.split(body).get(name, Raw())
        return (
            {name: self.decode(bytes(value), cast("type[Any]", Any))}
            if 0 < len(value) <= SHOWN_BYTES
            else {}
        )


@cache
def _decoder(name: Name, kind: Any) -> Any:
    if name == "json":
        return msgspec.json.Decoder(kind, float_hook=_float)
    return msgspec.msgpack.Decoder(kind)


def _float(text: str) -> float:
    # Not msgspec's own: it takes 25 us for a literal such as 1e308, which is 4 s for 1 MiB of them.
    value = float(text)
    if math.isinf(value):
        raise ValueError("Number out of range")
    return value


JSON, MSGPACK = Codec("json"), Codec("msgpack")


def codec_of(body: bytes) -> Codec:
    """Return the codec of a body.

    Raises:
        PlanError: it is neither JSON nor msgpack.
    """
    first = body[0] if body else -1
    if first == 0x7B:
        return JSON
    if 0x80 <= first <= 0x8F or first in (0xDE, 0xDF):
        return MSGPACK
    got = "nothing" if not body else f"a first byte of 0x{first:02x}"
    raise bad_request(f"body must be a JSON object or a msgpack map (got {got})")


def is_object(codec: Codec, value: bytes) -> bool:
    """Whether an encoded value is a JSON object or a msgpack map."""
    try:
        return codec_of(value) == codec
    except PlanError:
        return False


class Head(Struct, frozen=True):
    """The fields that are read first, of any type, so that an error can name its request."""

    v: Any = messages.VERSION
    op: Any = None
    id: Any = "-"
    endpoint: Any = None
    token: Any = None
    api_token: Any = None


class _RawHead(Struct, frozen=True):
    """The fields of Head, still encoded; empty if left out. Other fields are skipped."""

    v: Raw = Raw()
    op: Raw = Raw()
    id: Raw = Raw()
    endpoint: Raw = Raw()
    token: Raw = Raw()
    api_token: Raw = Raw()


def head_of(codec: Codec, body: bytes) -> Head:
    """Read the head of a body. The time it takes is bounded by the length of the body (1 to 3 ms
    for 1 MiB), as other fields are only skipped.

    Raises:
        PlanError: bad_request.
    """
    if len(body) <= HEAD_BYTES:
        return codec.decode(body, Head)
    fields: dict[str, Raw] = structs.asdict(codec.decode(body, _RawHead))
    return Head(**{name: short(codec, raw) for name, raw in fields.items() if len(raw)})


def short(codec: Codec, raw: Raw) -> Any:
    """Decode a value if it is short; otherwise return a list, which no field of a head may be."""
    if len(raw) > HEAD_BYTES:
        return [f"a value of {len(raw)} bytes"]
    return codec.decode(bytes(raw), cast("type[Any]", Any))


def id_of(head: Head) -> str | None:
    """Return the request's id, or None if it is not a valid one."""
    return head.id if isinstance(head.id, str) and 1 <= len(head.id) <= 64 else None


def read(codec: Codec, body: bytes, head: Head, most: int = LARGEST) -> messages.Request:
    """Decode the request in a body, which may have `most` bytes beside its images.

    Raises:
        PlanError: bad_request, too_large or unsupported_version.
    """
    check_version(head.v)
    kind = OPERATIONS.get(head.op) if isinstance(head.op, str) else None
    if kind is None:
        known = nearest(head.op[:40] if isinstance(head.op, str) else "", OPERATIONS)
        text = f"op must be an operation (got {shown(head.op)}; {known})"
        raise bad_request(text, "op")
    return typed(codec, body, kind, most)


def check_version(v: object) -> None:
    """Refuse a request of another protocol version.

    Raises:
        PlanError: unsupported_version.
    """
    if type(v) is not int or v != messages.VERSION:
        text = f"v must be {messages.VERSION} (got {shown(v)})"
        raise PlanError("unsupported_version", text, field="v")


def typed(codec: Codec, body: bytes, kind: type[T], most: int = LARGEST) -> T:
    """Decode a request without the sender's custom `x_` fields, whose values are not decoded.

    Raises:
        PlanError: bad_request or too_large, naming the field.
    """
    if len(body) > FREE_FORM_BYTES:
        _check_sizes(codec, body, most)
    try:
        return codec.decode(body, kind)
    except PlanError as e:
        if not (e.field or "").startswith("x_"):
            raise
    return codec.decode(codec.encode(ours(codec.split(body))), kind)


FREE_FORM = (
    "json_schema", "skills", "response_format", "metadata", "tools", "tool_choice",
    "chat_template_kwargs",
)  # fmt: skip
"""The fields of a request whose values may hold anything."""


class _RawCalls(Struct, frozen=True, gc=False):
    """The part of a message whose value may hold anything, still encoded."""

    tool_calls: Raw = Raw()


class _AnyObject(Struct, frozen=True, gc=False):
    """An object of which nothing is decoded."""


@cache
def _raw_fields() -> type[Struct]:
    """A table of every field that some request has, with its value still encoded."""
    kinds = set(OPERATIONS.values())
    names = {f.encode_name: f.name for kind in kinds for f in structs.fields(kind)}
    fields: list[Any] = [(name, Raw, Raw()) for name in names.values()]
    return msgspec.defstruct("RawFields", fields, rename={n: e for e, n in names.items()})


def _check_sizes(codec: Codec, body: bytes, most: int) -> None:
    """Refuse a body of which much is neither text nor of a known type: decoding such values may
    take 100 times as long as decoding text. Refuse more than `most` bytes that are no images.
    """
    fields: dict[str, Raw] = structs.asdict(codec.decode(body, _raw_fields()))
    sizes = {name: len(raw) for name, raw in fields.items()}
    if (rest := len(body) - sizes["images"]) > most:
        text = f"a request must be <= {most} bytes without its images (got {rest})"
        raise PlanError("too_large", text)
    if (count := _images_count(codec, bytes(fields["images"]))) > MOST_IMAGES:
        text = f"images must be at most {MOST_IMAGES} (got {count})"
        raise PlanError("too_large", text, field="images")
    own = len(body) - sum(sizes.values())
    calls = {"tool_calls of messages": _calls_size(codec, bytes(fields["messages"]))}
    for name, size in (
        {name: sizes[name] for name in FREE_FORM} | calls | {"x_ fields": own}
    ).items():
        if size > FREE_FORM_BYTES:
            text = f"{name} must be <= {FREE_FORM_BYTES} bytes as encoded (got {size})"
            raise PlanError("too_large", text, field=name if name in FREE_FORM else None)


def _calls_size(codec: Codec, encoded: bytes) -> int:
    # A key may be written with \u. To look for the bytes takes 0.1 ms, the messages apart 6.
    named = b"tool_calls" in encoded or b"\\u" in encoded
    if len(encoded) <= FREE_FORM_BYTES or not named:
        return 0
    turns = _list_of(codec, encoded, list[_RawCalls], "messages")
    return sum(len(turn.tool_calls) for turn in turns)


def _images_count(codec: Codec, encoded: bytes) -> int:
    long = len(encoded) > FREE_FORM_BYTES
    return len(_list_of(codec, encoded, list[_AnyObject], "images")) if long else 0


def _list_of(codec: Codec, encoded: bytes, kind: type[list[T]], name: str) -> list[T]:
    try:
        return codec.decode(encoded, kind)
    except PlanError as e:
        raise bad_request(f"{name} must be a list of objects (got another)", name) from e


def ours(table: dict[str, Raw]) -> dict[str, Raw]:
    """Return a request without the sender's custom `x_` fields."""
    return {k: v for k, v in table.items() if not k.startswith("x_")}


def convert(table: dict[str, Any], kind: type[T]) -> T:
    """Convert a table of plain values to a request.

    Raises:
        PlanError: bad_request, naming the field.
    """
    try:
        return msgspec.convert(table, kind)
    except msgspec.ValidationError as e:
        raise _explain(e, kind, lambda name: table) from e


def check_fields(request: messages.PlanRequest, *names: str) -> None:
    """Check the types and ranges of some fields as decoding does, for a program that made the
    request in its own process.

    Raises:
        PlanError: bad_request, naming the field.
    """
    convert({name: getattr(request, name) for name in names}, messages.PlanRequest)


def _explain(
    error: msgspec.ValidationError, kind: Any, source: Callable[[str], dict[str, Any]]
) -> PlanError:
    """Rephrase msgspec's error as "FIELD must be RULE (got VALUE)" and name the field. `source`
    returns a table with the named field; without it, if its value is too long to be shown.
    """
    what, _, where = str(error).partition(" - at `")
    key = where.startswith("key` in `")
    path = where.rstrip("`").removeprefix("key` in `").lstrip("$.")
    keyed = "[...]" in path and path[0] != "["
    hint, value = kind, None
    if keyed:
        path, hint, value = _with_keys(path, kind, source(path.partition(".")[0]))
    if unknown := re.search(r"unknown field `(.*)`", what, re.DOTALL):
        name = ".".join(part for part in (path, unknown[1][:NAME]) if part)
        like = "" if path else _like(name, kind)
        return bad_request(f"{name} {UNKNOWN}{like}", name)
    if missing := re.search(r"required field `(.*)`", what):
        name = ".".join(part for part in (path, missing[1]) if part)
        return bad_request(f"{name} must be present (got nothing)", name)
    words = _words(hint if keyed else _hint(kind, path))
    rule, got = (words, "another") if words else _rule(what)
    if key:
        rule = f"an object whose every key is {rule}"
    elif keyed:
        got = shown(value)
    elif path and "[...]" not in path and "range" not in got:
        name = path.partition(".")[0].partition("[")[0]
        got = _at(table, path) if name in (table := source(name)) else ""
    # Without a field name, the error is inside a value whose key may be any name.
    named = path[:1] not in ("", "[")
    text = f"{(path if named else 'body' + path)[:100]} must be {rule} (got {got or 'another'})"
    return bad_request(text, path if named else None)


def _like(name: str, kind: type) -> str:
    """Suggest the known field with the most similar name, or return ""."""
    if name.startswith("x_"):  # not a mistake: every request with such a field comes through here
        return ""
    known = [field.encode_name for field in structs.fields(kind)]
    near = get_close_matches(name, known, n=1)
    return f" (did you mean {near[0]}?)" if near else ""


def _rule(what: str) -> tuple[str, str]:
    """Return what msgspec expected and, as far as it says so, what it got."""
    if what.endswith("out of range"):
        return "a number of 64 bits", "one out of range"
    if re.match("Invalid (enum )?value", what):
        return "one of the words of docs/reference/protocol.md", "another"
    if what.startswith("Invalid base64"):
        return "base64 with its padding", ""
    text = re.sub("`(.*?)`", lambda kinds: _in_words(kinds[1]), what)
    rule, _, got = text.removeprefix("Expected ").partition(", got ")
    return rule, got


def _hint(kind: type, path: str) -> Any:
    """Return the type of the field at `path`; None if it has none."""
    hint: Any = kind
    for name in re.findall(r"[^.\[\]]+", path):
        hint = _inner(hint, name)
    return hint


def _words(hint: Any) -> str:
    """Return the words that a field of this type may be; "" if it is no choice of words."""
    kinds = [part for part in _parts(hint) if get_origin(part) is Literal]
    words = [str(word) for part in kinds for word in get_args(part)]
    if words and bool in _parts(hint):  # no field takes true beside words
        words.insert(0, "false")
    return " or ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))


def _with_keys(path: str, kind: Any, value: Any) -> tuple[str, Any, Any]:
    """Return a path with the keys of tables, which msgspec writes as [...]: of the values of a
    table, the first that is not of their type is at fault. And the type and value of its end.
    """
    named, hint = "", kind
    for part in re.findall(r"\[\.\.\.\]|\[\d+\]|[^.\[\]]+", path):
        hint, key = _inner(hint, part), part
        table = as_table(value) or {}
        if part == "[...]":
            key = next((k for k, item in table.items() if not _converts(item, hint)), part)
        row = part[1:-1].isdecimal() and as_list(value)
        value = row[int(part[1:-1])] if row else table.get(key)
        named += part if key == part and part[0] == "[" else f".{visible(key[:NAME])}"
    return named[1:], hint, value


def _converts(value: Any, kind: Any) -> bool:
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError:
        return False
    return True


def _inner(hint: Any, name: str) -> Any:
    """Return the type of a field, or of an item if `name` is an index; None if it has none."""
    for part in _parts(hint):
        if get_origin(part) is dict:
            return get_args(part)[1]
        if isinstance(part, type) and issubclass(part, Struct):
            return next((f.type for f in structs.fields(part) if f.encode_name == name), None)
        if get_origin(part) is tuple:
            return get_args(part)[0]
    return None


def _parts(hint: Any) -> tuple[Any, ...]:
    """Return the types of a union, or the one type that `hint` is."""
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _in_words(kinds: str) -> str:
    return " or ".join(KINDS.get(kind, kind) for kind in kinds.split(" | "))


def _at(value: Any, path: str) -> str:
    try:
        for name, index in re.findall(r"([^.\[\]]+)|\[(\d+)\]", path):
            value = value[int(index) if index else name]
    except (KeyError, IndexError, TypeError):  # of duplicate names a table keeps only the last
        return "a name more than once"
    return shown(value)


def shown(value: object) -> str:
    """Return a value of a message as text, shortened."""
    try:
        return show(value)
    except (TypeError, ValueError, RecursionError):  # expressible in msgpack but not in JSON
        return f"a value of type {type(value).__name__}"


def check_plain(value: object, what: str, limit: int) -> None:
    """Check a free-form value: JSON types only, at most DEPTH deep and `limit` bytes as JSON.

    Raises:
        PlanError: bad_request or too_large.
    """
    level: list[object] = [value]
    for _ in range(DEPTH):
        level = [child for item in level for child in _children(item, what)]
        if not level:
            break
    else:
        text = f"{what} must be nested <= {DEPTH} deep (got more)"
        raise bad_request(text, what)
    try:
        size = len(msgspec.json.encode(value))
    except UnicodeEncodeError as e:
        raise bad_request(f"{what} must be UTF-8 (got an unpaired surrogate)", what) from e
    if size > limit:
        raise PlanError("too_large", f"{what} must be <= {limit} bytes (got {size})", field=what)


def _children(item: object, what: str) -> list[object]:
    if isinstance(item, dict):
        table = cast("dict[object, object]", item)
        if other := [key for key in table if not isinstance(key, str)]:
            text = f"{what} must have string keys only (got {shown(other[0])})"
            raise bad_request(text, what)
        return list(table.values())
    if isinstance(item, list):
        return cast("list[object]", item)
    if isinstance(item, float) and item - item != 0:
        text = f"{what} must have finite numbers (got {item})"
        raise bad_request(text, what)
    if item is None or isinstance(item, str | int | float):
        return []
    kind = type(item).__name__
    raise bad_request(f"{what} must be plain JSON values (got {kind})", what)
