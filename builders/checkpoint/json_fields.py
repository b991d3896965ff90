"""Reads external JSON objects key by key. Errors name a key that is absent or of another type."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from thor_dflash.core.errors import CheckpointError
from thor_dflash.core.strict_records import unique_keys
from thor_dflash.package.tokenizer_files import present

LONGEST_VALUE = 60
"""Most characters of an offending value in an error message."""

MOST_LAYERS = 1024
"""More than any model has. A bound, because the names and shapes of all layers are made before a
missing layer is noticed."""


def shown(value: object) -> str:
    """Format an offending value on one line, cut if it is long."""
    text = "nothing" if value is None else repr(value)
    return text if len(text) <= LONGEST_VALUE else text[: LONGEST_VALUE - 3] + "..."


def check_directory(directory: Path) -> None:
    """Raise CheckpointError unless the directory exists."""
    if not directory.is_dir():
        found = "a file" if directory.exists() else "nothing there"
        raise CheckpointError(f"{directory} must be a checkpoint directory (got {found})")


def parse_object(text: bytes, where: str) -> dict[str, object]:
    """Parse the JSON object in `text`; `where` names it in errors."""
    try:
        value: object = json.loads(text.decode("utf-8"), object_pairs_hook=unique_keys)
        if b"\\u" in text:
            _check_pairs(value)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where} must be JSON (got {shown(str(error))})") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{where} must be a JSON object (got {type(value).__name__})")
    return cast("dict[str, object]", value)


def _check_pairs(value: object) -> None:
    """Refuse unpaired surrogates, which Python's parser accepts but UTF-8 cannot encode."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError("half a surrogate pair") from error


def whole(value: object, least: int) -> bool:
    """Whether a JSON value is an integer of at least `least`. A bool is not an integer."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


@dataclass(frozen=True, slots=True)
class Fields:
    """One JSON object and its location."""

    where: str
    """File, then the dotted path of the object with a trailing dot, as `config.json: rope.`"""
    values: Mapping[str, object]

    @classmethod
    def read(cls, path: Path) -> Fields:
        """Read the object of one JSON file."""
        if not present(path):
            raise CheckpointError(f"{path} must be a file (got nothing there)")
        try:
            text = path.read_bytes()
        except OSError as error:
            raise CheckpointError(f"{path} must be readable (got {error.strerror})") from error
        return cls(f"{path}: ", parse_object(text, str(path)))

    def given(self, key: str) -> bool:
        """Whether the key is present and not null."""
        return self.values.get(key) is not None

    def wrong(self, key: str, rule: str) -> CheckpointError:
        """Return the error for a key that breaks its rule."""
        return CheckpointError(
            f"{self.where}{key} must be {rule} (got {shown(self.values.get(key))})"
        )

    def integer(self, key: str, least: int = 1) -> int:
        """Read an integer of at least `least`."""
        value = self.values.get(key)
        if not whole(value, least):
            raise self.wrong(key, f"an integer of at least {least}")
        number = cast("int", value)
        self._check_bits(key, number)
        return number

    def layers(self) -> int:
        """Read the number of layers of a model."""
        key = "num_hidden_layers"
        depth = self.integer(key)
        if depth > MOST_LAYERS:
            raise self.wrong(key, f"an integer of at most {MOST_LAYERS}")
        return depth

    def _check_bits(self, key: str, *values: int) -> None:
        """Refuse integers of more than 64 bits, with which a manifest could not be read again."""
        if any(value >= 1 << 63 for value in values):
            raise self.wrong(key, "an integer of 64 bits")

    def number(self, key: str) -> float:
        """Read a positive finite number."""
        value = self.values.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.wrong(key, "a number")
        # A JSON integer may be too large for a float, and Python's parser accepts "NaN".
        if not 0 < value < math.inf or value > 1e300:
            raise self.wrong(key, "a positive finite number")
        return float(value)

    def text(self, key: str) -> str:
        """Read a string."""
        value = self.values.get(key)
        if not isinstance(value, str):
            raise self.wrong(key, "a string")
        return value

    def flag(self, key: str) -> bool:
        """Read a boolean."""
        value = self.values.get(key)
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value

    def items(self, key: str, rule: str) -> list[object]:
        """Read a list; `rule` names its elements in the error."""
        value = self.values.get(key)
        if not isinstance(value, list):
            raise self.wrong(key, rule)
        return cast("list[object]", value)

    def integers(self, key: str, least: int = 0) -> tuple[int, ...]:
        """Read a list of integers of at least `least`."""
        rule = f"a list of integers of at least {least}"
        values = self.items(key, rule)
        if not all(whole(value, least) for value in values):
            raise self.wrong(key, rule)
        numbers = cast("list[int]", values)
        self._check_bits(key, *numbers)
        return tuple(numbers)

    def words(self, key: str, allowed: Collection[str]) -> tuple[str, ...]:
        """Read a list of words, each one of `allowed`."""
        rule = f"a list of {' | '.join(allowed)}"
        values = self.items(key, rule)
        if not all(isinstance(value, str) and value in allowed for value in values):
            raise self.wrong(key, rule)
        return tuple(cast("list[str]", values))

    def section(self, key: str) -> Fields:
        """Read a nested object."""
        value = self.values.get(key)
        if not isinstance(value, dict):
            raise self.wrong(key, "an object")
        return Fields(f"{self.where}{key}.", cast("dict[str, object]", value))

    def expect(self, key: str, *allowed: object) -> None:
        """Raise unless the key is absent, null, or one of `allowed`."""
        value = self.values.get(key)
        # Compare types, too: in Python False equals 0 and True equals 1.
        if value is None or any(type(value) is type(a) and value == a for a in allowed):
            return
        rule = " or ".join(json.dumps(a) for a in allowed)
        raise self.wrong(key, f"absent or {rule}" if allowed else "absent")
