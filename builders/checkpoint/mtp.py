"""Reads the MTP layer that Qwen3.5, 3.6 and 3.8 checkpoints hold beside the text model, as a
drafter.

transformers does not run these tensors. What they mean is vLLM's reading (qwen3_5_mtp.py): see
builders/graphs/mtp.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from thor_dflash.builders.checkpoint.expected_tensors import ExpectedTensors, check, gated_mlp
from thor_dflash.builders.checkpoint.json_fields import Fields, check_directory
from thor_dflash.builders.checkpoint.linear_weights import Linear, load
from thor_dflash.builders.checkpoint.quantized_matrix import Matrix
from thor_dflash.builders.checkpoint.shards import Shards
from thor_dflash.builders.checkpoint.target import attention_layout
from thor_dflash.builders.checkpoint.target_config import target_dims, text_section
from thor_dflash.core.errors import CheckpointError
from thor_dflash.core.model_dims import DrafterDims, DraftLayerDims, TargetDims
from thor_dflash.core.tensors import Array

PREFIX = "mtp."
LAYER = "layers.0"
HALVES = ("fc_embedding", "fc_hidden")
"""The columns of `fc` that read the embedding, then those that read the hidden row."""


@dataclass(frozen=True, slots=True)
class MtpCheckpoint:
    """The MTP layer of a target's checkpoint. Names are relative to `mtp.`."""

    directory: Path
    dims: DrafterDims
    shards: Shards
    linears: Mapping[str, Linear]

    def matrix(self, name: str) -> Matrix:
        """Return a linear's weight: "layers.0.self_attn.q_proj", or one of HALVES."""
        if name in HALVES:
            return _half(load(self.shards, self.linears["fc"]), name, HALVES.index(name))
        return load(self.shards, self.linears[name])

    def tensor(self, name: str) -> Array:
        """Return the weight of a norm, float32. Stored are its differences from 1."""
        return np.float32(1) + self.shards.array(PREFIX + name).astype(np.float32)


def _half(whole: Matrix, name: str, at: int) -> Matrix:
    """Return the first or second half of a matrix's columns."""

    def cut(parts: Array) -> Array:
        width = parts.shape[1] // 2
        return np.ascontiguousarray(parts[:, at * width : (at + 1) * width])

    scales = None if whole.block_scale is None else cut(whole.block_scale)
    return replace(whole, name=name, codes=cut(whole.codes), block_scale=scales)


def read_mtp(directory: Path, drafts: int) -> MtpCheckpoint:
    """Read the config and every header, and check that the MTP layer is whole. It will be run
    `drafts` times for a block.

    Raises: CheckpointError.
    """
    check_directory(directory)
    config = Fields.read(directory / "config.json")
    text = text_section(config)
    text.expect("mtp_num_hidden_layers", 0, 1)
    text.expect("mtp_use_dedicated_embeddings", False)
    dims = target_dims(config)
    shards = Shards.open(directory)
    others = [name for name in shards if not name.startswith(PREFIX)]
    none = text.get("mtp_num_hidden_layers") == 0
    if none or len(others) == len(list(shards)):
        raise CheckpointError(
            f"{directory} must hold an MTP layer for --drafter mtp (got "
            f"{'mtp_num_hidden_layers 0' if none else f'no tensor {PREFIX}*'}); name the directory "
            "of a DFlash drafter, or leave --drafter out to decode plainly"
        )
    linears = check(shards, mtp_layout(dims), lambda name: PREFIX + name, besides=others)
    return MtpCheckpoint(directory, mtp_dims(dims, drafts), shards, linears)


def mtp_dims(target: TargetDims, drafts: int) -> DrafterDims:
    """Return the sizes of a target's MTP layer, run `drafts` times for a block."""
    return DrafterDims(
        kind="mtp",
        vocab=target.vocab,
        hidden=target.hidden,
        intermediate=target.intermediate,
        layers=(DraftLayerDims(causal=True, window=0),),
        attention=target.attention,
        eps=target.eps,
        block=drafts + 1,
        taps=(),
        mask_token=0,
        target_layers=len(target.layers),
        max_position=target.max_position,
    )


def mtp_layout(target: TargetDims) -> ExpectedTensors:
    """Return the 15 tensors of the MTP layer."""
    hidden = target.hidden
    attention = attention_layout(target, LAYER)
    norms = ["pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"]
    norms += [f"{LAYER}.input_layernorm", f"{LAYER}.post_attention_layernorm"]
    return ExpectedTensors(
        {
            "fc": (hidden, 2 * hidden),
            **gated_mlp(f"{LAYER}.mlp", hidden, target.intermediate),
            **attention.matrices,
        },
        {**{f"{name}.weight": (hidden,) for name in norms}, **attention.tensors},
    )
