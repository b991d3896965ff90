"""Runs documents through a target layer by layer, each from the disk, and sums up what the linears
receive and the cache holds.

The rows between two layers are in files, one pair for all layers: memory holds one layer's weights
and a chunk of rows. A finished layer is noted in a journal, so that a run that is killed continues
with the next one; the same documents give the same bytes.
"""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import thor_dflash
from thor_dflash import calib
from thor_dflash.builders.checkpoint.quantized_matrix import KINDS
from thor_dflash.builders.checkpoint.target import EMBEDDING, HEAD, read_target
from thor_dflash.builders.resume_key import code, inventory
from thor_dflash.calib.calibrate.activations import ActivationSums
from thor_dflash.calib.calibrate.layer_session import CHUNK, LayerSession
from thor_dflash.calib.quantize.staged_checkpoint import StagedCheckpoint, shard_file
from thor_dflash.calib.quantize.statistics import (
    CacheStatistics,
    InputStatistics,
    fingerprint,
    statistics_file,
)
from thor_dflash.calib.quantize.tensors import OutputTensor
from thor_dflash.config.calibrate import CalibrateConfig
from thor_dflash.core.model_dims import TargetDims
from thor_dflash.core.progress import Progress, ProgressTask
from thor_dflash.plugins.numpy_math import rms_norm, wide

Floats = NDArray[np.float32]

ROWS = ("rows.0", "rows.1")
"""The rows that a layer reads and those that it writes, in turn."""


def calibrate(
    directory: Path,
    documents: Sequence[tuple[int, ...]],
    out: Path,
    config: CalibrateConfig,
    progress: Progress,
) -> None:
    """Write the statistics of a target's activations to `out`, or finish it after a stop.

    documents: token ids, at least one each.
    Raises:
        CheckpointError: the checkpoint is not supported, or its activations are not finite.
        ConfigError: `out` cannot be written, or its disk is too small.
    """
    target = read_target(directory)
    count = sum(map(len, documents))
    shape = (count, target.dims.hidden)
    shards = [shard_file(name, [OutputTensor(name, "F32", shape)]) for name in ROWS]
    folder = Path(calib.__path__[0])
    own = repr((documents, code(folder / "calibrate", folder / "quantize")))
    key = "\n".join([own, *inventory(directory)]).encode(errors="surrogateescape")
    with StagedCheckpoint(out, shards, hashlib.sha256(key).hexdigest()) as stage:
        parts = list(_Run(directory, target.dims, documents, stage, config).layers(progress))
        codes = {target.shards.entry(one.codes).dtype.name for one in target.linears.values()}
        metadata = {
            "model": fingerprint(target),
            "tokens": str(count),
            "documents": str(len(documents)),
            "corpus": hashlib.sha256(repr(documents).encode()).hexdigest(),
            # A name need not be UTF-8.
            "source": os.fsencode(directory.resolve().name).decode(errors="replace"),
            "weights": " ".join(sorted(KINDS[name].value for name in codes)),
            "engine": "ort, layer by layer, float32",
            "producer": f"thor-dflash {thor_dflash.__version__}",
        }
        inputs = {name: one for part in parts for name, one in part.inputs.items()}
        cache = {layer: one for part in parts for layer, one in part.cache.items()}
        stage.finish_file(statistics_file(inputs, cache, metadata))


@dataclass(frozen=True, slots=True)
class _LayerStatistics:
    inputs: Mapping[str, InputStatistics]
    cache: Mapping[int, CacheStatistics]


