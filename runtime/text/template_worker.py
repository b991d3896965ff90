"""The script of the process that renders chat templates: see template_process.py.

Reads requests from stdin, each two lines of JSON: one with "source", "names", "tools" and
"options", and the messages. With null for these a template is only compiled, and the text is a JSON
list of the variables that it reads. Arguments of tool calls are JSON texts, so no message holds a
number.
Writes answers to stdout, each a line `<kind> <bytes>` and so many bytes of UTF-8: a kind of `text`
with the text, or `invalid` (the template) or `refused` (the messages) with the reason.

Imports nothing of thor-dflash, so that it starts quickly and needs little memory. It ends by itself
when its stdin ends or when a rendering exceeds its limits (SIGPROF, MemoryError).
"""

from __future__ import annotations

import json
import re
import resource
import secrets
import signal
import sys
from collections.abc import Mapping
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn, cast

import jinja2
import msgspec
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

KEPT = 4
"""Compiled templates that are kept."""
REASON = 1000
"""Most characters of an error, which may quote what the template made."""


class _TooLong(Exception):
    """The text exceeds its limit."""


class _Generation(Extension):
    """The tag around a model's own output, which only training uses."""

    tags = {"generation"}  # noqa: RUF012  # declared so by jinja

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # A scope, as in transformers: what is set inside is not seen after it.
        return nodes.Scope(body, lineno=line)


_OF_DICTS = frozenset(dir(dict))
_KNOWN = 1024
"""Attributes whose safety is kept in mind."""


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox. A long chat has thousands of lookups, so two of its ways are shortened."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._safe: dict[tuple[type, str], bool] = {}

    def getattr(self, obj: Any, attribute: str) -> Any:
        # Jinja tries the attribute first, which for a key of a message raises an error each time.
        if type(obj) is dict and attribute not in _OF_DICTS:
            given = cast("dict[str, Any]", obj)
            if attribute in given:
                return given[attribute]
            return self.undefined(obj=given, name=attribute)
        return super().getattr(obj, attribute)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        # Jinja decides by the kind of object and the name, through dozens of `isinstance`.
        key = type(cast("object", obj)), attr
        found = self._safe.get(key)
        if found is None:
            found = super().is_safe_attribute(obj, attr, value)
            if len(self._safe) < _KNOWN:
                self._safe[key] = found
        return found


def answer(request: Mapping[str, Any], limit: int) -> tuple[str, bytes]:
    """Render one request to a text of at most `limit` characters. Returns kind and text."""
    try:
        template = _compiled(request["source"])
    except (jinja2.TemplateError, SyntaxError, RecursionError, ValueError) as e:
        # Jinja turns a template into Python, whose compiler has limits and rules of its own.
        return "invalid", _reason(str(e))
    except Exception as e:  # jinja computes constant expressions, which can raise anything
        return "invalid", _reason(f"{type(e).__name__}: {e}")
    if request["messages"] is None:
        names = meta.find_undeclared_variables(template.environment.parse(request["source"]))
        return "text", json.dumps(sorted(names)).encode()
    try:
        return "text", _text(template, request, limit).encode()
    except _TooLong:
        return "refused", _reason(f"more than {limit} characters")
    except jinja2.TemplateError as e:
        return "refused", _reason(str(e))
    except Exception as e:  # a template is a program and can raise anything
        return "refused", _reason(f"{type(e).__name__}: {e}")


def _reason(text: str) -> bytes:
    return text[:REASON].encode(errors="backslashreplace")


def _text(template: jinja2.Template, request: Mapping[str, Any], limit: int) -> str:
    parts, length = list[str](), 0
    for part in template.generate(
        request["names"],
        messages=[_with_arguments(message) for message in request["messages"]],
        tools=request["tools"] or None,
        documents=None,
        add_generation_prompt=True,
        **request["options"],
    ):
        parts.append(part)
        length += len(part)
        if length > limit:
            raise _TooLong
    return "".join(parts)


class _Number(str):
    """The characters of a number that Python's own would not keep: 0.10, 1e400."""

    __slots__ = ()


_MARK = secrets.token_hex(8)
_MARKED = re.compile(rf'"{_MARK}(.*?){_MARK}"')


def _with_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose tool calls have the mapping that templates want."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    functions = [call["function"] for call in calls]
    parsed = [
        {**one, "arguments": json.loads(one["arguments"], parse_float=_number)} for one in functions
    ]
    return {**message, "tool_calls": [{"function": one} for one in parsed]}


def _number(text: str) -> float | _Number:
    return number if repr(number := float(text)) == text else _Number(text)


def _marked(value: Any) -> Any:
    if isinstance(value, _Number):
        return f"{_MARK}{value}{_MARK}"
    if isinstance(value, dict):
        table = dict[str, Any](value)  # pyright: ignore[reportUnknownArgumentType]
        return {key: _marked(inner) for key, inner in table.items()}
    if isinstance(value, list):
        items = list[Any](value)  # pyright: ignore[reportUnknownArgumentType]
        return [_marked(inner) for inner in items]
    return value


@lru_cache(KEPT)
def _compiled(source: str) -> jinja2.Template:
    env = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation])
    env.filters["tojson"] = _tojson
    # update, not assignment: jinja types the values of its own globals only.
    env.globals.update(_globals())
    return env.from_string(source)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja's own filter escapes for HTML, and a prompt is not HTML.
    text = json.dumps(
        _marked(value),
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
    return _MARKED.sub(r"\1", text)


def _globals() -> dict[str, Any]:
    return {"raise_exception": _refuse, "strftime_now": _now}


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def main(seconds: float, memory: int, limit: int) -> None:
    """Answer requests until stdin ends. `seconds` of processor time for each, `memory` in bytes for
    the process, `limit` in characters of a text.
    """
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    least = memory if most == resource.RLIM_INFINITY else min(memory, most)
    resource.setrlimit(resource.RLIMIT_DATA, (least, least))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    for line in sys.stdin.buffer:
        # Processor time, which other programs on the machine do not use up.
        signal.setitimer(signal.ITIMER_PROF, seconds)
        messages = msgspec.json.decode(sys.stdin.buffer.readline())
        kind, text = answer({**json.loads(line), "messages": messages}, limit)
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.buffer.write(f"{kind} {len(text)}\n".encode() + text)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
