"""Checks a JSON schema before it is compiled."""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, cast
from urllib.parse import unquote

from thor_dflash.core.errors import RequestError
from thor_dflash.core.message_text import check_utf8, show
from thor_dflash.core.strict_records import as_list, as_table

MAX_BYTES = 128 << 10
"""Maximum schema size, bytes of compact JSON. Ten skills over forty objects are about 6 KB."""
MAX_DEPTH = 64
"""Maximum nesting of the schema's own JSON. A plan's is 12; the compiler gives up at 128."""
MAX_TOGETHER = 4
"""Maximum number of patterns and formats that one value must obey. The compiler intersects them:
from some twenty on, one mask of an intersection can take minutes and gigabytes, which none of the
compiler's own limits prevents."""
MAX_CHAIN = 32
"""Rounds in which the counts of patterns follow the $ref. Each takes 10 ms at most, and a chain of
definitions in the worst order needs one for each $ref. A plan's schema needs three."""
MAX_LEVELS = 256
"""Maximum depth of schemas in schemas with every $ref followed; each of a cycle counts once. A
plan's is 9. The compiler recurses: some 1,800 overflow a stack of 8 MB, the usual one."""
MAX_BOUND: Mapping[type, int] = {int: 2**53 - 1, float: (2**53 - 1) // 10}
"""Largest absolute value of a bound. The compiler stores bounds as float64, one with a decimal
point as all its digits over ten, and converts them to int64: larger ones would change silently, and
the lowest would crash it."""

_WHOLE = MAX_BOUND[int]
"""Largest absolute value of a literal number: the compiler stores literals as float64 too."""
_PLACES = 300
"""Maximum decimal places of a literal: the compiler's power of ten is a float64."""
_CONTROLS = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")
"""Control characters that JSON can only escape as \\u, which answers may not use."""
_LOW, _HIGH = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
_BOUNDS = frozenset((*_LOW, *_HIGH))
_PLAIN = _BOUNDS | frozenset(
    "type const enum required minItems maxItems minLength maxLength pattern format $ref".split()
)
_NOTES = frozenset("title description default examples deprecated $comment $schema".split())
"""Annotations, which do not affect validity."""
_TEXTS = ("pattern", "format")
_ONE = frozenset(("items", "additionalProperties"))
_SAME = frozenset(("anyOf", "oneOf", "allOf"))
_MANY = _SAME | {"prefixItems"}
_NAMED = frozenset(("properties", "$defs", "definitions"))
KEYWORDS = _PLAIN | _NOTES | _ONE | _MANY | _NAMED
"""All others are refused by name: the compiler would silently ignore some of them."""


@dataclass(frozen=True, slots=True)
class Node:
    """One schema inside a schema."""

    where: str
    """Dotted path, `schema` at the top."""
    at: str
    """The value of a $ref to it."""
    table: Mapping[str, object]


def text_of(schema: str | Mapping[str, Any]) -> str:
    """Check a schema; return it as compact JSON with its keys in the order given, which is also the
    order of an answer's keys.

    Raises:
        RequestError: not a JSON object, too long, too deep, or with an unsupported keyword, bound,
        literal or $ref.
    """
    table = _table(schema)
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=False, default=_no_json)
    check_utf8("schema", text)
    if (size := len(text.encode())) > MAX_BYTES:
        raise RequestError(f"schema must be at most {MAX_BYTES} bytes of JSON (got {size})")
    for node in nodes(table):
        for key in node.table:
            if key not in KEYWORDS:
                raise RequestError(
                    f"{node.where} must have supported keywords only (got {show(key)})"
                )
        _check_bounds(node)
        if node.table.get("format") == "unknown":  # to the compiler this word means none
            raise RequestError(f'{node.where}.format must be a known format (got "unknown")')
        for key in node.table.keys() & {"const", "enum"}:
            _check_literal(f"{node.where}.{key}", node.table[key])
    _check_refs(table)
    _check_levels(table)
    return text


def _check_bounds(node: Node) -> None:
    for key, value in node.table.items():
        most = MAX_BOUND.get(type(value)) if key in _BOUNDS else None
        if most and isinstance(value, int | float) and not -most <= value <= most:
            raise RequestError(f"{node.where}.{key} must be {-most} to {most} (got {show(value)})")


def _check_literal(where: str, value: object) -> None:
    if isinstance(value, int | float) and not _kept(value):
        raise RequestError(
            f"{where} must be {-_WHOLE} to {_WHOLE}, with so few digits that the compiler keeps it "
            f"exactly (got {show(value)})"
        )
    if isinstance(value, str) and _CONTROLS.search(value):
        raise RequestError(
            f"{where} must have no control characters but \\b, \\t, \\n, \\f and \\r "
            f"(got {show(value)})"
        )
    for i, inner in enumerate(as_list(value) or ()):
        _check_literal(f"{where}[{i}]", inner)
    for name, inner in (as_table(value) or {}).items():
        _check_literal(f"{where}.{name}", inner)


