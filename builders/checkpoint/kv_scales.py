"""Finds the calibrated scales of the KV cache, and the type of cache that they were made for.

The tensors do not say for which type. modelopt's scales for an NVFP4 cache have the same names as
those for FP8, but some of its versions divide by 6 * 448 in place of 448: in an FP8 cache, keys and
values above a sixth of the largest would saturate.
Source: NVIDIA/TensorRT-Model-Optimizer modelopt/torch/export/unified_export_hf.py.
"""

from __future__ import annotations

from collections.abc import Iterator
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


def scale_names(shards: Shards, layer: str) -> tuple[str, ...]:
    """Return the names of the first pair that is stored for a layer; none if there is no pair.

    Raises: CheckpointError for half a pair, and for a scale that is not one number.
    """
    for pair in NAMES:
        names = tuple(layer + name for name in pair)
        there = [name for name in names if name in shards]
        if len(there) == 1:
            raise CheckpointError(
                f"{shards.directory}: {' and '.join(names)} must come together "
                f"(got {there[0]} alone)"
            )
        for name in there:
            if shards.entry(name).shape not in ((), (1,)):
                raise CheckpointError(f"{name} must be one number (got {shards.entry(name)})")
        if there:
            return names
    return ()


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
