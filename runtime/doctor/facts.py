"""The facts that the doctor needs of a machine, which a child process or a test can supply."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "warn", "wrong"]


def missing(needed: bool) -> State:
    """The state of a part that is missing or unfit."""
    return "wrong" if needed else "warn"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    item: str
    state: State
    """wrong: something that was requested cannot work. warn: it works less well than it could, or
    an optional part is missing."""
    text: str
    remedy: str = ""
    """A command that fixes it, or "" if there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One device of the CUDA driver."""

    name: str
    major: int
    minor: int
    """Compute capability."""
    multiprocessors: int
    memory: int
    """Total memory, bytes."""
    free: int
    """Free memory by the driver, bytes; on a board with shared memory this excludes the page cache.
    """
    integrated: bool

    @property
    def capability(self) -> tuple[int, int]:
        """As launch rules and NVRTC targets spell it."""
        return self.major, self.minor


@dataclass(frozen=True, slots=True, kw_only=True)
class Cuda:
    """The CUDA driver, as its Python bindings see it."""

    error: str = ""
    """Why the facts below are unknown: an error's name, or the message of a failed import."""
    driver: int = 0
    """CUDA version of the driver: 13000 is 13.0."""
    bindings: int = 0
    """CUDA version that the bindings were made for."""
    devices: tuple[Gpu, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Nvrtc:
    """The trial compilation of one of our kernels."""

    error: str = ""
    version: str = ""
    seconds: float = 0.0
    loaded: bool = False
    """The device loaded it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRT:
    """TensorRT's Python bindings and the library they call."""

    error: str = ""
    bindings: str = ""
    """Version of the Python package."""
    library: int = 0
    """Version reported by libnvinfer: 101303 is 10.13.3; 0 if it cannot be queried."""


@dataclass(frozen=True, slots=True)
class CommandOutput:
    """Output of a command. `code` is None if the command does not exist or took too long."""

    code: int | None
    text: str