@dataclass(frozen=True, slots=True)
class _Run:
    directory: Path
    dims: TargetDims
    documents: Sequence[tuple[int, ...]]
    stage: StagedCheckpoint
    config: CalibrateConfig

    def layers(self, progress: Progress) -> Iterator[_LayerStatistics]:
        """Yield the statistics of each layer, then those of the head's rows."""
        done = {row["unit"]: row for row in self.stage.latest(progress)}
        count, depth = sum(map(len, self.documents)), len(self.dims.layers)
        if "embedding" not in done:
            self._finish("embedding", self._write(ROWS[0], self._embedded()), None)
        with progress.task(f"calibrating {depth} layers", count * depth, "rows") as task:
            for i in range(depth):
                if str(i) in done:
                    found = _unpacked(done[str(i)]["statistics"])
                    task.advance(count)
                else:
                    found = self._layer(i, task)
                yield found
        yield self._head()

    def _embedded(self) -> Iterator[Floats]:
        table = read_target(self.directory).tensor(EMBEDDING)
        for tokens in self.documents:
            for at in range(0, len(tokens), CHUNK):
                yield table[list(tokens[at : at + CHUNK])].astype(np.float32)

    def _layer(self, i: int, task: ProgressTask) -> _LayerStatistics:
        longest = max(map(len, self.documents))
        session = LayerSession(self.directory, i, longest, self.config.threads)
        sums = ActivationSums()

        def after() -> Iterator[Floats]:
            for part in self._parts(ROWS[i % 2]):
                for rows in session.run(part, sums):
                    task.advance(len(rows))
                    yield rows

        digest = self._write(ROWS[(i + 1) % 2], after())
        cache = sums.cache(self.dims.attention.kv_heads)
        found = _LayerStatistics(sums.inputs(), {i: cache} if cache else {})
        self._finish(str(i), digest, found)
        return found

    def _head(self) -> _LayerStatistics:
        weight = wide(read_target(self.directory).tensor("norm.weight"))
        sums = ActivationSums()
        for part in self._parts(ROWS[len(self.dims.layers) % 2]):
            for rows in part:
                sums.received(HEAD, rms_norm(wide(rows), weight, self.dims.eps, 1.0))
        return _LayerStatistics(sums.inputs(), {})

    def _parts(self, tensor: str) -> Iterator[Iterator[Floats]]:
        """Yield the chunks of each document's rows."""
        at, row = 0, 4 * self.dims.hidden

        def chunks(start: int, count: int) -> Iterator[Floats]:
            for first in range(0, count, CHUNK):
                size = min(CHUNK, count - first)
                data = self.stage.read(tensor, (start + first) * row, size * row)
                yield np.frombuffer(data, np.float32).reshape(size, -1)

        for tokens in self.documents:
            yield chunks(at, len(tokens))
            at += len(tokens)

    def _write(self, tensor: str, rows: Iterator[Floats]) -> list[Any]:
        """Write the rows of all documents; return their bytes and hash, as a journal has them."""
        at, digest = 0, hashlib.sha256()
        for part in rows:
            data = part.tobytes()
            self.stage.write(tensor, at, data)
            digest.update(data)
            at += len(data)
        return [tensor, at, digest.hexdigest()]

    def _finish(self, unit: str, written: list[Any], found: _LayerStatistics | None) -> None:
        name, *entry = written
        table = _packed(found) if found else {}
        self.stage.finish_unit({"unit": unit, "tensors": {name: entry}, "statistics": table})


def _packed(found: _LayerStatistics) -> dict[str, Any]:
    """Return a layer's statistics as JSON."""
    return {
        "inputs": {name: [_text(one.energy), one.amax] for name, one in found.inputs.items()},
        "cache": {
            layer: [_text(one.k_amax), _text(one.v_amax), one.v_rms]
            for layer, one in found.cache.items()
        },
    }


def _unpacked(table: dict[str, Any]) -> _LayerStatistics:
    inputs = {
        name: InputStatistics(_floats(h), amax) for name, (h, amax) in table["inputs"].items()
    }
    cache = {
        int(layer): CacheStatistics(_floats(k), _floats(v), rms)
        for layer, (k, v, rms) in table["cache"].items()
    }
    return _LayerStatistics(inputs, cache)


def _text(values: Floats) -> str:
    return base64.b64encode(values.tobytes()).decode()


def _floats(text: str) -> Floats:
    return np.frombuffer(base64.b64decode(text), np.float32)
