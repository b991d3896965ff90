"""The configuration section of the TensorRT builder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta

from thor_dflash.config.bounds import Positive, directory


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRTConfig:
    """How TensorRT builds its engines."""

    prefill_linears: Literal["auto", "plugin", "tensorrt"] = "auto"
    """What computes the linears of a prefill. plugin: our kernels, which read the same weights as
    a verify. tensorrt: its own FP4 matrix products, which also quantise the rows and need their own
    weights. auto: tensorrt if all NVFP4 weights have an activation scale and no JSON file declares
    them W4A16 (only weights quantised), else plugin."""
    workspace_mib: Positive = 4096
    """Largest scratch memory of a layer, MiB. A Thor shares its memory with the CPU."""
    level: Annotated[int, Meta(ge=0, le=5)] = 3
    """Optimisation level: how long the builder looks for faster layers; 3 is TensorRT's default."""
    timings: str = "~/.cache/thor-dflash/timings"
    """Directory of the builder's timing cache, which saves time in the next build."""
    inspect: Literal["auto", "refuse", "note"] = "auto"
    """What to do if TensorRT's inspector shows a copy, a precision or a layer that the graph does
    not have. refuse: fail. note: write it to the package's tensorrt.log. auto: fail if it is
    certain, write it to the log if the inspector uses words that are unknown here."""

    @property
    def timings_directory(self) -> Path:
        """See `directory`."""
        return directory("build.tensorrt.timings", self.timings)
