"""The text of a plan while it is written: its steps once they are whole, and what is kept of it.

A plan is a JSON object; its steps are the objects in an array that is one of its values. Nothing
here needs the whole text, and no text can break it: what is not such an object has no steps.

What a model writes is read here and nowhere else, so that nothing comes of it that cannot be sent.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from thor_dflash.records import as_table

_PLAIN_TAIL = "}"
_PLAN_TAIL = ',"needs_clarification":null}'
"""A plan that was cut short acts; what it would have asked is not known."""
_CLOSES = {"}": "{", "]": "["}
_STEP = ["{", "["]
"""Brackets open around a step: the plan's and the array's."""


@dataclass(slots=True)
class _Scanner:
    """Brackets of a JSON text, character by character."""

    open: list[str] = field(default_factory=list[str])
    string: bool = False
    escaped: bool = False
    dead: bool = False
    """The text is no object, or its object is over."""

    def feed(self, letter: str) -> bool:
        """Take a character; whether it closed a step."""
        if self.dead:
            return False
        if self.string:
            self._inside(letter)
        elif letter == '"':
            self.string = True
            self.dead = not self.open
        elif letter in "{[":
            self.dead = not self.open and letter == "["
            self.open.append(letter)
        elif letter in "}]":
            return self._close(letter)
        elif not self.open:
            self.dead = not letter.isspace()
        return False

    def _inside(self, letter: str) -> None:
        self.string = self.escaped or letter != '"'
        self.escaped = not self.escaped and letter == "\\"

    def _close(self, letter: str) -> bool:
        if not self.open or self.open.pop() != _CLOSES[letter]:
            self.dead = True
            return False
        self.dead = not self.open
        return letter == "}" and self.open == _STEP


@dataclass(slots=True)
class StepStream:
    """Takes the answer piece by piece and gives each step once its last brace is there."""

    _scanner: _Scanner = field(default_factory=_Scanner)
    _text: list[str] = field(default_factory=list[str])
    """Of the step that is being written."""

    def feed(self, text: str) -> list[dict[str, Any]]:
        """The steps this text completes, in order."""
        steps: list[dict[str, Any]] = []
        for letter in text:
            if self._scanner.open == _STEP and not self._scanner.string:
                self._text.clear()
            self._text.append(letter)
            if self._scanner.feed(letter):
                step = read_object("".join(self._text))
                self._scanner.dead = step is None
                steps += [] if step is None else [step]
        return steps


def read_object(text: str) -> dict[str, object] | None:
    """The object that JSON text says; None where it says none, or one that TDP/1 cannot carry."""
    try:
        value = msgspec.json.decode(text)
        # Integers past 64 bits are read, and msgpack cannot write them.
        msgspec.msgpack.encode(value)
    except (msgspec.DecodeError, ValueError, OverflowError, RecursionError):
        return None
    return as_table(value)


def close_partial(text: str) -> str | None:
    """The plan as far as it is known: cut after the last whole step, brackets closed.

    A whole plan comes back as it is. None where no step is whole, or where the text is no plan.
    """
    whole = text.strip()
    if read_object(whole) is not None:
        return whole
    kept = _last_step(text)
    if kept is None:
        return None
    plain = read_object(f"{kept}]{_PLAIN_TAIL}")
    if plain is None:
        return None
    asks = "steps" in plain and "needs_clarification" not in plain
    return f"{kept}]{_PLAN_TAIL if asks else _PLAIN_TAIL}"


def _last_step(text: str) -> str | None:
    scanner, end = _Scanner(), 0
    for at, letter in enumerate(text):
        if scanner.feed(letter):
            end = at + 1
    return text[:end].strip() if end else None
