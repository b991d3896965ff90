"""The engine for any machine: ONNX Runtime on the CPU, running the operators' ONNX bodies."""

# onnxruntime publishes no types.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from thor_dflash.core.errors import EngineError
from thor_dflash.core.progress import amount
from thor_dflash.core.tensors import Array, Dims, DType, TensorSpec
from thor_dflash.plugins.contract import IN_PLACE
from thor_dflash.runtime.engines.onnxruntime_import import ort
from thor_dflash.runtime.engines.protocol import Call, Graph, Tensor, TensorRows

_ELEMENT = {
    "tensor(float)": DType.F32,
    "tensor(bfloat16)": DType.BF16,
    "tensor(int32)": DType.I32,
    "tensor(float8e4m3fn)": DType.FP8,
    "tensor(int64)": DType.I64,
    "tensor(float16)": DType.F16,
    "tensor(uint8)": DType.U8,
    "tensor(bool)": DType.BOOL,
}

_ONNX_TYPE = {DType.F32: 1, DType.BF16: 16, DType.I32: 6, DType.FP8: 17, DType.I64: 7,
              DType.F16: 10, DType.U8: 2, DType.BOOL: 9}  # fmt: skip
"""ONNX TensorProto element types, spelled out because the runtime does not import onnx."""

FOLDER = "session.model_external_initializers_file_folder_path"
"""Where the weights of a model that is given as bytes are."""


@dataclass(slots=True)
class _Memory:
    """A numpy array and ONNX Runtime's view of the same bytes."""

    array: Array
    value: Any

    @classmethod
    def make(cls, spec: TensorSpec) -> _Memory:
        array = np.zeros(spec.at({}), spec.dtype.numpy)
        value = ort.OrtValue.ortvalue_from_numpy_with_onnx_type(array, _ONNX_TYPE[spec.dtype])
        return cls(array, value)


@dataclass(slots=True, eq=False)
class OrtTensor:
    """A tensor, with spare memory for its next value while the old one is still read."""

    spec: TensorSpec
    now: _Memory
    spare: _Memory | None = None

    def next(self) -> _Memory:
        """The spare memory, for a new value."""
        if self.spare is None:
            self.spare = _Memory.make(self.spec)
        return self.spare

    def swap(self) -> None:
        """Make the new value the current one."""
        assert self.spare is not None
        self.now, self.spare = self.spare, self.now


@dataclass(slots=True, eq=False)
class OrtGraph:
    """A session of ONNX Runtime."""

    name: str
    session: Any
    inputs: Mapping[str, TensorSpec]
    outputs: Mapping[str, TensorSpec]
    in_place: frozenset[str]
    seconds: float = 0.0


