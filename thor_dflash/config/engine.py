"""The configuration section of a session's engine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from thor_dflash.config.bounds import Count, directory


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How this machine runs a package. `threads` is for ort only, `device` to `cubins` for cuda and
    tensorrt, the last two keys for cuda.
    """

    capacity: Count = 0
    """Context of the session, tokens; 0: the package's."""
    threads: Count = 0
    """CPU threads, at most one per core of the machine that opens the package; 0: every core."""
    block: Count = 0
    """Rows of a verify block, one of the package's widths; 0: the package's own block."""
    chunk: Count = 0
    """Rows of the largest prefill step, one of the package's sizes; 0: the package's own, or a
    server's choice by the measured time of a step."""
    device: Count = 0
    """Index of the GPU, as the driver numbers them."""
    graphs: bool = True
    """Replay each step as one CUDA graph; false launches its kernels one by one."""
    overlap: bool = True
    """Let a kernel prefetch its weights while the previous kernel finishes (programmatic dependent
    launch)."""
    cubins: str = "~/.cache/thor-dflash/cubins"
    """Directory of compiled kernels."""
    tune: Literal["auto", "off", "required"] = "auto"
    """Launches that were measured on this device, in place of the rules'. auto: if there are any,
    and a server measures what is missing before it is ready; required: refuses a package whose
    launches were not all measured. They decide how sums are rounded."""
    tunings: str = "~/.cache/thor-dflash/tunings"
    """Directory of the records of measured launches."""

    @property
    def cubins_directory(self) -> Path:
        """See `directory`."""
        return directory("engine.cubins", self.cubins)

    @property
    def tunings_directory(self) -> Path:
        """See `directory`."""
        return directory("engine.tunings", self.tunings)