def _kept(value: float) -> bool:
    """Whether the compiler reads a number exactly: it rounds the digits to float64, divides by a
    power of ten and rounds again.
    """
    if not -_WHOLE <= value <= _WHOLE:
        return False
    _, digits, exponent = Decimal(repr(abs(value) + 0)).as_tuple()
    number, places = int("".join(map(str, digits))), -int(exponent)
    return places <= _PLACES and float(number) / float(10**places) == abs(value)


def _check_refs(schema: Mapping[str, object]) -> None:
    """Refuse a $ref to anything but a schema in this document: it would bypass the checks."""
    places = {at for _, at, _ in _schemas(schema)}
    for node in nodes(schema):
        ref = node.table.get("$ref")
        if isinstance(ref, str) and unquote(ref) not in places:
            raise RequestError(
                f"{node.where}.$ref must be #, or a path like #/$defs/NAME to a schema inside this "
                f"one (got {show(ref)})"
            )


def _check_levels(schema: Mapping[str, object]) -> None:
    """Refuse definitions that lead to others, and these to others, too often."""
    places = {at: value for _, at, value in _schemas(schema)}
    own, edges, front = dict[str, int](), dict[str, set[str]](), ["#"]
    while front:
        if (at := front.pop()) not in own:
            own[at], edges[at] = _own(places[at])
            front += edges[at]
    if (levels := _longest(own, edges)) > MAX_LEVELS:
        raise RequestError(
            f"schema must be at most {MAX_LEVELS} schemas deep with every $ref followed "
            f"(got {levels})"
        )


def _own(schema: object) -> tuple[int, set[str]]:
    """The depth of a schema, without what a $ref leads to, and where those lead."""
    deepest, refs, front = 0, set[str](), [(schema, 1)]
    while front:
        here, level = front.pop()
        deepest = max(deepest, level)
        for key, value in (as_table(here) or {}).items():
            if key == "$ref" and isinstance(value, str):
                refs.add(unquote(value))
            elif key not in ("$defs", "definitions"):
                front += [(inner, level + 1) for _, _, inner in _inside(key, value, "")]
    return deepest, refs


def _longest(own: Mapping[str, int], edges: Mapping[str, set[str]]) -> int:
    """The longest way along edges, a sum of `own`. Those that lead to each other, a group, count
    all together. Source of the groups: Kosaraju's algorithm (Sharir 1981).
    """
    back: dict[str, set[str]] = {at: set() for at in edges}
    for at, tos in edges.items():
        for to in tos:
            back[to].add(at)
    seen, group = set[str](), dict[str, list[str]]()
    for at in reversed(_finished(edges, edges, set())):
        group |= dict.fromkeys(found := _finished([at], back, seen), found)
    ways: dict[str, int] = {}
    for at in reversed(group):  # the last groups lead to no others
        if at not in ways:
            out = (ways.get(to, 0) for one in group[at] for to in edges[one])
            ways |= dict.fromkeys(group[at], max(out, default=0) + sum(own[x] for x in group[at]))
    return max(ways.values())


def _finished(starts: Iterable[str], edges: Mapping[str, set[str]], seen: set[str]) -> list[str]:
    """What can be reached and is not in `seen`, to which it is added, in the order in which a
    depth-first search leaves it.
    """
    order: list[str] = []
    front = [(at, False) for at in starts]
    while front:
        at, done = front.pop()
        if done:
            order.append(at)
        elif at not in seen:
            seen.add(at)
            front.append((at, True))
            front += [(to, False) for to in edges[at]]
    return order


def check_near(schema: str) -> None:
    """Refuse an integral exclusive bound with the other bound less than 1 away: the compiler would
    take it as inclusive. The bounds of one value may be spread over a schema, so this can be slow.

    Raises:
        RequestError: the schema has such a bound.
    """
    if '"exclusiveM' not in schema:
        return
    table = cast("dict[str, object]", json.loads(schema))
    tables = {node.at: node.table for node in nodes(table)}
    if not _near(list(tables.values())):
        return
    for node in nodes(table):
        if found := _near([tables[at] for at in _together(node.at, tables)]):
            key, bound, other = found
            raise RequestError(
                f"{node.where}.{key} must have a fraction, or be at least 1 away from the other "
                f"bound "
                f"(got {show(bound)} and {show(other)})"
            )


def _near(tables: list[Mapping[str, object]]) -> tuple[str, float, float] | None:
    """The keyword and value of an exclusive bound, and an opposite bound that is too near."""
    for (_, key), others, way in ((_LOW, _HIGH, 1), (_HIGH, _LOW, -1)):
        ahead = sorted(way * other for other in _numbers(tables, others))
        for bound in _numbers(tables, (key,)):
            at = bisect_right(ahead, way * bound)
            if bound == int(bound) and at < len(ahead) and ahead[at] - way * bound < 1:
                return key, bound, way * ahead[at]
    return None


def _numbers(tables: list[Mapping[str, object]], keys: tuple[str, ...]) -> list[float]:
    values = (table.get(key) for table in tables for key in keys)
    return [v for v in values if isinstance(v, int | float) and not isinstance(v, bool)]


