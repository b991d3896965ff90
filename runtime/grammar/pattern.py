"""Regular expressions of a schema: ECMA-262 with the flag u, as JSON Schema has them, in the
dialect of llguidance (Rust's).

Both dialects share most of their syntax, and differ where it hurts: `.`, `\\s`, `\\w`, `[` in a
class, `++`, `(?i)`. What they share is taken over, what differs is written out, and the rest is
refused by name. So the grammar and a validator that reads ECMA-262 mean the same strings.
"""

from __future__ import annotations

import re
from typing import NoReturn

from thor_dflash.core.errors import RequestError
from thor_dflash.core.message_text import show

UNWRITABLE = r"\x00-\x07\x0b\x0e-\x1f\x7f"
"""Characters that JSON can only escape as \\u, which answers may not use. Inside of a class."""

MAX_LENGTH = 4096
"""Of a pattern, characters. The compiler intersects it with a format, or with what may not end a
raw value, and that takes the square of its length: 20 s and 2 GB for 80,000, which no limit of the
compiler prevents."""

_LINE_ENDS = r"\n\r\u2028\u2029"
_CLASSES = {
    "d": "0-9",
    "w": "0-9A-Za-z_",
    "s": r"\t\n\x0b\x0c\r\x20\u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff",
}
"""Source: ECMA-262, 22.2.2.9 and 12.2. Rust's are larger, and its \\s differs both ways."""
_CONTROLS = {"t": "\t", "n": "\n", "r": "\r", "f": "\f", "v": "\v"}
_CATEGORY = re.compile(
    "L[ulmto]?|LC|M[nce]?|N[dlo]?|P[cdseifo]?|S[mcko]?|Z[slp]?|C[cfon]?"  # Cs: no surrogates
)
_HEX = re.compile(r"x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|u\{([0-9A-Fa-f]{1,6})\}")
_PROPERTY = re.compile(r"[pP]\{([A-Za-z]+)\}")
_REPEAT = re.compile(r"(?:[*+?]|\{[0-9]+(?:,[0-9]*)?\})\??")
_GROUP = re.compile(r"\((?:\?:|\?<[A-Za-z_][A-Za-z0-9_]*>|(?!\?))")
_NAMED = (
    (re.compile(r"\(\?<?[=!]"), "look-around"),
    (re.compile(r"\(\?"), "flags and groups but (?: and (?<name>"),
    (re.compile(r"\\[bB]"), "word boundaries"),
    (re.compile(r"\\(?:[1-9]|k)"), "back-references"),
    (re.compile(r"\\[<>]"), r"an escape of < or >, which need none"),
    (re.compile(r"\\[pP]"), r"a property but a general category, as \p{Lu}"),
    (re.compile(r"\\(?s:.?)"), "an escape of this kind"),
    (re.compile(r"[*+?{]"), r"a repetition of nothing, or { that is none; \{ for the character"),
)
"""What no rule takes -> its name."""


def translate(where: str, pattern: str) -> str:
    """The same pattern for llguidance. It leaves out characters that no answer can contain.

    Raises:
        RequestError: a syntax that the dialects do not share.
    """
    return "".join(_Reader(where, pattern).parts())


def spanning(where: str, pattern: str) -> str:
    """The same for a place where a regular expression must match a text from end to end, as in a
    grammar: JSON Schema looks for a pattern anywhere.

    Raises:
        RequestError: as `translate`, or ^ or $ within a choice or a group.
    """
    depth, choices = 0, [list[str]()]
    for part in _Reader(where, pattern).parts():
        depth += (part == "(?:") - (part == ")")
        if part == "|" and depth == 0:
            choices.append([])
        else:
            choices[-1].append(part)
    return "|".join(_padded(where, pattern, choice) for choice in choices)


def _padded(where: str, pattern: str, parts: list[str]) -> str:
    begins, ends = parts[:1] == ["^"], parts[-1:] == ["$"]
    inner = parts[begins : len(parts) - ends]
    if "^" in inner or "$" in inner:
        rule = "^ and $ only where a choice that is in no group begins and ends"
        raise RequestError(f"{where} must have {rule} (got {show(pattern)})")
    return f"{'' if begins else '(?s:.*)'}{''.join(inner)}{'' if ends else '(?s:.*)'}"


