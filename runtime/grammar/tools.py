"""The grammar of tool calls, as Lark text for llguidance.

It begins with the id of `<tool_call>`; the tags inside are ordinary text (text/tool_calls.py). The
**frame** holds always: declared functions, declared parameters, each at most once and in any order,
the required ones present. **Values** obey their schemas only for strict tools: of 880 expected
answers of BFCL, 24 break their own schema and 2 the frame.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

from thor_dflash.core.errors import RequestError
from thor_dflash.core.message_text import show
from thor_dflash.runtime.grammar.pattern import spanning
from thor_dflash.runtime.grammar.schema import DEFINITIONS, read
from thor_dflash.runtime.text.tool_calls import Tool

MAX_ANY_ORDER = 64
"""Parameters that may come in any order: one bit each. More come in the schema's order."""
JSON_STYLE = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "json_allowed_escapes": 'nrbtf\\"',
}
"""As chat templates print values."""
END = r"/\n?<\/parameter>\n/"
"""The line break before the tag may be missing: a model that leaves it out must not be led on
through the next calls (llama.cpp#26763)."""
_BEFORE_END = r"~/(?s:.*)<\/parameter>(?s:.*)/"
_LABELS = frozenset(("title", "description", "default", "examples", "deprecated", "$comment"))
_RANGES = frozenset(("minLength", "maxLength", "pattern"))


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """The tools of a request, and whether they must or may be called."""

    tools: tuple[Tool, ...]
    """All that the prompt declares."""
    choice: Literal["auto", "none", "required"] = "auto"
    only: frozenset[str] = frozenset()
    """Names of those that may be called; empty: all."""
    parallel: bool = True
    """Whether one answer may make more than one call."""
    values: Literal["off", "frame", "schema"] = "frame"
    """What is enforced of a call that need not be made and is not `strict`: nothing, its frame, or
    its values too."""

    @property
    def constrained(self) -> bool:
        """Whether calls need a grammar."""
        free = self.values == "off" and not any(tool.strict for tool in self.tools)
        return self.choice == "required" or (self.choice == "auto" and not free)


def call_grammar(use: ToolUse, marks: tuple[int, int], answer: str = "") -> str:
    """The Lark text of the calls that a request may make.

    Args:
        use: The tools, at least one.
        marks: The ids of `<tool_call>` and `</tool_call>`.
        answer: JSON schema of an answer that may be given instead of calls; empty: none.

    Raises:
        RequestError: the schema of a strict tool has a keyword that cannot be enforced; it names
            `tools[i].function.parameters...`.
    """
    strict = use.choice == "required" or use.values == "schema"
    tools = [(i, t) for i, t in enumerate(use.tools) if not use.only or t.name in use.only]
    if use.choice == "required":
        answer = ""
    opening, closing = marks
    names = " | ".join(f"f{i}" for i, _ in tools)
    lines = [
        "%llguidance {}",
        f"start: {'answer | calls' if answer else 'calls'}",
        'calls: call ("\\n" call)*' if use.parallel else "calls: call",
        f'call: <[{opening}]> "\\n" ({names}) "\\n" <[{closing}]>',
        f"PEND: {END}",
    ]
    if answer:
        lines.append(f"answer: %json {answer}")
    for i, tool in tools:
        enforced = strict if tool.strict is None else tool.strict
        lines += _function(i, tool, strict=enforced)
    return "\n".join(lines)


def _function(i: int, tool: Tool, *, strict: bool) -> Iterator[str]:
    properties = cast("Mapping[str, object]", tool.parameters.get("properties") or {})
    required = set(cast("Sequence[str]", tool.parameters.get("required") or ()))
    keys = list(properties)
    yield f'f{i}: {_literal(f"<function={tool.name}>")} "\\n" {_first(i, keys)} "</function>"'
    yield from _arguments(i, keys, required)
    for j, key in enumerate(keys):
        if re.search(r"[>\s<]", key):
            raise RequestError(
                f"tools[{i}].function.parameters.properties must have names without spaces and "
                f"angle brackets (got {show(key)})"
            )
        yield f'p{i}_{j}: {_literal(f"<parameter={key}>")} "\\n" v{i}_{j}'
        where = f"tools[{i}].function.parameters.properties.{key}"
        yield from _value(f"{i}_{j}", where, properties[key] if strict else {}, tool.parameters)


def _first(i: int, keys: Sequence[str]) -> str:
    if not keys:
        return ""
    return f"a{i}::0x0" if len(keys) <= MAX_ANY_ORDER else f"a{i}"


