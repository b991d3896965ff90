"""Tool calls in an answer: parsed from committed ids while they arrive.

A call begins with the id of `<tool_call>` and ends with that of `</tool_call>`; the same characters
from other ids are text. Between them Qwen3.5 to 3.8 write

    <function=NAME>
    <parameter=KEY>
    VALUE
    </parameter>
    </function>

where VALUE is raw text for a string and JSON for anything else; nothing is escaped.
Source: the chat template of Qwen3.6-27B.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn, cast

from thor_dflash.core.errors import RequestError
from thor_dflash.core.message_text import show
from thor_dflash.core.strict_records import as_list, as_table

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_END_VALUE = b"</parameter>"
_FUNCTION = re.compile(rb"\s*<function=([^>\s<]+)>")
_NEXT = re.compile(rb"\s*(?:<parameter=([^>\s<]+)>|(</function>))")
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
LONGEST_TAG = 4096
"""Bytes after which what should be a tag is none, and the call is broken."""
_PYTHON = {"True": "true", "False": "false", "None": "null"}
"""Words that models write for JSON's, with what they mean."""

JsonType = Literal["string", "integer", "number", "boolean", "null", "array", "object"]
ALL: frozenset[JsonType] = frozenset(
    ("string", "integer", "number", "boolean", "null", "array", "object")
)


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call."""

    name: str
    parameters: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """JSON schema of its arguments, an object; empty: it takes none."""
    strict: bool | None = None
    """Whether the arguments must obey the schema; None: as the tool choice says."""

    def types(self, parameter: str) -> frozenset[JsonType]:
        """JSON types of a parameter; string alone for one that the schema does not describe."""
        schema = (as_table(self.parameters.get("properties")) or {}).get(parameter)
        return _types(schema, self.parameters) or frozenset(("string",))


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A complete call."""

    name: str
    arguments: str
    """JSON text of an object; values keep the characters that the model wrote."""


@dataclass(frozen=True, slots=True)
class CallPiece:
    """A part of a call, as it arrives."""

    index: int
    """Of the call within the answer, from 0."""
    name: str = ""
    """In the first piece of a call only."""
    arguments: str = ""
    """The next characters of ToolCall.arguments."""
    done: bool = False
    """The call is complete."""


def tools_of(given: object) -> tuple[Tool, ...]:
    """Read tools as OpenAI's API has them: `[{"type": "function", "function": {...}}]`.

    Raises:
        RequestError: naming the entry, `tools[i].function.name` for example.
    """
    entries = as_list(given)
    if entries is None:
        raise RequestError(f"tools must be a list (got {show(given)})")
    tools = tuple(_tool(entry, f"tools[{i}]") for i, entry in enumerate(entries))
    names = [tool.name for tool in tools]
    for i, name in enumerate(names):
        if name in names[:i]:
            raise RequestError(f"tools[{i}].function.name must be unique (got {show(name)} again)")
    return tools


def _tool(entry: object, where: str) -> Tool:
    table = as_table(entry) or {}
    if table.get("type") != "function":
        raise RequestError(f"{where}.type must be function (got {show(table.get('type'))})")
    where = f"{where}.function"
    function = as_table(table.get("function"))
    if function is None:
        raise RequestError(f"{where} must be an object (got {show(table.get('function'))})")
    if unknown := function.keys() - {"name", "description", "parameters", "strict"}:
        key = min(unknown)
        raise RequestError(f"{where}.{key} must be left out (got {show(function[key])})")
    name, strict = function.get("name"), function.get("strict")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        rule = "1 to 64 characters among A-Z, a-z, 0-9, _ and -"
        raise RequestError(f"{where}.name must be {rule} (got {show(name)})")
    if strict is not None and not isinstance(strict, bool):
        raise RequestError(f"{where}.strict must be true or false (got {show(strict)})")
    parameters = function.get("parameters")
    _check_parameters(parameters, f"{where}.parameters")
    return Tool(name, as_table(parameters) or {}, strict)


def _check_parameters(parameters: object, where: str) -> None:
    table = as_table({} if parameters is None else parameters)
    if table is None or table.get("type", "object") != "object":
        raise RequestError(f"{where} must be a schema of an object (got {show(parameters)})")
    if as_table(table.get("properties", {})) is None:
        got = show(table["properties"])
        raise RequestError(f"{where}.properties must be an object (got {got})")
    required = as_list(table.get("required", []))
    if required is None or not all(isinstance(one, str) for one in required):
        raise RequestError(
            f"{where}.required must be a list of names (got {show(table['required'])})"
        )


