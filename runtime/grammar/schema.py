"""A JSON schema, walked once: its text, its subschemas, what limits refuse, what can grow.

The compiler (compiler.py) and the validator (serving/planner/schema_validator.py) take what `read`
returns, so that both know the same schema.
"""

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
from thor_dflash.runtime.grammar import pattern as ecma

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

DIALECT = "https://json-schema.org/draft/2020-12/schema"
"""The only value of $schema. By others, compiler and validator would ignore keywords that older
drafts did not have."""

_WHOLE = MAX_BOUND[int]
"""Largest absolute value of a literal number: the compiler stores literals as float64 too."""
_PLACES = 300
"""Maximum decimal places of a literal: the compiler's power of ten is a float64."""
_CONTROLS = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")
"""Control characters that JSON can only escape as \\u, which answers may not use."""
_ENDLESS = re.compile(r"[*+]|\{\d*,\}")
"""Unbounded repetition in a pattern. May be a false positive inside a character class, which is
acceptable for a warning."""
_LOW, _HIGH = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
_BOUNDS = frozenset((*_LOW, *_HIGH))
_TEXTS = ("pattern", "format")
_LITERALS = ("const", "enum")
ANNOTATIONS = frozenset("title description default examples deprecated $comment $schema".split())
_ONE = frozenset(("items", "additionalProperties"))
SAME_VALUE = frozenset(("anyOf", "oneOf", "allOf"))
"""Keywords whose subschemas describe the same value; those of the others describe parts of it."""
_LISTS = SAME_VALUE | {"prefixItems"}
DEFINITIONS = frozenset(("$defs", "definitions"))
_TABLES = DEFINITIONS | {"properties"}
KEYWORDS = (
    _BOUNDS
    | frozenset("type required minItems maxItems minLength maxLength $ref".split())
    | frozenset((*_TEXTS, *_LITERALS))
    | ANNOTATIONS
    | _ONE
    | _LISTS
    | _TABLES
)
"""All others are refused by name: the compiler would silently ignore some of them."""


@dataclass(frozen=True, slots=True, eq=False)
class Subschema:
    """One schema inside a schema, or the schema itself."""

    where: str
    """Dotted path, `schema` at the top."""
    at: str
    """The value of a $ref to it."""
    table: Mapping[str, object]
    """Its keywords; empty for true and false."""
    boolean: bool
    """Whether it is true or false."""
    inner: tuple[tuple[str, str], ...]
    """The schemas directly inside it: the keyword that holds one, and its `at`."""

    @property
    def ref(self) -> str | None:
        """Where its $ref leads, as `at`."""
        ref = self.table.get("$ref")
        return unquote(ref) if isinstance(ref, str) else None


@dataclass(frozen=True, slots=True, eq=False)
class JsonSchema:
    """A schema within the limits of this file."""

    text: str
    """Compact JSON with its keys in the order given, which is also the order of an answer's."""
    table: Mapping[str, Any]
    subschemas: Mapping[str, Subschema]
    """By `at`, outermost first."""

    def for_compiler(self) -> Mapping[str, Any]:
        """The schema with every pattern in the compiler's dialect."""
        if not any("pattern" in one.table for one in self._tables()):
            return self.table
        copied: dict[str, Subschema] = {}
        _walk(table := json.loads(self.text), "schema", "#", copied)
        for one in copied.values():
            if isinstance(pattern := one.table.get("pattern"), str):
                assert isinstance(one.table, dict), "json.loads made it"
                one.table["pattern"] = ecma.translate(one.where, pattern)
        return cast("Mapping[str, Any]", table)

    def warnings(self) -> tuple[str, ...]:
        """What lets an answer grow without end: it may then fill max_tokens and be cut off."""
        found = [f"{one.where} {rule}" for one in self._tables() for rule in _endless(one.table)]
        return tuple(found + _recursive(self.subschemas))

    def check_exclusive_bounds(self) -> None:
        """Refuse an integral exclusive bound with the other bound less than 1 away: the compiler
        would take it as inclusive. The bounds of one value may be spread over a schema, so this
        can be slow.

        Raises:
            RequestError: the schema has such a bound.
        """
        if not _near([one.table for one in self._tables()]):
            return
        for one in self._tables():
            together = _same_value(one.at, self.subschemas)
            if found := _near([self.subschemas[at].table for at in together]):
                key, bound, other = found
                raise RequestError(
                    f"{one.where}.{key} must have a fraction, or be at least 1 away from the "
                    f"other bound (got {show(bound)} and {show(other)})"
                )

    def check_patterns(self) -> None:
        """Refuse a value to which too many patterns and formats apply.

        Raises:
            RequestError: the schema has such a value, or chains of $ref too long to find it.
        """
        found = list(self.subschemas.values())
        if sum(key in one.table for one in found for key in _TEXTS) <= MAX_TOGETHER:
            return
        most, before = dict.fromkeys(self.subschemas, 0), dict[str, int]()
        for _ in range(MAX_CHAIN):  # definitions may contain each other, in any order
            before = dict(most)
            for one in reversed(found):
                most[one.at] = min(_applied(one, most), MAX_TOGETHER + 1)
            if most == before:
                break
        for one in reversed(found):  # the innermost first, to name the place
            if most[one.at] > MAX_TOGETHER:
                raise RequestError(
                    f"{one.where} must apply at most {MAX_TOGETHER} patterns and formats to one "
                    "value (got more)"
                )
        if most != before:
            rule = f"chains of at most {MAX_CHAIN - 1} $ref"
            raise RequestError(f"schema must have {rule} (got longer)")

    def _tables(self) -> Iterator[Subschema]:
        return (one for one in self.subschemas.values() if not one.boolean)


