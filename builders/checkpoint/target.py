"""Reads a target checkpoint: sizes from the config, weights by name, no tensor unaccounted for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from thor_dflash.builders.checkpoint.expected_tensors import ExpectedTensors, check, gated_mlp
from thor_dflash.builders.checkpoint.json_fields import Fields, check_directory
from thor_dflash.builders.checkpoint.kv_scales import for_fp8, scale_names, unused_scales
from thor_dflash.builders.checkpoint.linear_weights import Linear, load, positive
from thor_dflash.builders.checkpoint.quantized_matrix import Matrix
from thor_dflash.builders.checkpoint.shards import Shards
from thor_dflash.builders.checkpoint.target_config import target_dims
from thor_dflash.builders.checkpoint.weight_only import weight_only
from thor_dflash.core.errors import CheckpointError
from thor_dflash.core.model_dims import TargetDims
from thor_dflash.core.tensors import Array

PREFIXES = ("model.language_model.", "language_model.model.", "model.")
EMBEDDING = "embed_tokens.weight"
HEAD = "lm_head"

SKIPPED = ("model.visual.", "visual.", "vision_tower.", "mtp.")
"""Prefixes of tensors that text decoding does not use: the vision tower and the MTP head."""


@dataclass(frozen=True, slots=True)
class TargetCheckpoint:
    """A Qwen3.5/3.6 text model. Names are relative to `prefix`; the files stay mapped."""

    directory: Path
    dims: TargetDims
    prefix: str
    """The beginning of the text model's stored names."""
    skipped: tuple[str, ...]
    """Stored names that are ignored: vision, MTP, scales that no engine uses, and those of a cache
    that is not FP8."""
    shards: Shards
    linears: Mapping[str, Linear]

    def matrix(self, name: str) -> Matrix:
        """Return a linear's weight: "layers.3.self_attn.q_proj", or "lm_head" (the embedding if
        tied).
        """
        return load(self.shards, self.linears[name])

    def tensor(self, name: str) -> Array:
        """Return a tensor as stored, read-only: "layers.0.linear_attn.A_log", for example."""
        return self.shards.array(self.prefix + name)

    def kv_scales(self, layer: int) -> tuple[float, float] | None:
        """Return the FP8 scales of a layer's keys and values, stored = x / scale, or None."""
        kv_heads = self.dims.attention.kv_heads
        names = scale_names(self.shards, f"{self.prefix}layers.{layer}.", kv_heads)
        if not names or names[0] in self.skipped:
            return None
        k, v = (positive(self.shards.array(name), self.shards.placed(name)) for name in names)
        return float(k.reshape(())), float(v.reshape(()))


def read_target(directory: Path) -> TargetCheckpoint:
    """Read the config and every header, and check that they describe the same model.

    No weight is read except a head stored beside tied embeddings, which must equal them. The
    scales of a matrix are checked when the matrix is loaded.
    Raises: CheckpointError.
    """
    check_directory(directory)
    config = Fields.read(directory / "config.json")
    dims = target_dims(config)
    shards = Shards.open(directory)
    prefix = _prefix(shards)
    head = _head_stem(shards)
    scales, unused = _attention_scales(shards, dims, prefix)
    skipped = (*unused, *(name for name in shards if name.startswith(SKIPPED)))
    if scales and not for_fp8(directory, config):
        skipped = (*scales, *skipped)
    besides = {*skipped, *scales}
    if dims.tied and f"{head}.weight" in shards:
        _check_tied(shards, f"{head}.weight", prefix + EMBEDDING)
        besides.add(f"{head}.weight")

    def stored_name(name: str) -> str:
        return head if name == HEAD else prefix + name

    linears = check(shards, target_layout(dims), stored_name, besides=besides)
    if dims.tied:
        linears[HEAD] = Linear(HEAD, prefix + EMBEDDING, "", "", False, ())
    linears |= _weight_only(directory, config, linears, stored_name)
    return TargetCheckpoint(directory, dims, prefix, skipped, shards, linears)


def _weight_only(
    directory: Path,
    config: Fields,
    linears: Mapping[str, Linear],
    stored_name: Callable[[str], str],
) -> dict[str, Linear]:
    """Return the linears whose scales for the rows must not be used, marked so."""
    given = (name for name, one in linears.items() if one.block_scale and one.passed_over)
    scaled = {name: stored_name(name) for name in given}
    found = weight_only(directory, config, scaled) if scaled else ()
    return {name: replace(linears[name], weight_only=True) for name in found}


