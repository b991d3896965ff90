"""Writes engines to disk without a copy in memory."""

# tensorrt is not installed where the checkers run: the tests check this file against its bindings.
# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUntypedBaseClass=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportAttributeAccessIssue=false

from __future__ import annotations

import hashlib
from pathlib import Path

import tensorrt as trt


class EngineFileWriter(trt.IStreamWriter):
    """Writes an engine as TensorRT serialises it."""

    def __init__(self, path: Path) -> None:
        trt.IStreamWriter.__init__(self)
        self._file = path.open("wb")
        self._digest = hashlib.sha256()
        self.failure: BaseException | None = None
        """The exception raised while writing; it cannot propagate through TensorRT's frames."""

    def write(self, data: bytes) -> int:
        """Called by TensorRT. Returns the number of bytes written."""
        try:
            self._file.write(data)
        except BaseException as e:
            self.failure = e
            return 0
        self._digest.update(data)
        return len(data)

    def close(self) -> str:
        """Close the file. Returns the SHA-256 of what was written, in hexadecimal."""
        self._file.close()
        return self._digest.hexdigest()
