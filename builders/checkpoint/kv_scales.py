"""Finds the calibrated scales of attention: those of the KV cache that an engine uses, the type of
cache that they were made for, and those that no engine uses.

The tensors do not say for which type. modelopt's scales for an NVFP4 cache have the same names as
those for FP8, but some of its versions divide by 6 * 448 in place of 448: in an FP8 cache, keys and
values above a sixth of the largest would saturate.
Source: NVIDIA/TensorRT-Model-Optimizer modelopt/torch/export/unified_export_hf.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from pathlib import Path

from thor_dflash.builders.checkpoint.json_fields import Fields
from thor_dflash.builders.checkpoint.shards import Shards
from thor_dflash.core.errors import CheckpointError
from thor_dflash.core.strict_records import as_table
from thor_dflash.package.tokenizer_files import present

NAMES = (
    ("self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale"),
    ("self_attn.k_scale", "self_attn.v_scale"),
)
"""Names of the scales of keys and values: modelopt's, compressed-tensors'."""


UNUSED = (
    "self_attn.q_scale",
    "self_attn.q_proj.q_scale",
    "self_attn.prob_scale",
    "self_attn.prob_output_scale",
    *(f"self_attn.{linear}_proj.output_scale" for linear in "qkvo"),
)
"""Scales of quantised attention arithmetic, which no engine here does. Sources: compressed-tensors
(q_scale), Quark (prob_output_scale), exports of older versions (output_scale)."""


def unused_scales(shards: Shards, layer: str, kv_heads: int) -> Iterator[str]:
    """Yield the stored scales of a layer that no engine uses: those of other parts than the cache,
    and those of the cache that are given per head.
    """
    yield from (layer + name for name in UNUSED if layer + name in shards)
    for names in _stored_pairs(shards, layer, kv_heads):
        if _per_head(shards, names):
            yield from names


def scale_names(shards: Shards, layer: str, kv_heads: int) -> tuple[str, ...]:
    """Return the names of the first pair with one number each; none if there is no such pair.

    Raises: CheckpointError for half a pair, and for a scale that is neither one number nor one for
        each key/value head.
    """
    pairs = _stored_pairs(shards, layer, kv_heads)
    return next((names for names in pairs if not _per_head(shards, names)), ())


def _per_head(shards: Shards, names: tuple[str, ...]) -> bool:
    return any(prod(shards.entry(name).shape) > 1 for name in names)


def _stored_pairs(shards: Shards, layer: str, kv_heads: int) -> Iterator[tuple[str, ...]]:
    for pair in NAMES:
        names = tuple(layer + name for name in pair)
        there = [name for name in names if name in shards]
        if len(there) == 1:
            raise CheckpointError(
                f"{shards.directory}: {' and '.join(names)} must come together "
                f"(got {there[0]} alone)"
            )
        for name in there:
            if prod(shards.entry(name).shape) not in (1, kv_heads):
                raise CheckpointError(
                    f"{name} must be one number, or one for each of {kv_heads} key/value heads "
                    f"(got {shards.entry(name)})"
                )
        if there:
            yield names


def for_fp8(directory: Path, config: Fields) -> bool:
    """Return whether the scales are for an FP8 cache, unless a JSON file declares otherwise."""
    return all(_declared(directory, config))


def _declared(directory: Path, config: Fields) -> Iterator[bool]:
    """Yield whether it is FP8, for each place that names the type of the cache."""
    quantised = as_table(config.values.get("quantization_config")) or {}
    scheme = as_table(quantised.get("kv_cache_scheme"))
    if scheme is not None:
        yield (scheme.get("num_bits"), scheme.get("type")) == (8, "float")
    path = directory / "hf_quant_config.json"
    if present(path):
        own = as_table(Fields.read(path).values.get("quantization")) or {}
        yield own.get("kv_cache_quant_algo") in (None, "FP8")
