"""Random answers that a grammar allows, and random schemas of all keywords."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from random import Random
from typing import Any

import numpy as np
from support.constrained_model import session, text

from thor_dflash.runtime.grammar.compiler import Grammar

Schema = dict[str, Any]


@cache
def _bytes() -> tuple[list[bytes], frozenset[int], frozenset[int]]:
    """Bytes of each id; ids of one byte; those of them that bring an answer nearer to its end."""
    made = [text().bytes_of(i) for i in range(session().manifest.vocab_limit)]
    single = frozenset(i for i, spelt in enumerate(made) if len(spelt) == 1)
    return made, single, frozenset(i for i in single if made[i] in b'"}],')


def walk(random: Random, grammar: Grammar, most: int = 30) -> bytes | None:
    """Returns an answer of legal tokens; None if it does not end soon after `most` tokens."""
    spelt, single, closing = _bytes()
    matcher, out = grammar.matcher.deep_copy(), b""
    for count in range(2 * most):
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        legal = set(np.flatnonzero(np.unpackbits(bits, bitorder="little")).tolist())
        ids = legal - grammar.vocabulary.stop
        if len(ids) < len(legal) and (not ids or random.random() < 0.3):
            return out
        near = ids & closing if count > most or random.random() < 0.25 else set[int]()
        short = ids & single if random.random() < 0.7 else set[int]()
        token = random.choice(sorted(near or short or ids))
        assert matcher.consume_token(token)
        out += spelt[token]
    return None


def values(random: Random, grammar: Grammar, count: int) -> list[object]:
    """Returns the values of some walks. A number without bounds may be more than a float64 holds,
    which the documents say; such an answer is left out.
    """
    written = [walk(random, grammar) for _ in range(count)]
    found = [json.loads(answer) for answer in written if answer is not None]
    return [value for value in found if "inf" not in repr(value)]


NUMBER: Schema = {"type": "number", "minimum": -2.5, "exclusiveMaximum": 100}
DIGIT: Schema = {"type": "integer", "exclusiveMinimum": -3, "maximum": 9}
WORD: Schema = {"type": "string", "minLength": 1, "maxLength": 4}
FLAG: Schema = {"type": ["boolean", "null"]}
BOX: Schema = {
    "type": "object",
    "properties": {"a": DIGIT, 'b"': WORD, "c/d": FLAG},
    "required": ["a", "c/d"],
    "additionalProperties": False,
}
KEYWORD_CASES: dict[str, list[Schema]] = {
    "type minLength maxLength": [WORD, {"type": "string", "minLength": 2}],
    "minimum exclusiveMaximum exclusiveMinimum maximum": [
        NUMBER,
        DIGIT,
        {"type": "number", "minimum": 0.125, "maximum": 0.5},
        {"type": "integer", "minimum": -1.5, "exclusiveMaximum": 3.5},
    ],
    "enum const": [
        {"enum": ["a", 'q"', "b\\s", 1, -2.5, None, True, [1, {"k": 2}], {}]},
        {"const": {"a": [1, "\n"]}},
        {"enum": [1, 2, "1"], "type": "integer", "minimum": 2},
    ],
    "properties required additionalProperties": [
        BOX,
        {**BOX, "additionalProperties": DIGIT},
        {"type": "object", "required": ["zz"], "additionalProperties": WORD},
        {"type": "object", "properties": {"$ref": WORD, "const": DIGIT}},
    ],
    "items prefixItems minItems maxItems": [
        {"type": "array", "items": DIGIT, "minItems": 1, "maxItems": 3},
        {
            "type": "array",
            "prefixItems": [DIGIT, WORD],
            "items": FLAG,
            "minItems": 2,
            "maxItems": 4,
        },
        {"type": "array", "prefixItems": [DIGIT, WORD], "items": False, "minItems": 1},
        {"type": "array", "prefixItems": [FLAG], "maxItems": 2},
    ],
    "anyOf oneOf allOf": [
        {"anyOf": [DIGIT, WORD, BOX]},
        {"oneOf": [DIGIT, WORD, FLAG]},
        {"allOf": [DIGIT, {"minimum": 3}, {"anyOf": [{"maximum": 5}, {"const": 8}]}]},
        {"type": "array", "maxItems": 2, "allOf": [{"items": DIGIT}, {"minItems": 1}]},
        {"allOf": [WORD, {"maxLength": 2}], "anyOf": [{"minLength": 2}, {"enum": ["", "x"]}]},
    ],
    "$ref $defs definitions": [
        {"$ref": "#/$defs/a", "$defs": {"a": BOX}},
        {"$ref": "#/definitions/a", "maximum": 5, "definitions": {"a": DIGIT}},
        {"$ref": "#/$defs/a", "$defs": {"a": {"type": "array", "items": {"$ref": "#"}}}},
    ],
    "pattern format": [
        {"type": "string", "pattern": '^[^"]{1,4}$'},
        {"type": "string", "pattern": r"\s.\S", "maxLength": 6},
        *({"type": "string", "format": name} for name in ("date", "uuid", "ipv4", "time")),
    ],
}
"""Keywords -> schemas that use them."""


def schema(random: Random, depth: int = 3) -> Schema:
    """Returns a schema of random keywords, some of which contradict each other."""
    made = part(random, depth)
    made = made if isinstance(made, dict) else {"anyOf": [made]}
    inner = part(random, 0)
    while isinstance(inner, dict) and "$ref" in inner:
        inner = part(random, 0)
    return {**made, "$defs": {"a": inner}}


PATTERNS = (
    '^[^"]*$',
    "a",
    r"^\w+$",
    r"^[^\\]{1,3}$",
    "^(a|bc)*$",
    ".",
    r"\s",
    "^[^a-z]+$",
    r"^\S*$",
    '"',
)
LITERALS = ("a", "", 'q"t', "b\\s", 1, 0, -2, 1.5, 2.0, True, None, [], [1], {"a": 1}, "é\n")
NAMES = ("a", "b", "c/d", 'e"f', "g\\h", "é", "$ref", "const", "~x")


def part(random: Random, depth: int) -> Schema | bool:
    if random.random() < 0.1:
        return random.random() < 0.6
    if random.random() < 0.1:
        return {"$ref": "#/$defs/a"}
    fillers = (_text, _number, _literal) if depth == 0 else (*_FILLERS, _array, _table, _choice)
    made: Schema = {}
    for _ in range(random.choice((1, 1, 1, 2))):
        made |= random.choice(fillers)(random, depth - 1)
    return made


def _some(random: Random, table: Schema) -> Schema:
    return {key: value for key, value in table.items() if random.random() < 0.5}


def _text(random: Random, depth: int) -> Schema:
    sizes = {"minLength": random.randint(0, 3), "maxLength": random.randint(0, 6)}
    return {"type": "string", **_some(random, {**sizes, "pattern": random.choice(PATTERNS)})}


def _number(random: Random, depth: int) -> Schema:
    keys = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
    bounds = {key: random.choice((-3, -1, 0, 1, 2, 10, 0.5, 1.5, -2.25, 7.0)) for key in keys}
    return {"type": random.choice(("integer", "number")), **_some(random, bounds)}


def _literal(random: Random, depth: int) -> Schema:
    kinds: list[Schema] = [
        {"enum": random.sample(LITERALS, 3)},
        {"const": random.choice(LITERALS)},
        {"type": random.sample(("null", "boolean", "string", "integer"), 2)},
    ]
    return random.choice(kinds)


def _array(random: Random, depth: int) -> Schema:
    more = {"items": part(random, depth), "prefixItems": [part(random, depth), part(random, depth)]}
    sizes = {"minItems": random.randint(0, 3), "maxItems": random.randint(0, 4)}
    return {"type": "array", **_some(random, {**more, **sizes})}


def _table(random: Random, depth: int) -> Schema:
    names = random.sample(NAMES, 3)
    more = {"required": [*names[:2], "zz"], "additionalProperties": part(random, depth)}
    properties = {name: part(random, depth) for name in names}
    return {"type": "object", **_some(random, {"properties": properties, **more})}


def _choice(random: Random, depth: int) -> Schema:
    return {random.choice(("anyOf", "oneOf", "allOf")): [part(random, depth) for _ in range(2)]}


_FILLERS: tuple[Callable[[Random, int], Schema], ...] = (_text, _number, _literal)
