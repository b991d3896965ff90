"""Parses the text of a plan while it is being written: finds complete steps, and completes a plan
that was cut short.

A plan is a JSON object; its steps are the objects in an array that is one of its values. Partial
text is fine, and no text raises: text that is not such an object has no steps.

All JSON from a model is parsed here, so that every value taken from it can be sent.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from thor_dflash.core.strict_records import as_table

_PLAIN_TAIL = "}"
_PLAN_TAIL = ',"needs_clarification":null}'
"""A plan that was cut short has steps, so it asks no question."""
_CLOSES = {"}": "{", "]": "["}
_STEP = ["{", "["]
"""Open brackets around a step: those of the plan and of the array."""


@dataclass(slots=True)
class _Scanner:
    """Tracks the brackets of a JSON text, character by character."""

    open: list[str] = field(default_factory=list[str])
    string: bool = False
    escaped: bool = False
    dead: bool = False
    """The text is not an object, or its object is closed."""

    def feed(self, char: str) -> bool:
        """Take a character. Returns whether it closed a step."""
        if self.dead:
            return False
        if self.string:
            self._inside(char)
        elif char == '"':
            self.string = True
            self.dead = not self.open
        elif char in "{[":
            self.dead = not self.open and char == "["
            self.open.append(char)
        elif char in "}]":
            return self._close(char)
        elif not self.open:
            self.dead = not char.isspace()
        return False

    def _inside(self, char: str) -> None:
        self.string = self.escaped or char != '"'
        self.escaped = not self.escaped and char == "\\"

    def _close(self, char: str) -> bool:
        if not self.open or self.open.pop() != _CLOSES[char]:
            self.dead = True
            return False
        self.dead = not self.open
        return char == "}" and self.open == _STEP


@dataclass(slots=True)
class StepStream:
    """Takes the answer piece by piece and returns each step once its last brace has arrived."""

    _scanner: _Scanner = field(default_factory=_Scanner)
    _text: list[str] = field(default_factory=list[str])
    """The characters of the current step."""

    def feed(self, text: str) -> list[dict[str, Any]]:
        """Return the steps that this text completes, in order."""
        steps: list[dict[str, Any]] = []
        for char in text:
            if self._scanner.open == _STEP and not self._scanner.string:
                self._text.clear()
            self._text.append(char)
            if self._scanner.feed(char):
                step = read_object("".join(self._text))
                self._scanner.dead = step is None
                steps += [] if step is None else [step]
        return steps


def read_object(text: str) -> dict[str, object] | None:
    """Parse a JSON object. Returns None if the text is not one, or if TDP/1 cannot carry it."""
    try:
        value = msgspec.json.decode(text)
        # Integers above 64 bits are decoded from JSON, but msgpack cannot encode them.
        msgspec.msgpack.encode(value)
    except (msgspec.DecodeError, ValueError, OverflowError, RecursionError):
        return None
    return as_table(value)


def close_partial(
    text: str, fits: Callable[[dict[str, object]], bool] = lambda plan: True
) -> str | None:
    """Cut a partial plan after its last complete step and close its brackets.

    A complete plan is returned unchanged. None if no step is complete or the text is not a plan.
    A plan with "steps" that does not say whether it asks a question says that it asks none, unless
    only without that `fits` accepts it.
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
    if "steps" in plain and "needs_clarification" not in plain:
        asking = f"{kept}]{_PLAN_TAIL}"
        written = read_object(asking)
        if written is not None and (fits(written) or not fits(plain)):
            return asking
    return f"{kept}]{_PLAIN_TAIL}"


def _last_step(text: str) -> str | None:
    scanner, end = _Scanner(), 0
    for at, char in enumerate(text):
        if scanner.feed(char):
            end = at + 1
    return text[:end].strip() if end else None
