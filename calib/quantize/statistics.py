"""The statistics of a target's activations: a safetensors file.

    h.INPUT      F32 [K]    mean of the squares of each input channel
    amax.INPUT   F32 []     largest magnitude
    kv.L.k       F32 [Hkv]  largest magnitude of each head's keys in attention layer L, after norm
                            and rotation, as the cache holds them
    kv.L.v       F32 [Hkv]  the same of values
    kv.L.v_rms   F32 []     root of the mean of the values' squares

INPUT names the rows that one linear or several receive: layers.0.linear_attn.in_proj (in_proj_qkv
and in_proj_z), layers.3.self_attn.qkv, layers.0.mlp.gate_up; else it is the linear. The header's
metadata hold FORMAT as `format`, `model` (see `fingerprint`), `tokens`, and how the file was made.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from thor_dflash.builders.checkpoint.shards import read_header, read_metadata
from thor_dflash.builders.checkpoint.target import TargetCheckpoint
from thor_dflash.calib.quantize.staged_checkpoint import shard_file
from thor_dflash.calib.quantize.tensors import OutputTensor
from thor_dflash.core.errors import CheckpointError
from thor_dflash.core.message_text import show
from thor_dflash.core.tensors import Array

Floats = NDArray[np.float32]

FORMAT = "thor-dflash.statistics.1"

SHARE_INPUT = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv"),
    **dict.fromkeys(("gate_proj", "up_proj"), "gate_up"),
    **dict.fromkeys(("in_proj_qkv", "in_proj_z"), "in_proj"),
}
"""Linears that receive the same rows, so that engines run them as one product: they share the
second scale."""


def input_of(linear: str) -> str:
    """Return the name of the rows that a linear receives."""
    layer, dot, part = linear.rpartition(".")
    return f"{layer}{dot}{SHARE_INPUT.get(part, part)}"


@dataclass(frozen=True, slots=True)
class InputStatistics:
    """The rows that one linear or several receive."""

    energy: Floats
    """[K], mean of squares."""
    amax: float


@dataclass(frozen=True, slots=True)
class CacheStatistics:
    """Keys and values of one attention layer."""

    k_amax: Floats
    """[Hkv]."""
    v_amax: Floats
    """[Hkv]."""
    v_rms: float


@dataclass(frozen=True, slots=True)
class Statistics:
    """All that a file of statistics holds."""

    inputs: Mapping[str, InputStatistics]
    cache: Mapping[int, CacheStatistics]
    metadata: Mapping[str, str]
    path: Path = Path()
    sha256: str = ""
    """Of the file's bytes."""

    def check(self, target: TargetCheckpoint, columns: Mapping[str, int]) -> None:
        """Refuse the statistics of another model.

        columns: input -> its width.
        Raises: CheckpointError.
        """
        if self.metadata.get("model") != fingerprint(target):
            raise CheckpointError(
                f"{self.path} must be made of {target.directory} or of a quantised copy of it "
                f"(got the statistics of {show(self.metadata.get('source', ''))}, whose norms "
                "differ)"
            )
        for name, width in columns.items():
            found = len(self.inputs[name].energy) if name in self.inputs else 0
            if found != width:
                raise CheckpointError(f"{self.path}: h.{name} must be F32 [{width}] (got {found})")
        kv_heads = target.dims.attention.kv_heads
        for layer in (i for i, kind in enumerate(target.dims.layers) if kind == "attention"):
            found = len(self.cache[layer].v_amax) if layer in self.cache else 0
            if found != kv_heads:
                raise CheckpointError(
                    f"{self.path}: kv.{layer}.v must be F32 [{kv_heads}] (got {found})"
                )


def fingerprint(target: TargetCheckpoint) -> str:
    """Hash the norms of a model, which quantisation leaves as they are: equal for a model and its
    quantised copies, different for another training run.
    """
    return norms_fingerprint(target.dims.layers, target.tensor)