def read(schema: str | Mapping[str, Any]) -> JsonSchema:
    """Check a schema and take it apart.

    Raises:
        RequestError: not a JSON object, too long, too deep, or with an unsupported keyword, bound,
            literal or $ref.
    """
    table = _table(schema)
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=False, default=_no_json)
    check_utf8("schema", text)
    if (size := len(text.encode())) > MAX_BYTES:
        raise RequestError(f"schema must be at most {MAX_BYTES} bytes of JSON (got {size})")
    subschemas: dict[str, Subschema] = {}
    _walk(table, "schema", "#", subschemas)
    for one in subschemas.values():
        if one.ref is not None and one.ref not in subschemas:  # it would bypass the checks
            raise RequestError(
                f"{one.where}.$ref must be #, or a path like #/$defs/NAME to a schema inside this "
                f"one (got {show(one.table['$ref'])})"
            )
    _check_levels(subschemas)
    return JsonSchema(text, table, subschemas)


def _table(schema: str | Mapping[str, Any]) -> dict[str, Any]:
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
    items, table = as_list(value), as_table(value)
    if items is None and not isinstance(value, dict):
        return 0
    return 1 + max((_depth(item) for item in items or (table or {}).values()), default=0)


def _walk(schema: object, where: str, at: str, found: dict[str, Subschema]) -> None:
    """Check one schema and those inside it; enter them into `found`, outer ones first."""
    table = as_table(schema)
    if table is None and not isinstance(schema, bool):
        raise RequestError(f"{where} must be a schema (got {show(schema)})")
    inner: list[tuple[str, str, str, object]] = []
    for key, value in (table or {}).items():
        if key not in KEYWORDS:
            raise RequestError(f"{where} must have supported keywords only (got {show(key)})")
        _check_value(f"{where}.{key}", key, value)
        for name, step, one in _places(key, value, f"{where}.{key}"):
            inner.append((key, f"{at}/{key}{step}", name, one))
    places = tuple((key, place) for key, place, _, _ in inner)
    found[at] = Subschema(where, at, table or {}, table is None, places)
    for _, place, name, one in inner:
        _walk(one, name, place, found)


def _check_value(where: str, key: str, value: object) -> None:
    if key in _BOUNDS:
        most = MAX_BOUND.get(type(value))
        if most and isinstance(value, int | float) and not -most <= value <= most:
            raise RequestError(f"{where} must be {-most} to {most} (got {show(value)})")
    elif key == "format" and value == "unknown":  # to the compiler this word means none
        raise RequestError(f'{where} must be a known format (got "unknown")')
    elif key == "pattern":
        if not isinstance(value, str):
            raise RequestError(f"{where} must be a string (got {show(value)})")
        ecma.translate(where, value)
    elif key == "$schema" and value not in (DIALECT, f"{DIALECT}#"):
        raise RequestError(f"{where} must be {DIALECT}, or left out (got {show(value)})")
    elif key in _LITERALS:
        _check_literal(where, value)


def _check_literal(where: str, value: object) -> None:
    if isinstance(value, int | float) and not _exact(value):
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


def _exact(value: float) -> bool:
    """Whether the compiler reads a number exactly: it rounds the digits to float64, divides by a
    power of ten and rounds again.
    """
    if not -_WHOLE <= value <= _WHOLE:
        return False
    _, digits, exponent = Decimal(repr(abs(value) + 0)).as_tuple()
    number, places = int("".join(map(str, digits))), -int(exponent)
    return places <= _PLACES and float(number) / float(10**places) == abs(value)


def _places(key: str, value: object, where: str) -> Iterator[tuple[str, str, object]]:
    """The subschemas under a keyword: dotted path, $ref part after the keyword, and value."""
    if key in _ONE:
        yield where, "", value
    elif key in _LISTS:
        rows = as_list(value)
        if rows is None:
            raise RequestError(f"{where} must be a list of schemas (got {show(value)})")
        yield from ((f"{where}[{i}]", f"/{i}", row) for i, row in enumerate(rows))
    elif key in _TABLES:
        table = as_table(value)
        if table is None:
            raise RequestError(f"{where} must be an object of schemas (got {show(value)})")
        for name, row in table.items():
            yield f"{where}.{name}", f"/{name.replace('~', '~0').replace('/', '~1')}", row


