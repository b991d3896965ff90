"""Reads external JSON objects key by key. Errors name the file and the key."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar, cast

from thor_dflash.core.bounds import LARGEST
from thor_dflash.core.errors import CheckpointError
from thor_dflash.core.message_text import show
from thor_dflash.core.strict_records import unique_keys
from thor_dflash.package.tokenizer_files import present

T = TypeVar("T")


def check_directory(directory: Path) -> None:
    """Raise CheckpointError unless the directory exists."""
    if not directory.is_dir():
        found = "a file" if directory.exists() else "nothing there"
        raise CheckpointError(f"{directory} must be a checkpoint directory (got {found})")


@dataclass(frozen=True, slots=True)
class Fields:
    """One JSON object and its location."""

    where: str
    """File, then the dotted path of the object with a trailing dot, as `config.json: rope.`"""
    values: Mapping[str, object]
    read_keys: set[str] = field(default_factory=set[str])
    """Keys that were asked for."""

    @classmethod
    def read(cls, path: Path) -> Fields:
        """Read the object of one JSON file."""
        if not present(path):
            raise CheckpointError(f"{path} must be a file (got nothing there)")
        try:
            value: object = json.loads(path.read_bytes(), object_pairs_hook=unique_keys)
        except OSError as error:
            raise CheckpointError(f"{path} must be readable (got {error.strerror})") from error
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{path} must be JSON (got {show(str(error))})") from error
        if not isinstance(value, dict):
            raise CheckpointError(f"{path} must be a JSON object (got {type(value).__name__})")
        return cls(f"{path}: ", cast("dict[str, object]", value))

    def get(self, key: str) -> object:
        """Return the value of a key, None if it is absent."""
        self.read_keys.add(key)
        return self.values.get(key)

    def given(self, key: str) -> bool:
        """Whether the key is present and not null."""
        return self.get(key) is not None

    def wrong(self, key: str, rule: str) -> CheckpointError:
        """Return the error for a key that breaks its rule."""
        value = self.values.get(key)
        got = "nothing" if value is None else show(value)
        return CheckpointError(f"{self.where}{key} must be {rule} (got {got})")

    def _typed(self, key: str, kind: type[T], rule: str) -> T:
        value = self.get(key)
        if type(value) is not kind:  # a bool is an int to isinstance
            raise self.wrong(key, rule)
        return value

    def integer(self, key: str, least: int = 1) -> int:
        """Read an integer of `least` to LARGEST."""
        rule = f"an integer of {least} to {LARGEST}"
        value = self._typed(key, int, rule)
        if not least <= value <= LARGEST:
            raise self.wrong(key, rule)
        return value

    def number(self, key: str) -> float:
        """Read a positive finite number."""
        value = self.get(key)
        # Python's parser accepts NaN and integers too large for a float.
        if type(value) not in (int, float) or not 0 < cast("float", value) < 1e300:
            raise self.wrong(key, "a positive finite number")
        return float(cast("float", value))

    def text(self, key: str) -> str:
        """Read a string."""
        return self._typed(key, str, "a string")

    def flag(self, key: str) -> bool:
        """Read a boolean."""
        return self._typed(key, bool, "true or false")

    def integers(self, key: str, least: int = 0) -> tuple[int, ...]:
        """Read a list of integers of at least `least`."""
        rule = f"a list of integers of at least {least}"
        values = cast("list[object]", self._typed(key, list, rule))
        if not all(type(value) is int and value >= least for value in values):
            raise self.wrong(key, rule)
        return cast("tuple[int, ...]", tuple(values))

    def words(self, key: str, allowed: Collection[str]) -> tuple[str, ...]:
        """Read a list of words, each one of `allowed`."""
        rule = f"a list of {' | '.join(allowed)}"
        values = cast("list[object]", self._typed(key, list, rule))
        if not all(isinstance(value, str) and value in allowed for value in values):
            raise self.wrong(key, rule)
        return cast("tuple[str, ...]", tuple(values))

    def section(self, key: str) -> Fields:
        """Read a nested object."""
        return Fields(
            f"{self.where}{key}.", cast("dict[str, object]", self._typed(key, dict, "an object"))
        )

    def expect(self, key: str, *allowed: object) -> None:
        """Raise unless the key is absent, null, or one of `allowed`."""
        value = self.get(key)
        # Compare types, too: in Python False equals 0 and True equals 1.
        if value is None or any(type(value) is type(a) and value == a for a in allowed):
            return
        rule = " or ".join(json.dumps(a) for a in allowed)
        raise self.wrong(key, f"absent or {rule}" if allowed else "absent")
