"""Engines to disk without a copy in memory."""

# tensorrt is not installed where the checkers run: the tests check this file against its bindings.
# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUntypedBaseClass=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportAttributeAccessIssue=false

from __future__ import annotations

import hashlib
from pathlib import Path

import tensorrt as trt


class Writer(trt.IStreamWriter):
    """Writes an engine as TensorRT serialises it."""

    def __init__(self, path: Path) -> None:
        trt.IStreamWriter.__init__(self)
        self._file = path.open("wb")
        self._digest = hashlib.sha256()
        self.failure: BaseException | None = None
        """What writing raised; TensorRT's own frames cannot carry it."""

    def write(self, data: bytes) -> int:
        """TensorRT calls this; the bytes that were written."""
        try:
            self._file.write(data)
        except BaseException as e:
            self.failure = e
            return 0
        self._digest.update(data)
        return len(data)

    def close(self) -> str:
        """SHA-256 of what was written, in hexadecimal."""
        self._file.close()
        return self._digest.hexdigest()
