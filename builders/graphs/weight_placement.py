"""Checkpoint tensors as graph values: assigns each a weight file and a name in the package."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from thor_dflash.builders.checkpoint.protocols import Weights
from thor_dflash.builders.checkpoint.quantized_matrix import WeightFormat, finite
from thor_dflash.builders.graphs.graph_builder import GraphBuilder, GraphValue
from thor_dflash.builders.output.weight_files import StoredTensor, WeightFiles
from thor_dflash.core.tensors import Array, DType
from thor_dflash.package.manifest import WEIGHTS

EMBEDDING = "embed_tokens.weight"


@dataclass(frozen=True, slots=True)
class PlacedLinear:
    """One stored weight of a linear: codes and scales."""

    weight: StoredTensor
    block_scale: StoredTensor | None
    row_scale: StoredTensor | None

    def values(self, g: GraphBuilder, i: int) -> dict[str, GraphValue]:
        """Return the weight's parts as ports of segment i of a `linear` or a head."""
        parts = {
            "weight": self.weight,
            "block_scale": self.block_scale,
            "row_scale": self.row_scale,
        }
        return {f"{port}{i}": g.weight(part) for port, part in parts.items() if part is not None}


@dataclass(slots=True)
class WeightPlacement:
    """Places a checkpoint's tensors in weight files, each once, however many graphs use it."""

    checkpoint: Weights
    files: WeightFiles
    prefix: str = ""
    """Prefix of every name in the package, so that names of target and drafter do not collide."""
    input_scales: dict[str, float] = field(default_factory=dict[str, float])
    """Stored weight -> Matrix.input_scale, if it has one."""
    _packed: dict[str, PlacedLinear] = field(default_factory=dict[str, PlacedLinear])
    _plain: dict[str, StoredTensor] = field(default_factory=dict[str, StoredTensor])
    _classes: Counter[tuple[str, WeightFormat]] = field(
        default_factory=Counter[tuple[str, WeightFormat]]
    )
    _bytes: Counter[tuple[str, WeightFormat]] = field(
        default_factory=Counter[tuple[str, WeightFormat]]
    )

    def packed(self, name: str, rows: Array | None = None, part: str = "") -> PlacedLinear:
        """Return a linear's weight, or the given rows of it as `<name>.<part>`."""
        key = f"{name}.{part}" if part else name
        if key not in self._packed:
            self._packed[key] = self._pack(name, key, rows)
        return self._packed[key]

    def _pack(self, name: str, key: str, rows: Array | None) -> PlacedLinear:
        matrix = self.checkpoint.matrix(name)

        def stored(field_name: str, whole: Array | None) -> StoredTensor | None:
            if whole is None:
                return None
            shape = (len(whole) if rows is None else len(rows), *whole.shape[1:])
            own = f"{self.prefix}{key}.{field_name}"
            return self.files.add(
                self._file(name),
                own,
                DType.of(whole),
                shape,
                lambda: finite(whole if rows is None else whole[rows], own),
            )

        packed = PlacedLinear(
            _some(stored("weight", matrix.codes)),
            stored("block_scale", matrix.block_scale),
            stored("row_scale", matrix.row_scale),
        )
        if matrix.input_scale is not None:
            self.input_scales[packed.weight.name] = matrix.input_scale
        tensor_class = (self.prefix + name.split(".")[-1], matrix.kind)
        parts = (packed.weight, packed.block_scale, packed.row_scale)
        # A weight split by rows counts as one weight.
        self._classes[tensor_class] += not any(k.startswith(f"{name}.") for k in self._packed)
        self._bytes[tensor_class] += sum(p.nbytes for p in parts if p is not None)
        return packed

    def plain(self, g: GraphBuilder, name: str) -> GraphValue:
        """Return a tensor as the checkpoint stores it."""
        return g.weight(self._place(name))

    def head(self, tied: bool) -> PlacedLinear:
        """Return the vocabulary projection; if tied, that is the embedding table, stored once."""
        return PlacedLinear(self._place(EMBEDDING), None, None) if tied else self.packed("lm_head")

    def _place(self, name: str) -> StoredTensor:
        if name not in self._plain:
            array, own = self.checkpoint.tensor(name), self.prefix + name
            self._plain[name] = self.files.add(
                self._file(name), own, DType.of(array), array.shape, lambda: finite(array, own)
            )
        return self._plain[name]

    def census(self) -> dict[str, dict[str, tuple[int, int]]]:
        """Return class of linear -> kind of weight -> (number of weights, their bytes)."""
        table: dict[str, dict[str, tuple[int, int]]] = {}
        for (name, kind), count in sorted(self._classes.items(), key=lambda item: item[0][0]):
            table.setdefault(name, {})[kind.value] = (count, self._bytes[name, kind])
        return table

    def _file(self, name: str) -> str:
        parts = name.split(".")
        stem = f"layer.{int(parts[1]):02d}" if parts[0] == "layers" else "outer"
        return f"{WEIGHTS}{self.prefix}{stem}.bin"


def _some(stored: StoredTensor | None) -> StoredTensor:
    assert stored is not None
    return stored


def gate_rows(heads: int, head_dim: int) -> tuple[Array, Array]:
    """Return the rows of Qwen3.5's q_proj that make queries, and those that make gates.

    For each head, it stores head_dim query rows and then head_dim gate rows. Quantisation groups
    run along the columns, so the rows can be split without requantising.
    """
    rows = np.arange(2 * heads * head_dim).reshape(heads, 2, head_dim)
    return rows[:, 0].reshape(-1), rows[:, 1].reshape(-1)
