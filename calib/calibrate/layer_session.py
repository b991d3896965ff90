"""One layer of a target on ONNX Runtime, its weights taken from the checkpoint: the graph is the
one that a package has.
"""

# onnxruntime publishes no types.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray

from thor_dflash.builders.checkpoint.target import read_target
from thor_dflash.builders.graphs.target import GraphOptions, TargetGraphs
from thor_dflash.builders.graphs.weight_placement import WeightPlacement
from thor_dflash.builders.output.weight_files import WeightFiles
from thor_dflash.calib.calibrate.activations import ActivationSums, finite
from thor_dflash.calib.calibrate.graph_observer import observed_nodes
from thor_dflash.core.errors import EngineError
from thor_dflash.core.tensors import Array, DType
from thor_dflash.plugins.contract import NEXT
from thor_dflash.plugins.onnx_builder import ONNX_TYPE
from thor_dflash.plugins.verify_attention import TILE
from thor_dflash.runtime.engines.onnxruntime_import import ort

Floats = NDArray[np.float32]

CHUNK = 256
"""Most rows of a step."""
ROWS_RANK = 2
"""Rank of rows, which alone begin with the rows of a step."""


class LayerSession:
    """Runs layer `layer` of the checkpoint over documents of at most `longest` rows, in float32.

    The files are mapped anew for each layer, so that the pages of the layer before do not count as
    memory of the process. Holds the layer's weights as they are stored and in float32.
    Raises: CheckpointError.
    """

    def __init__(self, directory: Path, layer: int, longest: int, threads: int) -> None:
        target = read_target(directory)
        options = GraphOptions(
            block=1, chunk=CHUNK, activations=DType.F32, kv=DType.F32, saves="records",
            vocab=target.dims.vocab, taps=(),
        )  # fmt: skip
        files = WeightFiles()
        graphs = TargetGraphs(target.dims, WeightPlacement(target, files), options, {})
        self._model = graphs.layer(layer).proto()
        self._name = f"{directory}, layer {layer}"
        self._rows = -(-longest // CHUNK) * CHUNK
        self._weights = {
            tensor.name: files.array(tensor.name)
            for tensor in self._model.graph.initializer
            if tensor.data_location == onnx.TensorProto.EXTERNAL
        }
        self._result = self._model.graph.output[-1].name
        self._expose()
        self._session = self._load(threads)

    def _expose(self) -> None:
        """Make outputs of the values from which activations follow."""
        graph = self._model.graph
        wanted = {name for *_, ports in observed_nodes(graph) for name in ports.values()}
        graph.output.extend([info for info in graph.value_info if info.name in wanted])
        for info in (*graph.input, *graph.output, *graph.value_info):
            dims = info.type.tensor_type.shape.dim
            if len(dims) == ROWS_RANK and dims[0].dim_value == CHUNK:
                dims[0].dim_param = "rows"  # the last step of a document is shorter

    def _load(self, threads: int) -> ort.InferenceSession:
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 4  # its exceptions hold what it would log to stderr
        # Packed copies of the weights would double what a layer needs.
        options.add_session_config_entry("session.disable_prepacking", "1")
        values = [
            ort.OrtValue.ortvalue_from_numpy_with_onnx_type(
                np.ascontiguousarray(x), ONNX_TYPE[DType.of(x)]
            )
            for x in self._weights.values()
        ]
        options.add_external_initializers(list(self._weights), values)
        try:
            return ort.InferenceSession(
                self._model.SerializeToString(), options, providers=["CPUExecutionProvider"]
            )
        except Exception as e:  # ONNX Runtime's errors have no base class of their own
            raise EngineError(f"{self._name} must load in ONNX Runtime (got: {e})") from e

    def run(self, rows: Iterator[Floats], sums: ActivationSums) -> Iterator[Floats]:
        """Run one document from an empty state: yield the rows after the layer for each chunk of
        at most CHUNK rows, and add to the sums.
        """
        state = self._empty()
        length = 0
        for part in rows:
            feeds = state | {"x": part}
            for name, value in (("length", length), ("accepted", 0), ("valid", len(part))):
                feeds[name] = np.array([value], np.int32)
            found = self._run(feeds)
            self._add(feeds | found, length, sums)
            state |= {
                name.removeprefix(NEXT): x for name, x in found.items() if name.startswith(NEXT)
            }
            length += len(part)
            yield finite(found[self._result], self._result)

    def _empty(self) -> dict[str, Array]:
        sizes = {"cache_rows": -(-self._rows // TILE) * TILE}
        made: dict[str, Array] = {}
        for info in self._session.get_inputs():
            if "." in info.name:
                shape = [sizes[n] if isinstance(n, str) else n for n in info.shape]
                made[info.name] = np.zeros(shape, np.float32)
        return made

    def _run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        names = [info.name for info in self._session.get_outputs()]
        inputs = {info.name for info in self._session.get_inputs()}
        try:
            made = self._session.run(names, {n: x for n, x in feeds.items() if n in inputs})
        except Exception as e:  # as above
            raise EngineError(f"{self._name} must run in ONNX Runtime (got: {e})") from e
        return {name: np.asarray(x) for name, x in zip(names, made, strict=True)}

    def _add(self, values: Mapping[str, Array], length: int, sums: ActivationSums) -> None:
        for node, op, a, ports in observed_nodes(self._model.graph):
            x = {
                port: self._weights[name] if name in self._weights else values[name]
                for port, name in ports.items()
            }
            sums.step(op, node.name, x, a, length + np.arange(len(values["x"])))
