"""Engines to and from disk without a copy in memory."""

# tensorrt is not installed where the checkers run: the tests check this file against its bindings.
# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUntypedBaseClass=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportAttributeAccessIssue=false

from __future__ import annotations

import hashlib
import io
from pathlib import Path

import tensorrt as trt


class Writer(trt.IStreamWriter):
    """Writes an engine as TensorRT serialises it."""

    def __init__(self, path: Path) -> None:
        trt.IStreamWriter.__init__(self)
        self._file = path.open("wb")
        self._digest = hashlib.sha256()
        self.failure: OSError | None = None
        """What writing raised; TensorRT's own frames cannot carry it."""

    def write(self, data: bytes) -> int:
        """TensorRT calls this; the bytes that were written."""
        try:
            self._file.write(data)
        except OSError as e:
            self.failure = e
            return 0
        self._digest.update(data)
        return len(data)

    def close(self) -> str:
        """SHA-256 of what was written, in hexadecimal."""
        self._file.close()
        return self._digest.hexdigest()


class Reader(trt.IStreamReaderV2):
    """Reads an engine as TensorRT asks for it."""

    def __init__(self, path: Path) -> None:
        trt.IStreamReaderV2.__init__(self)
        self._file = path.open("rb")

    def read(self, num_bytes: int, stream: int) -> bytes:
        """TensorRT calls this."""
        del stream
        return self._file.read(num_bytes)

    def seek(self, offset: int, where: trt.SeekPosition) -> bool:
        """TensorRT calls this. From the end it counts backward."""
        if where == trt.SeekPosition.END:
            self._file.seek(-abs(offset), io.SEEK_END)
        else:
            first = where == trt.SeekPosition.SET
            self._file.seek(offset, io.SEEK_SET if first else io.SEEK_CUR)
        return True

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()