def norms_fingerprint(layers: tuple[str, ...], tensor: Callable[[str], Array]) -> str:
    """See `fingerprint`; `tensor` returns a norm's weight, as stored, by its name."""
    digest = hashlib.sha256(repr(layers).encode())
    for i in range(len(layers)):
        for name in ("input_layernorm", "post_attention_layernorm"):
            digest.update(tensor(f"layers.{i}.{name}.weight").astype(np.float32).tobytes())
    digest.update(tensor("norm.weight").astype(np.float32).tobytes())
    return digest.hexdigest()


def statistics_file(
    inputs: Mapping[str, InputStatistics],
    cache: Mapping[int, CacheStatistics],
    metadata: Mapping[str, str],
) -> bytes:
    """Return the bytes of a file of statistics."""
    arrays: dict[str, Array] = {}
    for name, one in inputs.items():
        arrays[f"h.{name}"] = one.energy
        arrays[f"amax.{name}"] = np.array(one.amax, np.float32)
    for layer, kept in cache.items():
        arrays[f"kv.{layer}.k"], arrays[f"kv.{layer}.v"] = kept.k_amax, kept.v_amax
        arrays[f"kv.{layer}.v_rms"] = np.array(kept.v_rms, np.float32)
    tensors = [OutputTensor(name, "F32", x.shape) for name, x in arrays.items()]
    file = shard_file("", tensors, {"format": FORMAT, **metadata})
    return file.header + b"".join(arrays[name].tobytes() for name in file.begins)


def read_statistics(path: Path) -> Statistics:
    """Read and check a file of statistics.

    Raises: CheckpointError naming the file and the tensor.
    """
    metadata = read_metadata(path)
    if metadata.get("format") != FORMAT:
        got = show(metadata.get("format", ""))
        raise CheckpointError(f"{path} must be of format {FORMAT}, by calibrate (got {got})")
    tokens = metadata.get("tokens", "")
    if not (tokens.isascii() and tokens.isdecimal()) or int(tokens) == 0:
        raise CheckpointError(f"{path}: tokens must be a positive integer (got {show(tokens)})")
    data = path.read_bytes()
    arrays = dict(_arrays(path, data))
    inputs = {
        name.removeprefix("h."): InputStatistics(
            energy, _number(path, arrays, f"amax.{name.removeprefix('h.')}")
        )
        for name, energy in arrays.items()
        if name.startswith("h.")
    }
    layers = sorted({part[1] for name in arrays if (part := name.split("."))[0] == "kv"})
    cache: dict[int, CacheStatistics] = {}
    for layer in layers:
        if not (layer.isascii() and layer.isdecimal()):
            raise CheckpointError(f"{path}: kv.{layer} must name a layer (got {show(layer)})")
        keys, values = (_array(path, arrays, f"kv.{layer}.{part}") for part in "kv")
        cache[int(layer)] = CacheStatistics(
            keys, values, _number(path, arrays, f"kv.{layer}.v_rms")
        )
    return Statistics(inputs, cache, metadata, path, hashlib.sha256(data).hexdigest())


def _arrays(path: Path, data: bytes) -> Iterator[tuple[str, Floats]]:
    for name, entry in read_header(path).items():
        if entry.dtype != np.float32 or len(entry.shape) > 1:
            raise CheckpointError(f"{path}: {name} must be F32 [] or [K] (got {entry})")
        values = np.frombuffer(data[entry.begin : entry.end], np.float32).reshape(entry.shape)
        bad = values[~(np.isfinite(values) & (values >= 0))]
        if bad.size:
            raise CheckpointError(
                f"{path}: {name} must hold finite numbers of at least 0 (got {bad.flat[0]})"
            )
        yield name, values


def _array(path: Path, arrays: Mapping[str, Floats], name: str) -> Floats:
    if name not in arrays or arrays[name].ndim != 1:
        raise CheckpointError(f"{path}: {name} must be F32 [K] (got {show(name in arrays)})")
    return arrays[name]


def _number(path: Path, arrays: Mapping[str, Floats], name: str) -> float:
    if name not in arrays or arrays[name].ndim:
        raise CheckpointError(f"{path}: {name} must be F32 [] (got {show(name in arrays)})")
    return float(arrays[name])