def _together(start: str, tables: Mapping[str, Mapping[str, object]]) -> set[str]:
    """The schemas that apply to the same value as the one at `start`, itself included."""
    seen, front = set[str](), [start]
    while front:
        at = front.pop()
        if at in seen or at not in tables:
            continue
        seen.add(at)
        table = tables[at]
        front.append(unquote(str(table.get("$ref", ""))))
        for key in _SAME & table.keys():
            front += [f"{at}/{key}/{i}" for i, _ in enumerate(as_list(table[key]) or ())]
    return seen


def check_together(schema: str) -> None:
    """Refuse a value to which too many patterns and formats apply.

    Raises:
        RequestError: the schema has such a value, or chains of $ref too long to find it.
    """
    if sum(schema.count(f'"{key}"') for key in _TEXTS) <= MAX_TOGETHER:
        return
    found = list(nodes(cast("dict[str, object]", json.loads(schema))))
    most, before = dict.fromkeys((node.at for node in found), 0), dict[str, int]()
    for _ in range(MAX_CHAIN):  # definitions may contain each other, in any order
        before = dict(most)
        for node in reversed(found):
            most[node.at] = min(_applied(node, most), MAX_TOGETHER + 1)
        if most == before:
            break
    for node in reversed(found):  # the innermost first, to name the place
        if most[node.at] > MAX_TOGETHER:
            raise RequestError(
                f"{node.where} must apply at most {MAX_TOGETHER} patterns and formats to one value "
                "(got more)"
            )
    if most != before:
        raise RequestError(f"schema must have chains of at most {MAX_CHAIN - 1} $ref (got longer)")


def _applied(node: Node, most: Mapping[str, int]) -> int:
    """Upper bound on the patterns and formats that the schema applies to one value: the one that it
    describes, or one inside it. `most`: the same for other schemas, by `at`.
    """
    own, inner = sum(key in node.table for key in _TEXTS), 0
    same = most.get(unquote(str(node.table.get("$ref", ""))), 0)
    for key, value in node.table.items():
        steps = [step for _, step, _ in _inside(key, value, "")]
        counts = [most.get(f"{node.at}/{key}{step}", 0) for step in steps]
        if key == "allOf":
            same += sum(counts)
        elif key in _SAME:
            same += max(counts, default=0)
        elif key not in ("$defs", "definitions"):
            inner = max(inner, *counts, 0)
    return max(own, inner) + same


def _table(schema: str | Mapping[str, Any]) -> dict[str, object]:
    if isinstance(schema, str) and len(schema) > MAX_BYTES:
        raise RequestError(f"schema must be at most {MAX_BYTES} bytes of JSON (got {len(schema)})")
    try:
        value: object = json.loads(schema) if isinstance(schema, str) else dict(schema)
        deep = _depth(value)
    except RecursionError as e:
        raise RequestError(f"schema must be nested at most {MAX_DEPTH} deep (got more)") from e
    except ValueError as e:
        raise RequestError(f"schema must be JSON (got: {e})") from e
    if deep > MAX_DEPTH:
        raise RequestError(f"schema must be nested at most {MAX_DEPTH} deep (got {deep})")
    table = as_table(value)
    if table is None:
        raise RequestError(f"schema must be an object (got {show(value)})")
    return table


def _no_json(value: object) -> object:
    raise RequestError(f"schema must be JSON (got a value of type {type(value).__name__})")


def _depth(value: object) -> int:
    inner = as_list(value)
    if inner is None:
        inner = list((as_table(value) or {}).values())
        if not isinstance(value, dict):
            return 0
    return 1 + max((_depth(item) for item in inner), default=0)


def nodes(schema: Mapping[str, object]) -> Iterator[Node]:
    """Yield the schema and every schema inside it except true and false, outermost first.

    Raises:
        RequestError: a keyword's value is not what the keyword takes.
    """
    for where, at, value in _schemas(schema):
        if (table := as_table(value)) is not None:
            yield Node(where, at, table)


def _schemas(
    schema: object, where: str = "schema", at: str = "#"
) -> Iterator[tuple[str, str, object]]:
    table = as_table(schema)
    if table is None and not isinstance(schema, bool):
        raise RequestError(f"{where} must be a schema (got {show(schema)})")
    yield where, at, schema
    for key, value in (table or {}).items():
        for name, step, inner in _inside(key, value, f"{where}.{key}"):
            yield from _schemas(inner, name, f"{at}/{key}{step}")


def _inside(key: str, value: object, where: str) -> list[tuple[str, str, object]]:
    """The subschemas under a keyword: dotted path, $ref part after the keyword, and value."""
    if key in _ONE:
        return [(where, "", value)]
    if key in _MANY:
        rows = as_list(value)
        if rows is None:
            raise RequestError(f"{where} must be a list of schemas (got {show(value)})")
        return [(f"{where}[{i}]", f"/{i}", row) for i, row in enumerate(rows)]
    if key in _NAMED:
        table = as_table(value)
        if table is None:
            raise RequestError(f"{where} must be an object of schemas (got {show(value)})")
        return [(f"{where}.{name}", f"/{_escaped(name)}", row) for name, row in table.items()]
    return []


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")
