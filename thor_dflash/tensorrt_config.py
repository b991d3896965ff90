"""The TensorRT builder's section of the configuration tree."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from thor_dflash.errors import ConfigError

CUBINS = "~/.cache/thor-dflash/cubins"
"""Where compiled kernels are kept."""
LEVELS = 5
"""Highest level of TensorRT's builder."""


def directory(key: str, text: str) -> Path:
    """The directory that a key names; it may begin with a home, ~ or ~user.

    Raises:
        ConfigError: there is no such home, as of a user that no list of users has.
    """
    try:
        return Path(text).expanduser()
    except RuntimeError as e:
        raise ConfigError(f"{key} must begin with a home that is known (got {text})") from e


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRTConfig:
    """How TensorRT builds its engines."""

    prefill_linears: Literal["auto", "plugin", "tensorrt"] = "auto"
    """Who multiplies in a prefill. plugin: our kernels, which read the same weights as a verify.
    tensorrt: its own FP4 products, which quantise the rows too and need weights of their own.
    auto: tensorrt where NVFP4 weights come with the scale of the rows, else plugin."""
    workspace_mib: int = 4096
    """Most memory of a layer's scratch, MiB. On a Thor the CPU's memory is the same."""
    level: int = 3
    """How long it looks for faster layers, 0 to 5; 3 is TensorRT's own choice."""
    timings: str = "~/.cache/thor-dflash/timings"
    """Directory of what it has measured, so that the next build need not."""
    cubins: str = CUBINS
    """Directory of compiled kernels, as engine.cubins."""
    inspect: Literal["refuse", "note"] = "refuse"
    """What to do where an engine holds a copy, a precision or a layer that its graph does not:
    refuse it, or write it into the package's tensorrt.log."""

    def __post_init__(self) -> None:
        if not 0 <= self.level <= LEVELS:
            raise ConfigError(f"build.tensorrt.level must be 0 to {LEVELS} (got {self.level})")
        if self.workspace_mib < 1:
            raise ConfigError(
                f"build.tensorrt.workspace_mib must be >= 1 (got {self.workspace_mib})"
            )

    @property
    def cubins_directory(self) -> Path:
        """See `directory`."""
        return directory("build.tensorrt.cubins", self.cubins)

    @property
    def timings_directory(self) -> Path:
        """See `directory`."""
        return directory("build.tensorrt.timings", self.timings)
