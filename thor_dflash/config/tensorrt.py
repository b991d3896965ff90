"""The configuration section of the TensorRT builder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from thor_dflash.core.errors import ConfigError

LEVELS = 5
"""Highest optimisation level of TensorRT's builder."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRTConfig:
    """How TensorRT builds its engines."""

    prefill_linears: Literal["auto", "plugin", "tensorrt"] = "auto"
    """What computes the linears of a prefill. plugin: our kernels, which read the same weights as
    a verify. tensorrt: its own FP4 matrix products, which also quantise the activations and need
    their own weights. auto: tensorrt if NVFP4 weights come with an activation scale, else plugin.
    """
    workspace_mib: int = 4096
    """Maximum scratch memory of a layer, MiB. A Thor shares its memory with the CPU."""
    level: int = 3
    """Optimisation level of the builder, 0 to 5; 3 is TensorRT's default."""
    timings: str = "~/.cache/thor-dflash/timings"
    """Directory of the timing cache, which saves time in the next build."""
    inspect: Literal["refuse", "note"] = "refuse"
    """What to do if an engine has a copy, a precision or a layer that its graph does not have:
    refuse it, or note it in the package's tensorrt.log."""

    def __post_init__(self) -> None:
        if not 0 <= self.level <= LEVELS:
            raise ConfigError(f"build.tensorrt.level must be 0 to {LEVELS} (got {self.level})")
        if self.workspace_mib < 1:
            raise ConfigError(
                f"build.tensorrt.workspace_mib must be >= 1 (got {self.workspace_mib})"
            )

    @property
    def timings_directory(self) -> Path:
        """See `directory`."""
        return directory("build.tensorrt.timings", self.timings)