class ToolCallParser:
    """Splits the ids of an answer, after its thinking, into text and calls."""

    def __init__(
        self, tools: Mapping[str, Tool], marks: tuple[int, int], bytes_of: Callable[[int], bytes]
    ) -> None:
        """`marks`: the ids of OPEN and CLOSE. `bytes_of`: the bytes that an id adds to the text."""
        self._tools = tools
        self._open, self._close = marks
        self._bytes_of = bytes_of
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        """White space that belongs to the text only if more text follows."""
        self._body: _Body | None = None
        """The call that is being read."""
        self._begun = 0
        self.calls: list[ToolCall] = []
        """The complete calls."""
        self.notes: list[str] = []
        """Values that do not fit their schema and were taken as strings; broken calls."""
        self.cut: int | None = None
        """Index of the last call of which pieces were sent but that never ended."""

    def feed(self, token: int) -> Iterator[str | CallPiece]:
        """The text and the parts of calls that a committed id completes."""
        if token == self._open:
            yield from self._end_call()
            self._held = ""
            if rest := self._utf8.decode(b"", True):
                yield self._flush(rest)
            self._body = _Body(self._begun, self._tools, self.notes)
        elif self._body is None:
            yield from self._text(self._utf8.decode(self._bytes_of(token)))
        elif token == self._close:
            yield from self._end_call()
        else:
            yield from self._body.feed(self._bytes_of(token))

    def end(self) -> Iterator[str | CallPiece]:
        """What was held back when the answer ended."""
        yield from self._end_call()
        rest = self._utf8.decode(b"", True)
        if rest or (self._held and not self.calls):
            yield self._flush(rest)

    def _text(self, text: str) -> Iterator[str]:
        """Text outside calls. White space is held back: before a call and after one it goes."""
        kept = text.rstrip()
        if kept:
            yield self._flush(kept)
        self._held += text[len(kept) :]

    def _flush(self, text: str) -> str:
        text, self._held = self._held + text, ""
        return text

    def _end_call(self) -> Iterator[CallPiece]:
        body, self._body = self._body, None
        if body is None:
            return
        self._held = ""
        if body.complete:
            self.calls.append(ToolCall(body.name, body.arguments))
            yield CallPiece(body.index, done=True)
        else:
            self.notes.append(f"call {body.index} ends before its function does and is left out")
        if body.name:
            self._begun += 1
            if not body.complete:
                self.cut = body.index


class _Body:
    """One call, from its opening mark on."""

    def __init__(self, index: int, tools: Mapping[str, Tool], notes: list[str]) -> None:
        self.index = index
        self.name = ""
        self.arguments = ""
        self.complete = False
        self._tools = tools
        self._notes = notes
        self._data: bytes = b""
        self._value: _Value | None = None
        self._broken = False

    def feed(self, data: bytes) -> Iterator[CallPiece]:
        """The parts of the call that these bytes complete."""
        self._data = b"" if self.complete or self._broken else self._data + data
        while not (self.complete or self._broken):
            if self._value is not None:
                value = self._value
                yield from self._read_value(value)
                if value.open:
                    return
            elif not self.name:
                if (found := _FUNCTION.match(self._data)) is None:
                    self._broken = len(self._data) > LONGEST_TAG
                    return
                self._data = self._data[found.end() :]
                self.name = found[1].decode("utf-8", "replace")
                yield CallPiece(self.index, self.name)
            elif (found := _NEXT.match(self._data)) is None:
                self._broken = len(self._data) > LONGEST_TAG
                return
            else:
                self._data = self._data[found.end() :]
                yield from self._begin(found)

    def _begin(self, found: re.Match[bytes]) -> Iterator[CallPiece]:
        if found[2]:
            self.complete = True
            yield self._send("}" if self.arguments else "{}")
            return
        key = found[1].decode("utf-8", "replace")
        tool = self._tools.get(self.name)
        self._value = _Value(key, tool.types(key) if tool else frozenset(("string",)))
        yield self._send(", " if self.arguments else "{", json.dumps(key, ensure_ascii=False), ": ")

    def _read_value(self, value: _Value) -> Iterator[CallPiece]:
        at = self._data.find(_END_VALUE)
        keep = at if at >= 0 else len(self._data) - _begun(self._data, _END_VALUE)
        text = value.feed(self._data[:keep])
        self._data = self._data[keep:]
        if at >= 0:
            self._data = self._data[len(_END_VALUE) :]
            text += value.end(self._notes)
            value.open, self._value = False, None
        if text:
            yield self._send(text)

    def _send(self, *parts: str) -> CallPiece:
        text = "".join(parts)
        self.arguments += text
        return CallPiece(self.index, arguments=text)


