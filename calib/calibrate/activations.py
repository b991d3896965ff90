"""Sums over activations: what linears receive, and what the cache of a layer holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from thor_dflash.builders.checkpoint.target import HEAD as HEAD_NAME
from thor_dflash.calib.quantize.statistics import CacheStatistics, InputStatistics
from thor_dflash.core.errors import CheckpointError
from thor_dflash.core.tensors import Array
from thor_dflash.plugins import HEAD, LINEAR, VERIFY_ATTENTION
from thor_dflash.plugins.contract import Arrays, Attributes, Op
from thor_dflash.plugins.numpy_math import wide
from thor_dflash.plugins.verify_attention.reference import normed_and_turned

Wide = NDArray[np.float64]

OBSERVED: Mapping[str, tuple[Op, tuple[str, ...]]] = {
    LINEAR.type: (LINEAR, ("x", "gate", "norm_weight")),
    HEAD.type: (HEAD, ("x", "norm_weight")),
    VERIFY_ATTENTION.type: (VERIFY_ATTENTION, ("k", "v", "k_norm")),
}
"""Type of an operator -> the operator, and the ports from which its activations follow."""


@dataclass(slots=True)
class _Sums:
    square: Wide
    """[K], of the squares."""
    amax: Wide
    """[K]."""
    rows: int = 0

    def add(self, rows: Array) -> None:
        # Without temporaries of the size of the rows; see `linear_input`.
        self.square += np.einsum("tk,tk->k", rows, rows, dtype=np.float64)
        for bound in (rows.max(axis=0), -rows.min(axis=0)):
            np.maximum(self.amax, bound, out=self.amax)
        self.rows += len(rows)


@dataclass(slots=True)
class ActivationSums:
    """Sums in float64, added to chunk by chunk. Those of a cache are of one layer."""

    _inputs: dict[str, _Sums] = field(default_factory=dict[str, _Sums])
    _cache: dict[str, _Sums] = field(default_factory=dict[str, _Sums])

    def step(self, op: Op, name: str, x: Arrays, a: Attributes, at: Array) -> None:
        """Add what a step of an observed operator receives.

        x: its ports of OBSERVED.
        at: position of each row, [T].
        Raises: CheckpointError if a row is not finite.
        """
        if op is VERIFY_ATTENTION:
            keys = normed_and_turned(x["k"], x["k_norm"], at, a, a.integer("kv_heads"))
            self.cached("k", keys)
            self.cached("v", wide(x["v"]).reshape(keys.shape))
        elif op is HEAD:
            self.received(HEAD_NAME, linear_input(x, a))
        else:
            self.received(name, linear_input(x, a))

    def received(self, name: str, rows: Array) -> None:
        """Add the rows [T, K] that the linears of one input receive.

        Raises: CheckpointError if one is infinite or NaN.
        """
        _add(self._inputs, name, rows)

    def cached(self, part: str, rows: Array) -> None:
        """Add keys or values [T, Hkv, D]; `part` is "k" or "v".

        Raises: CheckpointError if one is infinite or NaN.
        """
        _add(self._cache, part, rows.reshape(-1, rows.shape[1] * rows.shape[2]))

    def inputs(self) -> Mapping[str, InputStatistics]:
        """Return the statistics of each input."""
        return {
            name: InputStatistics(
                (sums.square / sums.rows).astype(np.float32), float(sums.amax.max())
            )
            for name, sums in self._inputs.items()
        }

    def cache(self, kv_heads: int) -> CacheStatistics | None:
        """Return the statistics of the cache, or None of a layer without one."""
        if not self._cache:
            return None
        k, v = (
            self._cache[part].amax.reshape(kv_heads, -1).max(axis=1).astype(np.float32)
            for part in "kv"
        )
        values = self._cache["v"]
        return CacheStatistics(k, v, float(np.sqrt(values.square.mean() / values.rows)))


def linear_input(x: Arrays, a: Attributes) -> NDArray[np.float32]:
    """Return what `prologue` and `rms_norm` define for a step of linear or head, in float32.

    In place: threads that free large temporaries give their pages back each time, and wait for
    one another when they take them again.
    """
    rows = np.array(x["x"], np.float32)
    if "norm_weight" in x:
        weight = np.asarray(x["norm_weight"], np.float32)
        by_head = rows.reshape(len(rows), -1, len(weight))
        square = np.einsum("thd,thd->th", by_head, by_head, dtype=np.float64)
        root = np.sqrt(square / len(weight) + a.real("norm_eps"))
        by_head *= (1 / root).astype(np.float32)[..., np.newaxis]
        by_head *= np.float32(a.real("norm_offset")) + weight
    if "gate" in x:
        gate = np.array(x["gate"], np.float32)
        if a.word("gate") == "silu":
            rows *= gate
        with np.errstate(over="ignore"):  # of gates below -88, where 1 / infinity is right
            np.exp(np.negative(gate, out=gate), out=gate)
        gate += 1
        rows /= gate
    return rows


def finite(rows: Array, name: str) -> Array:
    """Return the rows, after checking them. Raises CheckpointError if one is infinite or NaN."""
    if not np.isfinite(rows).all():
        raise CheckpointError(f"activations at {name} must be finite numbers (got NaN or infinity)")
    return rows


def _add(sums: dict[str, _Sums], name: str, rows: Array) -> None:
    if name not in sums:
        width = int(rows.shape[1])
        sums[name] = _Sums(np.zeros(width), np.zeros(width))
    sums[name].add(rows)
    finite(sums[name].square, name)  # no sum of squares is finite that has another number in it