# ---- depth with every $ref followed ------------------------------------------------------------


def _check_levels(subschemas: Mapping[str, Subschema]) -> None:
    """Refuse definitions that lead to others, and these to others, too often."""
    own, edges, front = dict[str, int](), dict[str, set[str]](), ["#"]
    while front:
        if (at := front.pop()) not in own:
            own[at], edges[at] = _own_depth(at, subschemas)
            front += edges[at]
    if (levels := _longest(own, edges)) > MAX_LEVELS:
        raise RequestError(
            f"schema must be at most {MAX_LEVELS} schemas deep with every $ref followed "
            f"(got {levels})"
        )


def _own_depth(start: str, subschemas: Mapping[str, Subschema]) -> tuple[int, set[str]]:
    """The depth of a schema, without what a $ref leads to, and where those lead."""
    deepest, refs, front = 0, set[str](), [(start, 1)]
    while front:
        at, level = front.pop()
        here, deepest = subschemas[at], max(deepest, level)
        refs |= set() if here.ref is None else {here.ref}
        front += [(inner, level + 1) for key, inner in here.inner if key not in DEFINITIONS]
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


# ---- several subschemas of one value -----------------------------------------------------------


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


def _same_value(start: str, subschemas: Mapping[str, Subschema]) -> set[str]:
    """The schemas that apply to the same value as the one at `start`, itself included."""
    seen, front = set[str](), [start]
    while front:
        if (at := front.pop()) not in seen:
            seen.add(at)
            here = subschemas[at]
            front += [] if here.ref is None else [here.ref]
            front += [inner for key, inner in here.inner if key in SAME_VALUE]
    return seen


def _applied(schema: Subschema, most: Mapping[str, int]) -> int:
    """Upper bound on the patterns and formats that the schema applies to one value: the one that it
    describes, or one inside it. `most`: the same for other schemas, by `at`.
    """
    own, part = sum(key in schema.table for key in _TEXTS), 0
    same = 0 if schema.ref is None else most[schema.ref]
    choices: dict[str, int] = {}
    for key, inner in schema.inner:
        count = most[inner]
        if key == "allOf":
            same += count
        elif key in SAME_VALUE:
            choices[key] = max(choices.get(key, 0), count)
        elif key not in DEFINITIONS:
            part = max(part, count)
    return max(own, part) + same + sum(choices.values())


# ---- warnings ----------------------------------------------------------------------------------


def _endless(table: Mapping[str, object]) -> Iterator[str]:
    if table.keys() & {"const", "enum", "$ref", "anyOf", "oneOf", "allOf"}:
        return
    kind = table.get("type")
    kinds = as_list(kind) or [kind]
    if kind is None:
        yield "must have a type (got none: anything is allowed)"
    if "string" in kinds and _endless_text(table):
        yield "must have maxLength (got a string of any length)"
    if "array" in kinds and "maxItems" not in table and table.get("items") is not False:
        yield "must have maxItems (got an array of any length)"
    if "object" in kinds and table.get("additionalProperties") is not False:
        yield "must have additionalProperties false (got an object with any keys)"
    if "number" in kinds:
        yield "must be an integer or an enum (got a number with any count of digits)"
    if "integer" in kinds and not (table.keys() & set(_LOW) and table.keys() & set(_HIGH)):
        yield "must have minimum and maximum (got an integer of any size)"


def _endless_text(table: Mapping[str, object]) -> bool:
    if "maxLength" in table or "format" in table:
        return False
    pattern = table.get("pattern")
    return not isinstance(pattern, str) or bool(_ENDLESS.search(pattern))


def _recursive(subschemas: Mapping[str, Subschema]) -> list[str]:
    """Definitions that contain themselves."""
    defined = [at for key, at in subschemas["#"].inner if key in DEFINITIONS]
    refs = {at: _refs_inside(at, subschemas) for at in (*defined, "#")}
    return [
        f"{at} must not contain itself (got a schema of any depth)"
        for at in refs
        if at in _reached(at, refs)
    ]


def _refs_inside(start: str, subschemas: Mapping[str, Subschema]) -> set[str]:
    refs, front = set[str](), [start]
    while front:
        here = subschemas[front.pop()]
        refs |= set() if here.ref is None else {here.ref}
        front += [inner for _, inner in here.inner]
    return refs


def _reached(at: str, refs: Mapping[str, set[str]]) -> set[str]:
    seen: set[str] = set()
    front = refs[at]
    while front:
        seen |= front
        front = {to for one in front for to in refs.get(one, set())} - seen
    return seen