def _begun(data: bytes, tag: bytes) -> int:
    """How many of the last bytes may be the beginning of a tag."""
    return next(n for n in range(min(len(data), len(tag) - 1), -1, -1) if data.endswith(tag[:n]))


class _Value:
    """One argument. Text of strings is passed on at once, other values when they are complete."""

    def __init__(self, key: str, types: frozenset[JsonType]) -> None:
        self._key = key
        self.open = True
        """Its end tag has not come."""
        self._types = types
        self._streams = types == frozenset(("string",))
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._first = True
        self._text = ""
        """A line break that may be the one before the end tag; or all, if nothing is passed on."""

    def feed(self, data: bytes) -> str:
        """JSON of these bytes, as far as it can be passed on."""
        text = self._utf8.decode(data)
        if self._first and text:
            self._first = False
            opening = '"' if self._streams else ""
            return opening + self._more(text.removeprefix("\n"))
        return self._more(text)

    def _more(self, text: str) -> str:
        self._text += text
        if not self._streams:
            return ""
        ready = self._text.removesuffix("\n")
        self._text = self._text[len(ready) :]
        return _escaped(ready)

    def end(self, notes: list[str]) -> str:
        """The rest of the value's JSON, after its last byte."""
        rest = self.feed(b"") + self._more(self._utf8.decode(b"", True))
        text = self._text.removesuffix("\n")
        if self._streams:
            return rest + ('""' if self._first else '"')
        return self._json(text, notes)

    def _json(self, text: str, notes: list[str]) -> str:
        text = text.strip() if "string" not in self._types else text
        if "null" in self._types and text == "null":
            return "null"
        if (found := _json_type(text)) and _fits(found, self._types - {"string"}, text):
            return text.strip()
        word = _PYTHON.get(text)
        if word and ("null" if word == "null" else "boolean") in self._types:
            return word
        if "string" not in self._types:
            notes.append(f"{self._key}: the value is of none of its types and is taken as a string")
        return f'"{_escaped(text)}"'


def _types(schema: object, root: Mapping[str, Any]) -> frozenset[JsonType]:
    """The JSON types that a schema allows; empty if it says nothing of them. Each $ref is followed
    once: definitions that lead to each other have no end.
    """
    found, followed, front = set[JsonType](), set[str](), [schema]
    while front:
        if (table := as_table(front.pop())) is None:
            continue
        branches = as_list(table.get("anyOf", table.get("oneOf")))
        if isinstance(ref := table.get("$ref"), str):
            front += [] if ref in followed else [resolve(root, ref)]
            followed.add(ref)
        elif branches is not None:
            front += branches
        elif (values := as_list(table.get("enum"))) is not None:
            found.update(map(_type_of, values))
        elif "const" in table:
            found.add(_type_of(table["const"]))
        else:
            found |= _named_types(table)
    return frozenset(found)


def _named_types(table: Mapping[str, object]) -> frozenset[JsonType]:
    given = table.get("type")
    names = [given] if (several := as_list(given)) is None else several
    if known := ALL.intersection(name for name in names if isinstance(name, str)):
        return known
    return frozenset(("object",)) if "properties" in table else frozenset()


def resolve(root: Mapping[str, Any], ref: str) -> object:
    """What a reference within the parameters points to, or None."""
    at: object = root
    for part in ref.removeprefix("#/").split("/"):
        if not isinstance(at, Mapping):
            return None
        at = cast("Mapping[str, object]", at).get(part.replace("~1", "/").replace("~0", "~"))
    return at


def _type_of(value: object) -> JsonType:
    names: dict[type, JsonType] = {
        str: "string", bool: "boolean", int: "integer", float: "number", list: "array",
        type(None): "null",
    }  # fmt: skip
    return names.get(type(value), "object")


def _json_type(text: str) -> JsonType | None:
    """The type of a JSON text; None if it is none."""
    try:
        return _type_of(json.loads(text, parse_constant=_refuse, parse_int=int, parse_float=float))
    except (ValueError, RecursionError):
        return None


def _refuse(word: str) -> NoReturn:
    raise ValueError(word)  # NaN and Infinity, which Python reads and JSON does not have


def _fits(found: JsonType, types: frozenset[JsonType], text: str) -> bool:
    if found in types:
        return True
    if found == "integer":
        return "number" in types
    return found == "number" and "integer" in types and float(text).is_integer()


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]
