"""What TensorRT needs from its host program: a logger, and a reader for engine files."""

# tensorrt is not installed where the checkers run: the tests check this file against its bindings.
# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUntypedBaseClass=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportAttributeAccessIssue=false

from __future__ import annotations

import io
from pathlib import Path

import tensorrt as trt

PIECE = 16 << 20
"""Most bytes of an engine file in memory besides TensorRT's own copy."""


class Messages(trt.ILogger):
    """A logger that keeps warnings and errors."""

    def __init__(self) -> None:
        trt.ILogger.__init__(self)
        self.lines: list[str] = []
        self.errors: list[str] = []

    def log(self, severity: trt.ILogger.Severity, msg: str) -> None:
        """Called by TensorRT, from any thread."""
        if severity in (trt.ILogger.Severity.ERROR, trt.ILogger.Severity.INTERNAL_ERROR):
            self.errors.append(msg)
        if severity not in (trt.ILogger.Severity.INFO, trt.ILogger.Severity.VERBOSE):
            self.lines.append(f"{severity.name}: {msg}")

    def begin(self, name: str) -> None:
        """Start collecting the messages about an engine."""
        self.errors.clear()
        self.lines.append(f"== {name}")

    @property
    def why(self) -> str:
        """The errors since the last `begin`, in one line."""
        return "; ".join(self.errors) or "TensorRT did not say"


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