class _Reader:
    """Reads a pattern from left to right. Each method reads what stands at `at`."""

    def __init__(self, where: str, pattern: str) -> None:
        if len(pattern) > MAX_LENGTH:
            rule = f"at most {MAX_LENGTH} characters"
            raise RequestError(f"{where} must have {rule} (got {len(pattern)})")
        self.where, self.pattern, self.at = where, pattern, 0

    def parts(self) -> list[str]:
        """The translation, in which anchors, | and the ends of groups are parts of their own."""
        out, repeatable = list[str](), False
        while self.at < len(self.pattern):
            char, after = self.pattern[self.at], True
            if repeatable and (found := _REPEAT.match(self.pattern, self.at)):
                self.at, after = found.end(), False
                out.append(found[0])
            elif found := _GROUP.match(self.pattern, self.at):
                self.at, after = found.end(), False
                out.append("(?:")
            elif char in "^$|)":
                after = char == ")"
                self.at += 1
                out.append(char)
            elif char == ".":
                self.at += 1
                out.append(_writable(f"[^{_LINE_ENDS}]"))
            elif char == "[":
                out.append(_writable(self.bracket()))
            elif char in "*+?({":
                self.refuse()
            else:
                start = self.at
                out.append(self.literal(start, self.atom()))
            repeatable = after
        return out

    def literal(self, start: int, atom: str | int) -> str:
        if isinstance(atom, str):
            return _writable(f"[{atom}]")
        if re.match(f"[{UNWRITABLE}]", chr(atom)):
            self.refuse("control characters but \\t, \\n, \\f and \\r", start)
        return _escaped(atom)

    def atom(self) -> str | int:
        """A character, or the inside of a class."""
        char = self.pattern[self.at]
        self.at += 1
        return self.escape(self.at - 1) if char == "\\" else ord(char)

    def escape(self, start: int) -> str | int:
        kind = self.pattern[self.at : self.at + 1]
        if found := _HEX.match(self.pattern, self.at):
            code = int(found[1] or found[2] or found[3], 16)
            if 0xD800 <= code < 0xE000 or code > 0x10FFFF:
                self.refuse("surrogates and numbers above 10ffff", start)
            self.at = found.end()
            return code
        if (found := _PROPERTY.match(self.pattern, self.at)) and _CATEGORY.fullmatch(found[1]):
            self.at = found.end()
            return f"\\{found[0]}"
        self.at += 1
        if kind and kind in "dws":
            return _CLASSES[kind]
        if kind and kind in "DWS":
            return f"[^{_CLASSES[kind.lower()]}]"
        if kind in _CONTROLS:
            return ord(_CONTROLS[kind])
        if not kind.isascii() or not kind.isprintable() or kind.isalnum() or kind in "<>":
            self.refuse(start=start)
        return ord(kind)

    def bracket(self) -> str:
        start, items = self.at, list[str]()
        negated = self.pattern.startswith("[^", start)
        self.at += 1 + negated
        while not self.pattern.startswith("]", self.at):
            if self.at >= len(self.pattern):
                self.refuse("a class that does not end", start)
            if self.pattern[self.at] == "[":
                self.refuse(r"[ in a class; \[ for the character", self.at)
            first, low = self.at, self.atom()
            if self.pattern[self.at : self.at + 1] == "-" and self.next() not in ("", "]"):
                self.at += 1
                high = self.atom()
                if isinstance(low, str) or isinstance(high, str) or low > high:
                    self.refuse("a range that is not between two characters in order", first)
                items.append(f"{_escaped(low)}-{_escaped(high)}")
            else:
                items.append(low if isinstance(low, str) else _escaped(low))
        self.at += 1
        if not items:
            self.refuse("empty classes", start)
        return f"[{'^' * negated}{''.join(items)}]"

    def next(self) -> str:
        return self.pattern[self.at + 1 : self.at + 2]

    def refuse(self, what: str = "", start: int | None = None) -> NoReturn:
        start = self.at if start is None else start
        if not what:
            what = next(name for form, name in _NAMED if form.match(self.pattern, start))
        raise RequestError(
            f"{self.where} must be a regular expression of ECMA-262 without {what} "
            f"(got {show(self.pattern[start : start + 20])} at character {start})"
        )


def _writable(inside: str) -> str:
    """A class without what no answer can contain. llguidance would allow an escaped quote and
    backslash for any class that has all control characters.
    """
    return f"[{inside}&&[^{UNWRITABLE}]]"


def _escaped(code: int) -> str:
    char = chr(code)
    return char if char.isalnum() and char.isascii() else f"\\u{{{code:x}}}"