def target_layout(dims: TargetDims) -> ExpectedTensors:
    """Return the tensors of a target: 851 for the 27B."""
    matrices: dict[str, tuple[int, int]] = {}
    tensors: dict[str, tuple[int, ...]] = {
        EMBEDDING: (dims.vocab, dims.hidden),
        "norm.weight": (dims.hidden,),
    }
    for i, kind in enumerate(dims.layers):
        layer = f"layers.{i}"
        tensors[f"{layer}.input_layernorm.weight"] = (dims.hidden,)
        tensors[f"{layer}.post_attention_layernorm.weight"] = (dims.hidden,)
        matrices |= gated_mlp(f"{layer}.mlp", dims.hidden, dims.intermediate)
        part = attention_layout(dims, layer) if kind == "attention" else _gdn(dims, layer)
        matrices |= part.matrices
        tensors |= part.tensors
    if not dims.tied:
        matrices[HEAD] = (dims.vocab, dims.hidden)
    return ExpectedTensors(matrices, tensors)


def attention_layout(dims: TargetDims, layer: str) -> ExpectedTensors:
    """Return the tensors of one gated attention."""
    a, stem = dims.attention, f"{layer}.self_attn"
    query, kv = a.heads * a.head_dim, a.kv_heads * a.head_dim
    return ExpectedTensors(
        {
            # For each head, first its query rows, then its gate rows.
            f"{stem}.q_proj": (2 * query, dims.hidden),
            f"{stem}.k_proj": (kv, dims.hidden),
            f"{stem}.v_proj": (kv, dims.hidden),
            f"{stem}.o_proj": (dims.hidden, query),
        },
        {f"{stem}.q_norm.weight": (a.head_dim,), f"{stem}.k_norm.weight": (a.head_dim,)},
    )


def _gdn(dims: TargetDims, layer: str) -> ExpectedTensors:
    g, stem = dims.gdn, f"{layer}.linear_attn"
    value = g.value_heads * g.value_dim
    return ExpectedTensors(
        {
            f"{stem}.in_proj_qkv": (g.conv_channels, dims.hidden),
            f"{stem}.in_proj_z": (value, dims.hidden),
            f"{stem}.in_proj_b": (g.value_heads, dims.hidden),
            f"{stem}.in_proj_a": (g.value_heads, dims.hidden),
            f"{stem}.out_proj": (dims.hidden, value),
        },
        {
            f"{stem}.conv1d.weight": (g.conv_channels, 1, g.conv_kernel),
            f"{stem}.A_log": (g.value_heads,),
            f"{stem}.dt_bias": (g.value_heads,),
            f"{stem}.norm.weight": (g.value_dim,),
        },
    )


def _prefix(shards: Shards) -> str:
    found = [prefix for prefix in PREFIXES if prefix + EMBEDDING in shards]
    if len(found) != 1:
        rule = " or ".join(prefix + EMBEDDING for prefix in PREFIXES)
        raise CheckpointError(
            f"{shards.directory} must hold {rule} (got {' and '.join(found) or 'none of them'})"
        )
    return found[0]


def _head_stem(shards: Shards) -> str:
    """Return the head's stored name: it is outside the prefix, beside `model`."""
    nested = f"language_model.{HEAD}"
    return nested if any(name.startswith(f"{nested}.") for name in shards) else HEAD


def _check_tied(shards: Shards, head: str, embedding: str) -> None:
    """A stored head beside tied embeddings must be the same matrix, byte for byte."""
    left, right = shards.array(head), shards.array(embedding)
    same = left.dtype == right.dtype and left.shape == right.shape
    if not (same and all(_same_bytes(a, b) for a, b in zip(left, right, strict=True))):
        raise CheckpointError(
            f"{shards.directory}: {head} must equal {embedding} where tie_word_embeddings is true"
            f" (got {shards.entry(head)} that differs)"
        )


def _attention_scales(shards: Shards, dims: TargetDims, prefix: str) -> tuple[list[str], list[str]]:
    """Return the names of the stored scales of attention: those of the cache, and unused ones."""
    cache, unused, kv_heads = list[str](), list[str](), dims.attention.kv_heads
    for i, kind in enumerate(dims.layers):
        if kind == "attention":
            cache += scale_names(shards, f"{prefix}layers.{i}.", kv_heads)
            unused += unused_scales(shards, f"{prefix}layers.{i}.", kv_heads)
    return cache, unused


def _same_bytes(left: Array, right: Array) -> bool:
    return np.array_equal(left.view(np.uint8), right.view(np.uint8))
