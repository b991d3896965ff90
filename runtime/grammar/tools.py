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
from itertools import islice
from typing import Any, Literal, cast

from thor_dflash.core.errors import RequestError
from thor_dflash.core.message_text import show
from thor_dflash.core.strict_records import as_list, as_table
from thor_dflash.runtime.grammar.pattern import spanning
from thor_dflash.runtime.grammar.schema import DEFINITIONS, read
from thor_dflash.runtime.text.tool_calls import ALL, Tool, resolve

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
_TAG = "</parameter>"
_BEFORE_END = r"~/(?s:.*)<\/parameter>(?s:.*)/"
MAX_TEXT = 1 << 20
"""Most characters of the rules of all tools. Each value that is no string takes the definitions of
its tool with it: 100 KB of them for 500 parameters would take a minute."""
MAX_CHOICES = 64
"""Most alternatives of one value, and most anyOf, oneOf and $ref one behind another."""
MAX_LENGTH = 2**31 - 1
"""Of a string, characters."""
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
    size = 0
    for i, tool in tools:
        enforced = strict if tool.strict is None else tool.strict
        for line in _function(i, tool, strict=enforced):
            lines.append(line)
            size += len(line)
            if size > MAX_TEXT:
                raise RequestError(
                    f"tools must have a grammar of <= {MAX_TEXT} characters, in which each "
                    "parameter has the definitions of its tool (got more)"
                )
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
    branches = list(islice(_branches(schema, where, root), MAX_CHOICES + 1))
    if len(branches) > MAX_CHOICES:
        raise RequestError(f"{where} must have at most {MAX_CHOICES} alternatives (got more)")
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


def _branches(
    schema: object, where: str, root: Mapping[str, Any], depth: int = 0
) -> Iterator[dict[str, Any]]:
    """What a value may be, behind `depth` choices and references: `words`, or `text` (a Lark
    terminal), of raw strings; `json` (a schema); or nothing, for any raw string.
    """
    if schema is True:
        yield {}
        return
    if (given := as_table(schema)) is None or depth > MAX_CHOICES:
        rule = f"an object of keywords, behind at most {MAX_CHOICES} anyOf, oneOf and $ref"
        raise RequestError(f"{where} must be {rule} (got {show(schema)})")
    table = {key: value for key, value in given.items() if key not in _LABELS}
    if (alternatives := _alternatives(table, where, root)) is not None:
        for one, place in alternatives:
            yield from _branches(one, place, root, depth + 1)
    elif "enum" in table or "const" in table:
        values = _several(table.get("enum", [table.get("const")]), f"{where}.enum")
        yield from _constants(values, where)
    elif table.get("type") == "string" or not table:
        yield _string(table, where)
    else:
        yield {"json": _json(table, where, root)}


def _alternatives(
    table: Mapping[str, object], where: str, root: Mapping[str, Any]
) -> list[tuple[object, str]] | None:
    """The schemas of which any may describe the value, and their places; None: this one does."""
    key, value = next(iter(table.items())) if len(table) == 1 else ("", None)
    if key == "$ref":
        return [(_target(value, where, root), where)]
    if key in ("anyOf", "oneOf") or (key == "allOf" and len(as_list(value) or ()) == 1):
        where = f"{where}.{key}"
        return [(one, f"{where}[{k}]") for k, one in enumerate(_several(value, where))]
    types = as_list(table.get("type"))
    if types is None or table.keys() & {"enum", "const"}:
        return None
    names = [one for one in _several(types, f"{where}.type") if isinstance(one, str)]
    if len(names) < len(types) or not ALL.issuperset(names):
        rule = ", ".join(sorted(ALL))
        raise RequestError(f"{where}.type must be of {rule} (got {show(types)})")
    return [({**table, "type": name}, where) for name in dict.fromkeys(names)]


def _target(ref: object, where: str, root: Mapping[str, Any]) -> object:
    target = resolve(root, ref) if isinstance(ref, str) else None
    if target is None:
        rule = "a path like #/$defs/NAME to a schema inside the parameters"
        raise RequestError(f"{where}.$ref must be {rule} (got {show(ref)})")
    return target


def _several(value: object, where: str) -> list[object]:
    if not (items := as_list(value)):
        raise RequestError(f"{where} must be a list that is not empty (got {show(value)})")
    return items


def _json(table: Mapping[str, Any], where: str, root: Mapping[str, Any]) -> Mapping[str, Any]:
    whole = {**{key: root[key] for key in DEFINITIONS if key in root}, **table}
    try:
        schema = read(whole)
        schema.check_patterns()
        for one in schema.subschemas.values():
            # To the compiler, another path would begin at the value instead of the parameters.
            if one.ref and not one.ref.startswith(tuple(f"#/{key}/" for key in DEFINITIONS)):
                raise RequestError(f"{one.where}.$ref must lead to $defs (got {show(one.ref)})")
    except RequestError as e:
        raise RequestError(f"{where}: {e}") from e
    return {**schema.for_compiler(), "x-guidance": JSON_STYLE}


def _constants(values: Sequence[object], where: str) -> Iterator[dict[str, Any]]:
    words = [value for value in values if isinstance(value, str)]
    others = [json.dumps(v, ensure_ascii=False) for v in values if not isinstance(v, str)]
    if ended := [word for word in (*words, *others) if _TAG in word]:
        raise RequestError(f"{where}.enum must be without {_TAG} (got {show(ended[0])})")
    yield from ({"words": found} for found in (words, others) if found)


def _string(table: Mapping[str, Any], where: str) -> dict[str, Any]:
    others = table.keys() - _RANGES - {"type"}
    if others:
        raise RequestError(
            f"{where}.{min(others)} must not be there: strings of a strict tool may have enum, "
            f"const, pattern, minLength and maxLength (got {show(table[min(others)])})"
        )
    if not table.keys() & _RANGES:
        return {}
    low, high = (_length(table, key, where) for key in ("minLength", "maxLength"))
    if low is not None and high is not None and low > high:
        raise RequestError(f"{where}.minLength must be <= maxLength (got {low} and {high})")
    parts = [f"/(?s:.{{{low or 0},{'' if high is None else high}}})/", _BEFORE_END]
    if "pattern" in table:
        if not isinstance(pattern := table["pattern"], str):
            raise RequestError(f"{where}.pattern must be a string (got {show(pattern)})")
        parts.append(f"/{spanning(f'{where}.pattern', pattern)}/")
    return {"text": " & ".join(parts)}


def _length(table: Mapping[str, Any], key: str, where: str) -> int | None:
    value: object = table.get(key)
    if key in table and not (type(value) is int and 0 <= value <= MAX_LENGTH):
        raise RequestError(f"{where}.{key} must be 0 to {MAX_LENGTH} (got {show(value)})")
    return value if isinstance(value, int) else None


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
