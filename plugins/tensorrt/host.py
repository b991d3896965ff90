"""What TensorRT needs from its host program: a logger, and a reader for engine files. The logger
also keeps the exceptions of plugins.
"""

# tensorrt is not installed where the checkers run: the tests check this file against its bindings.
# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUntypedBaseClass=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportAttributeAccessIssue=false

from __future__ import annotations

import functools
import io
from collections.abc import Callable
from pathlib import Path
from typing import Concatenate, ParamSpec, Protocol, TypeVar

import tensorrt as trt

PIECE = 16 << 20
"""Most bytes of an engine file in memory besides TensorRT's own copy."""


class Messages(trt.ILogger):
    """A logger that keeps warnings and errors, and the exceptions that plugins raised."""

    def __init__(self) -> None:
        trt.ILogger.__init__(self)
        self.lines: list[str] = []
        self.errors: list[str] = []
        self.failures: list[BaseException] = []
        """See `keeps_failure`."""

    def log(self, severity: trt.ILogger.Severity, msg: str) -> None:
        """Called by TensorRT, from any thread."""
        if severity in (trt.ILogger.Severity.ERROR, trt.ILogger.Severity.INTERNAL_ERROR):
            self.errors.append(msg)
        if severity not in (trt.ILogger.Severity.INFO, trt.ILogger.Severity.VERBOSE):
            self.lines.append(f"{severity.name}: {msg}")

    def begin(self, name: str) -> None:
        """Start collecting the messages about an engine."""
        self.errors.clear()
        self.failures.clear()
        self.lines.append(f"== {name}")

    @property
    def why(self) -> str:
        """The errors since the last `begin`, in one line."""
        return "; ".join(self.errors) or "TensorRT did not say"

    def raise_failure(self) -> None:
        """Raise the first exception of a plugin since the last `begin`, if there is one."""
        if self.failures:
            raise self.failures[0]


class Failing(Protocol):
    """An object whose methods TensorRT calls."""

    messages: Messages


P = ParamSpec("P")
S = TypeVar("S", bound=Failing)
T = TypeVar("T")


def keeps_failure(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """Keep an exception of a method that TensorRT calls: its bindings print it and give TensorRT an
    error number, or, for a workspace, nothing.
    """

    @functools.wraps(method)
    def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return method(self, *args, **kwargs)
        except BaseException as e:
            self.messages.failures.append(e)
            raise

    return call


class Reader(trt.IStreamReaderV2):
    """Reads an engine file on TensorRT's demand, so that it is never in memory twice."""

    def __init__(self, path: Path) -> None:
        trt.IStreamReaderV2.__init__(self)
        self._file = path.open("rb")

    def read(self, num_bytes: int, stream: int) -> bytes:
        """Called by TensorRT, which asks again for what is missing of `num_bytes`."""
        del stream
        return self._file.read(min(num_bytes, PIECE))

    def seek(self, offset: int, where: trt.SeekPosition) -> bool:
        """Called by TensorRT. An offset from the end is counted backward."""
        if where == trt.SeekPosition.END:
            self._file.seek(-abs(offset), io.SEEK_END)
        else:
            first = where == trt.SeekPosition.SET
            self._file.seek(offset, io.SEEK_SET if first else io.SEEK_CUR)
        return True

    def close(self) -> None:
        """Close the file."""
        self._file.close()
