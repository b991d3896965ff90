"""What is asked of a machine, as answers that travel from a child process or out of a test."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

State = Literal["ok", "warn", "wrong"]


def missing(needed: bool) -> State:
    """Of a part that is not there, or not fit."""
    return "wrong" if needed else "warn"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    item: str
    state: State
    """wrong: something that was asked for cannot work. warn: it works less well than it could, or
    a part that nobody asked for is missing."""
    text: str
    remedy: str = ""
    """A command, where there is one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One device of the CUDA driver."""

    name: str
    major: int
    minor: int
    """Compute capability."""
    multiprocessors: int
    memory: int
    """Bytes, all of it."""
    free: int
    """Bytes the driver calls free; of a board that shares its memory, the page cache is not."""
    integrated: bool

    @property
    def capability(self) -> tuple[int, int]:
        """As launch rules and NVRTC targets spell it."""
        return self.major, self.minor


@dataclass(frozen=True, slots=True, kw_only=True)
class Cuda:
    """The CUDA driver, as its Python bindings see it."""

    error: str = ""
    """Why nothing below is known: an error's name, or what an import said."""
    driver: int = 0
    """CUDA version of the driver: 13000 is 13.0."""
    bindings: int = 0
    """CUDA version the bindings were made for."""
    devices: tuple[Gpu, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Nvrtc:
    """A kernel of ours, compiled."""

    error: str = ""
    version: str = ""
    seconds: float = 0.0
    loaded: bool = False
    """The device took it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRT:
    """TensorRT's Python bindings and the library they call."""

    error: str = ""
    bindings: str = ""
    """Version of the Python package."""
    library: int = 0
    """Version libnvinfer says it has: 101303 is 10.13.3; 0 where it cannot be asked."""


@dataclass(frozen=True, slots=True)
class Output:
    """What a command said. `code` is None where it does not exist or took too long."""

    code: int | None
    text: str


class Machine(Protocol):
    """Everything the doctor asks. Nothing here may hang or raise."""

    @property
    def python(self) -> tuple[int, int]:
        """Version of the interpreter."""
        ...

    @property
    def processor(self) -> str:
        """ "x86_64", "aarch64"."""
        ...

    def version(self, distribution: str) -> str:
        """Version of an installed distribution, or ""."""
        ...

    def text(self, path: str) -> str:
        """A small file, or ""."""
        ...

    def paths(self, pattern: str) -> Sequence[str]:
        """Files that match a glob, sorted."""
        ...

    def run(self, *command: str) -> Output:
        """Run a command for a few seconds at most."""
        ...

    def space(self, directory: str) -> int:
        """Bytes free where a directory is or would be made; -1 where it cannot be written."""
        ...

    def cuda(self) -> Cuda:
        """Ask the driver."""
        ...

    def nvrtc(self, arch: str, device: int) -> Nvrtc:
        """Compile a kernel for `arch`, and load it on a device unless that is -1."""
        ...

    def tensorrt(self) -> TensorRT:
        """Import TensorRT."""
        ...
