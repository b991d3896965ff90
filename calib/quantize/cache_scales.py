"""Scales of an FP8 cache, from calibrated ranges.

E4M3 is a floating-point format: between 2^-6 and 448 a scale changes nothing, and above, values
saturate. So a scale is 1 unless values are outside, it is never below what the largest one needs,
and it is a power of two, by which a division is exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log2

import numpy as np

from thor_dflash.builders.checkpoint.drafter import DrafterCheckpoint
from thor_dflash.builders.checkpoint.kv_scales import NAMES
from thor_dflash.builders.checkpoint.target import TargetCheckpoint
from thor_dflash.calib.quantize.statistics import CacheStatistics, Statistics
from thor_dflash.config.quantize import QuantizeConfig
from thor_dflash.plugins.numpy_math import FP8_MAX

MARGIN = 1.25
"""How far a value may be above the largest calibrated one before it saturates."""
SMALL = 2.0**-4
"""Root mean square of values from which on most are above E4M3's smallest normal number."""
LEAST = 2.0**-10


@dataclass(frozen=True, slots=True)
class CacheScales:
    """The scales of one attention layer, stored = x / scale, and why."""

    layer: int
    k_scale: float
    v_scale: float
    k_bound: float
    """Largest magnitude that a key can have: its norm has a known length, and a rotation keeps
    it."""
    k_amax: tuple[float, ...]
    """Calibrated, by key/value head."""
    v_amax: tuple[float, ...]
    v_rms: float


def cache_scales(
    source: TargetCheckpoint | DrafterCheckpoint,
    config: QuantizeConfig,
    statistics: Statistics | None,
) -> tuple[tuple[CacheScales, ...], dict[str, float]]:
    """Return the scales by layer, and by the name of their tensor; none unless `config.kv` is
    scales.
    """
    if config.kv != "scales" or statistics is None or not isinstance(source, TargetCheckpoint):
        return (), {}
    layers = [i for i, kind in enumerate(source.dims.layers) if kind == "attention"]
    made = tuple(_layer(source, i, statistics.cache[i]) for i in layers)
    names = NAMES[config.dialect == "compressed-tensors"]
    tensors: dict[str, float] = {}
    for one in made:
        stem = f"{source.prefix}layers.{one.layer}."
        tensors |= {stem + names[0]: one.k_scale, stem + names[1]: one.v_scale}
    return made, tensors


def _layer(target: TargetCheckpoint, layer: int, found: CacheStatistics) -> CacheScales:
    weight = target.tensor(f"layers.{layer}.self_attn.k_norm.weight").astype(np.float64)
    bound = target.dims.attention.head_dim**0.5 * float(np.abs(1 + weight).max())
    k_amax = float(found.k_amax.max(initial=0))
    v_amax = float(found.v_amax.max(initial=0))
    fits = v_amax == 0 or (MARGIN * v_amax <= FP8_MAX and found.v_rms >= SMALL)
    return CacheScales(
        layer,
        1.0 if min(bound, MARGIN * k_amax) <= FP8_MAX else power_of_two(k_amax),
        1.0 if fits else power_of_two(v_amax),
        bound,
        tuple(found.k_amax.tolist()),
        tuple(found.v_amax.tolist()),
        found.v_rms,
    )


def power_of_two(amax: float) -> float:
    """Return the least power of two with which `amax` and a margin do not saturate."""
    return max(2.0 ** ceil(log2(MARGIN * amax / FP8_MAX)), LEAST)