@dataclass(slots=True)
class OrtEngine:
    """ONNX Runtime sessions of the graphs of one package directory."""

    package: Path
    threads: int = 0
    """0: every core."""
    _graphs: dict[str, OrtGraph] = field(default_factory=dict[str, OrtGraph])
    _reserved: Array = field(default_factory=lambda: np.empty(0, np.uint8))

    @property
    def device(self) -> str:
        """See Engine."""
        threads = self.threads or os.cpu_count()
        return f"CPU ({platform.machine()}), {threads} threads, ONNX Runtime {ort.__version__}"

    @property
    def loads_late(self) -> bool:
        """See Engine."""
        return True

    def load(self, name: str) -> Graph:
        """See Engine."""
        if name not in self._graphs:
            self._graphs[name] = self._load(name)
        return self._graphs[name]

    def load_model(self, name: str, model: bytes) -> Graph:
        """Load a graph of the package with other outputs than its file has.

        Raises:
            EngineError: it cannot run here.
        """
        return self._load(name, model)

    def _load(self, name: str, model: bytes = b"") -> OrtGraph:
        path = self.package / f"{name}.onnx"
        options = ort.SessionOptions()
        options.intra_op_num_threads = self.threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 4  # its exceptions say what it would log to stderr
        # Each graph has its own threads; those of one graph must not spin while the next one runs.
        options.add_session_config_entry("session.force_spinning_stop", "1")
        options.add_session_config_entry(FOLDER, str(self.package))
        try:
            session = ort.InferenceSession(
                model or str(path), options, providers=["CPUExecutionProvider"]
            )
        except Exception as e:  # ONNX Runtime's errors have no common base of their own
            raise EngineError(
                f"{path} must load in ONNX Runtime {ort.__version__} (got: {e})"
            ) from e
        in_place = session.get_modelmeta().custom_metadata_map.get(IN_PLACE, "")
        return OrtGraph(
            name,
            session,
            _specs(session.get_inputs()),
            _specs(session.get_outputs()),
            frozenset(in_place.split()),
        )

    def empty(self, spec: TensorSpec, dims: Dims) -> Tensor:
        """See Engine."""
        bound = TensorSpec(spec.name, spec.dtype, spec.at(dims))
        try:
            return OrtTensor(bound, _Memory.make(bound))
        except MemoryError as e:
            raise EngineError(
                f"{bound} must fit in memory (got {amount(bound.nbytes({}), 'bytes')}, more than "
                "is free); lower engine.capacity"
            ) from e

    def reserve(self, nbytes: int) -> None:
        """See Engine."""
        self._reserved = np.empty(nbytes, np.uint8)

    def prepare(self, calls: Sequence[Call]) -> None:
        """See Engine. Graphs and tensors of this engine are ready when they are made."""

    def run(self, calls: Sequence[Call]) -> None:
        """See Engine."""
        for call in calls:
            graph = call.graph
            assert isinstance(graph, OrtGraph)
            start = time.perf_counter()
            _run(graph, call)
            graph.seconds += time.perf_counter() - start

    def write(self, tensor: Tensor, values: Array) -> None:
        """See Engine."""
        array = _ort(tensor).now.array
        array[tuple(slice(n) for n in values.shape)] = values

    def clear(self, tensor: Tensor) -> None:
        """See Engine."""
        _ort(tensor).now.array.fill(0)

    def read(self, tensor: Tensor, shape: tuple[int, ...] | None = None) -> Array:
        """See Engine."""
        array = _ort(tensor).now.array
        return array[tuple(slice(n) for n in shape or array.shape)].copy()

    def swap_out(
        self, at: int, parts: Sequence[TensorRows], count: int = 1, stride: int = 0
    ) -> None:
        """See Engine."""
        for step in range(count):
            for place, rows in self._swapped(at + step * stride, parts, step):
                place[:] = rows

    def swap_in(
        self, at: int, parts: Sequence[TensorRows], count: int = 1, stride: int = 0
    ) -> None:
        """See Engine."""
        for step in range(count):
            for place, rows in self._swapped(at + step * stride, parts, step):
                rows[:] = place

    def _swapped(
        self, at: int, parts: Sequence[TensorRows], step: int
    ) -> Iterator[tuple[Array, Array]]:
        """The reserved memory of each part, viewed as the part's rows, and those rows; `step` parts
        further on.
        """
        for part in parts:
            rows = _ort(part.tensor).now.array
            if part.stop:
                size = part.stop - part.start
                rows = rows[:, part.start + step * size : part.stop + step * size]
            place = self._reserved[at : at + rows.nbytes].view(rows.dtype).reshape(rows.shape)
            yield place, rows
            at += rows.nbytes

    def busy(self) -> Mapping[str, float]:
        """See Engine."""
        return {name: graph.seconds for name, graph in self._graphs.items()}

    def close(self) -> None:
        """See Engine."""
        self._graphs.clear()


def _ort(tensor: Tensor) -> OrtTensor:
    assert isinstance(tensor, OrtTensor)
    return tensor


def _run(graph: OrtGraph, call: Call) -> None:
    """Run a call. A tensor that is both input and output gets its new value in spare memory, so
    that a failed call leaves the old one; except where the graph writes in place, past the
    committed rows.
    """
    binding = graph.session.io_binding()
    read = {id(tensor) for tensor in call.inputs.values()}
    swaps: list[OrtTensor] = []
    for name in graph.inputs:
        binding.bind_ortvalue_input(name, _ort(call.inputs[name]).now.value)
    for name in graph.outputs:
        tensor = _ort(call.outputs[name])
        if id(tensor) in read and name not in graph.in_place:
            swaps.append(tensor)
            binding.bind_ortvalue_output(name, tensor.next().value)
        else:
            binding.bind_ortvalue_output(name, tensor.now.value)
    try:
        graph.session.run_with_iobinding(binding)
    except Exception as e:  # ONNX Runtime's errors have no common base of their own
        raise EngineError(f"graph {graph.name} must run in ONNX Runtime (got: {e})") from e
    for tensor in swaps:
        tensor.swap()


def _specs(infos: Sequence[Any]) -> dict[str, TensorSpec]:
    return {i.name: TensorSpec(i.name, _ELEMENT[i.type], tuple(i.shape)) for i in infos}
