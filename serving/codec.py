"""Bytes to requests and replies to bytes. JSON and msgpack, told apart by the first byte."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, cast

import msgspec
from msgspec import Struct

from thor_dflash.errors import PlanError
from thor_dflash.records import nearest
from thor_dflash.serving import wire

T = TypeVar("T")
Name = Literal["json", "msgpack"]

UNKNOWN = "must be a field of TDP/1"
"""What is said of a field that there is not."""
DEPTH = 64
"""Deepest nesting of a request's free values: above any schema, far below the interpreter's."""

OPERATIONS: dict[str, type[wire.Request]] = {
    "plan": wire.Ask,
    "cancel": wire.Cancel,
    "validate": wire.Validate,
    "prefix.put": wire.PrefixPut,
    "prefix.drop": wire.PrefixDrop,
    **dict.fromkeys(
        ("hello", "ping", "health", "stats", "prefix.list", "drain", "shutdown"), wire.Simple
    ),
}


@dataclass(frozen=True, slots=True)
class Codec:
    """One of the two encodings."""

    name: Name

    def encode(self, message: object) -> bytes:
        """The one body frame of a message."""
        if self.name == "json":
            return msgspec.json.encode(message)
        return msgspec.msgpack.encode(message)

    def decode(self, body: bytes, kind: type[T]) -> T:
        """A value of `kind`.

        Raises:
            PlanError: bad_request, naming the field where there is one.
        """
        try:
            if self.name == "json":
                return msgspec.json.decode(body, type=kind)
            return msgspec.msgpack.decode(body, type=kind)
        except msgspec.ValidationError as e:
            raise _explain(e) from e
        except (msgspec.DecodeError, ValueError, OverflowError) as e:
            text = str(e)[:200]
            raise PlanError("bad_request", f"body must be {self.name} (got: {text})") from e
        except RecursionError as e:
            raise PlanError("bad_request", "body must not be nested so deep") from e


JSON, MSGPACK = Codec("json"), Codec("msgpack")


def codec_of(body: bytes) -> Codec:
    """Which encoding a body is in.

    Raises:
        PlanError: neither.
    """
    first = body[0] if body else -1
    if first == 0x7B:
        return JSON
    if 0x80 <= first <= 0x8F or first in (0xDE, 0xDF):
        return MSGPACK
    raise PlanError("bad_request", "body must be a JSON object or a msgpack map")


class Head(Struct, frozen=True):
    """What is read of any body first, of any type, so that a refusal can name its request."""

    v: Any = wire.VERSION
    op: Any = None
    id: Any = None
    endpoint: Any = None
    token: Any = None
    api_token: Any = None


def id_of(head: Head) -> str | None:
    """The request's id if it is one."""
    return head.id if isinstance(head.id, str) and 1 <= len(head.id) <= 64 else None


def read(codec: Codec, body: bytes, head: Head) -> wire.Request:
    """The request in a body.

    Raises:
        PlanError: bad_request or unsupported_version.
    """
    if type(head.v) is not int or head.v != wire.VERSION:
        got = str(head.v)[:40]
        raise PlanError("unsupported_version", f"v must be {wire.VERSION} (got {got})", field="v")
    kind = OPERATIONS.get(head.op) if isinstance(head.op, str) else None
    if kind is None:
        known = nearest(str(head.op)[:40], OPERATIONS)
        raise PlanError("bad_request", f"op must be an operation ({known})", field="op")
    return _typed(codec, body, kind)


def _typed(codec: Codec, body: bytes, kind: type[wire.Request]) -> wire.Request:
    try:
        return codec.decode(body, kind)
    except PlanError as e:
        if not (e.field or "").startswith("x_"):
            raise
    # The slow way, for those who send fields of their own.
    table = codec.decode(body, dict[str, Any])
    return convert({k: v for k, v in table.items() if not k.startswith("x_")}, kind)


def convert(table: dict[str, Any], kind: type[wire.Request]) -> wire.Request:
    """A request from a table of plain values.

    Raises:
        PlanError: bad_request, naming the field.
    """
    try:
        return msgspec.convert(table, kind)
    except msgspec.ValidationError as e:
        raise _explain(e) from e


def _explain(error: msgspec.ValidationError) -> PlanError:
    """msgspec's complaint in the words of the house, with the field it is about."""
    what, _, where = str(error).partition(" - at `$")
    path = where.rstrip("`").lstrip(".")
    if unknown := re.search(r"unknown field `(.*)`", what, re.DOTALL):
        name = ".".join(part for part in (path, unknown[1][:64]) if part)
        return PlanError("bad_request", f"{name} {UNKNOWN}", field=name)
    if missing := re.search(r"required field `(.*)`", what):
        name = ".".join(part for part in (path, missing[1]) if part)
        return PlanError("bad_request", f"{name} must be present (got nothing)", field=name)
    rule = what.replace("`", "").removeprefix("Expected ")
    rule = re.sub("Invalid (enum )?value ", "one of the words of docs/protocol.md, got ", rule)
    rule, comma, got = rule.partition(", got ")
    text = f"{path or 'body'} must be {rule}" + (f" (got {got})" if comma else "")
    return PlanError("bad_request", text[:300], field=path or None)


def plain(value: object, what: str, limit: int) -> None:
    """Check a free value: JSON types only, at most DEPTH deep and `limit` bytes as JSON.

    Raises:
        PlanError: bad_request or too_large.
    """
    level: list[object] = [value]
    for _ in range(DEPTH):
        level = [child for item in level for child in _children(item, what)]
        if not level:
            break
    else:
        raise PlanError("bad_request", f"{what} must be nested <= {DEPTH} deep", field=what)
    size = len(msgspec.json.encode(value))
    if size > limit:
        raise PlanError("too_large", f"{what} must be <= {limit} bytes (got {size})", field=what)


def _children(item: object, what: str) -> list[object]:
    if isinstance(item, dict):
        table = cast("dict[object, object]", item)
        if any(not isinstance(key, str) for key in table):
            raise PlanError("bad_request", f"{what} must have string keys only", field=what)
        return list(table.values())
    if isinstance(item, list):
        return cast("list[object]", item)
    if isinstance(item, float) and item - item != 0:
        raise PlanError("bad_request", f"{what} must have finite numbers", field=what)
    if item is None or isinstance(item, str | int | float):
        return []
    kind = type(item).__name__
    raise PlanError("bad_request", f"{what} must be plain JSON values (got {kind})", field=what)


def failure(error: PlanError, id: str | None, seq: int = 0) -> wire.Failure:
    """A refusal as it is sent."""
    return wire.Failure(
        code=error.code,
        message=error.message,
        id=id,
        seq=seq,
        retryable=error.retryable,
        retry_after_ms=error.retry_after_ms,
        min_ms=error.min_ms,
        field=error.field,
    )
