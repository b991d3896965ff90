"""Types of numbers with a range, and directories, as the configuration's sections use them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from msgspec import Meta

from thor_dflash.core.bounds import LARGEST, Count, Positive
from thor_dflash.core.errors import ConfigError

__all__ = ["DAY_S", "LARGEST", "Count", "Fraction", "Positive", "directory"]

DAY_S = 86_400
"""Longest time, s. Operating systems do not accept much longer ones."""

Fraction = Annotated[float, Meta(gt=0, le=1)]


def directory(key: str, text: str) -> Path:
    """The directory that a key names; it may begin with a home directory, ~ or ~user.

    Raises:
        ConfigError: it is empty, which in a shell usually comes from an unset variable; or the home
            directory is unknown, for example because there is no such user.
    """
    if not text:
        raise ConfigError(f"{key} must be a directory (got an empty name)")
    try:
        return Path(text).expanduser()
    except RuntimeError as e:
        raise ConfigError(f"{key} must begin with a home that is known (got {text})") from e
