"""Weights of TensorRT's own layers: written to one scratch file, mapped, and passed to the parser.

TensorRT keeps pointers to them until an engine is built. The system can reclaim the memory of a
mapping, unlike that of thirteen gigabytes of arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx

from thor_dflash.builders.output.weight_files import WeightFiles
from thor_dflash.core.tensors import Array, DType
from thor_dflash.plugins.onnx_builder import ONNX_TYPE

FILE = "constants.bin"
"""Name of the scratch file, which the deployment graph refers to."""
EXTERNAL = onnx.TensorProto.EXTERNAL
FP4 = onnx.TensorProto.FLOAT4E2M1
"""Element type of NVFP4 codes: two per byte, the first in the low nibble, as we store them."""


@dataclass(slots=True)
class EngineConstants:
    """The tensors that some graphs hold as constants, each once."""

    source: WeightFiles
    """The tensors as the checkpoints hold them."""
    files: WeightFiles = field(default_factory=WeightFiles)
    _names: list[str] = field(default_factory=list[str])

    def tensor(self, name: str) -> onnx.TensorProto:
        """Return the initializer of a weight."""
        if name not in self._names:
            old = self.source.stored(name)
            self._names.append(name)
            self.files.add(FILE, name, old.dtype, old.shape, self._maker(name))
        stored = self.files.stored(name)
        kind, shape = ONNX_TYPE[stored.dtype], stored.shape
        if stored.dtype is DType.U8:
            kind, shape = FP4, (*shape[:-1], 2 * shape[-1])
        tensor = onnx.TensorProto(name=name, data_type=kind, dims=shape)
        tensor.data_location = EXTERNAL
        place = {"location": FILE, "offset": stored.offset, "length": stored.nbytes}
        for key, value in place.items():
            tensor.external_data.add(key=key, value=str(value))
        return tensor

    def _maker(self, name: str) -> Callable[[], Array]:
        return lambda: self.source.array(name)

    @property
    def nbytes(self) -> int:
        """Size of the file, bytes. There must be a tensor."""
        return self.files.nbytes(FILE)

    def write(self, directory: Path, advance: Callable[[int], None]) -> None:
        """Write the file."""
        self.files.write(FILE, advance, directory / FILE)

    def mapped(self, graph: onnx.GraphProto, directory: Path) -> Iterator[tuple[str, Array]]:
        """Yield name and bytes, uint8 [n], of a graph's constants. They must outlive the build."""
        names = [t.name for t in graph.initializer if t.data_location == EXTERNAL]
        if not names:
            return
        whole = np.memmap(directory / FILE, np.uint8, "r")
        for name in names:
            stored = self.files.stored(name)
            yield name, whole[stored.offset : stored.offset + stored.nbytes]