def _arguments(i: int, keys: Sequence[str], required: set[str]) -> Iterator[str]:
    """The parameters of a function: in any order, each once, with a bit for each that was given."""
    if len(keys) > MAX_ANY_ORDER:
        parts = (f"p{i}_{j}" if key in required else f"p{i}_{j}?" for j, key in enumerate(keys))
        yield f"a{i}: {' '.join(parts)}"
    elif keys:
        bits = [f"bit_set({j})" for j, key in enumerate(keys) if key in required]
        done = f" %if {_all(bits)}" if bits else ""
        rows = (f"p{i}_{j} a{i}::set_bit({j}) %if bit_clear({j})" for j in range(len(keys)))
        yield f'a{i}::_ : ""{done}\n  | ' + "\n  | ".join(rows)


def _all(conditions: Sequence[str]) -> str:
    """Lark's `and` takes two."""
    if len(conditions) == 1:
        return conditions[0]
    return f"and({conditions[0]}, {_all(conditions[1:])})"


def _value(name: str, where: str, schema: object, root: Mapping[str, Any]) -> Iterator[str]:
    """The rules of one value, up to its end tag and the line break after it."""
    branches = list(_branches(schema, where, root))
    if any(not branch for branch in branches):
        yield f"v{name}[suffix={END}]: /(?s:.*)/"
        return
    yield f"v{name}: " + " | ".join(f"v{name}_{k}" for k in range(len(branches)))
    for k, branch in enumerate(branches):
        if (pattern := branch.get("text")) is not None:
            # As a suffix the tag ends the text where it first can: a terminal of its own would come
            # too late, for the text may hold whatever begins like the tag.
            yield f"v{name}_{k}[suffix={END}]: T{name}_{k}"
            yield f"T{name}_{k}: {pattern}"
        elif (words := branch.get("words")) is not None:
            yield f"v{name}_{k}: ({' | '.join(map(_literal, words))}) PEND"
        else:
            yield f"v{name}_{k}: %json {json.dumps(branch['json'], ensure_ascii=False)} PEND"


def _branches(schema: object, where: str, root: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """What a value may be: `words`, or `text` (a Lark terminal), of raw strings; `json` (a schema);
    or nothing, for any raw string.
    """
    given: Mapping[str, Any] = (
        cast("Mapping[str, Any]", schema) if isinstance(schema, Mapping) else {}
    )
    table = {key: value for key, value in given.items() if key not in _LABELS}
    types = table.get("type")
    if inner := next((key for key in ("anyOf", "oneOf") if list(table) == [key]), ""):
        for k, one in enumerate(cast("list[object]", table[inner])):
            yield from _branches(one, f"{where}.{inner}[{k}]", root)
    elif "enum" in table or "const" in table:
        yield from _constants(cast("list[object]", table.get("enum", [table.get("const")])))
    elif isinstance(types, list):
        for one in cast("list[object]", types):
            yield from _branches({**table, "type": one}, where, root)
    elif types == "string" or not table:
        yield _string(table, where)
    else:
        yield {"json": _json(table, where, root)}


def _json(table: Mapping[str, Any], where: str, root: Mapping[str, Any]) -> Mapping[str, Any]:
    whole = {**{key: root[key] for key in DEFINITIONS if key in root}, **table}
    try:
        schema = read(whole)
        schema.check_patterns()
    except RequestError as e:
        raise RequestError(f"{where}: {e}") from e
    return {**schema.for_compiler(), "x-guidance": JSON_STYLE}


def _constants(values: Sequence[object]) -> Iterator[dict[str, Any]]:
    if words := [value for value in values if isinstance(value, str)]:
        yield {"words": words}
    if others := [value for value in values if not isinstance(value, str)]:
        yield {"words": [json.dumps(value, ensure_ascii=False) for value in others]}


def _string(table: Mapping[str, Any], where: str) -> dict[str, Any]:
    others = table.keys() - _RANGES - {"type"}
    if others:
        raise RequestError(
            f"{where}.{min(others)} must not be there: strings of a strict tool may have enum, "
            f"const, pattern, minLength and maxLength (got {show(table[min(others)])})"
        )
    if not table.keys() & _RANGES:
        return {}
    low, high = table.get("minLength", 0), table.get("maxLength", "")
    parts = [f"/(?s:.{{{low},{high}}})/", _BEFORE_END]
    if "pattern" in table:
        parts.append(f"/{spanning(f'{where}.pattern', str(table['pattern']))}/")
    return {"text": " & ".join(parts)}


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
