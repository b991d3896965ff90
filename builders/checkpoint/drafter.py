"""Reads a DFlash or DFlash2 drafter's checkpoint, and checks whether it fits a target."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from thor_dflash.builders.checkpoint.drafter_config import drafter_dims
from thor_dflash.builders.checkpoint.expected_tensors import ExpectedTensors, check, gated_mlp
from thor_dflash.builders.checkpoint.int4_weights import (
    Int4Linear,
    is_int4,
    load_int4,
    locate_int4,
)
from thor_dflash.builders.checkpoint.json_fields import Fields, check_directory
from thor_dflash.builders.checkpoint.linear_weights import Linear, load
from thor_dflash.builders.checkpoint.quantized_matrix import Matrix
from thor_dflash.builders.checkpoint.shards import Shards
from thor_dflash.core.errors import CheckpointError
from thor_dflash.core.model_dims import DrafterDims, TargetDims
from thor_dflash.core.tensors import Array

MASK_FILE = "mask_embedding.pt"


@dataclass(frozen=True, slots=True)
class DrafterCheckpoint:
    """A DFlash drafter. It has no embedding and no head: it uses the target's."""

    directory: Path
    dims: DrafterDims
    shards: Shards
    linears: Mapping[str, Linear]
    int4: Mapping[str, Int4Linear] = field(default_factory=dict[str, Int4Linear])
    """Further linears, which are converted when they are loaded."""

    def matrix(self, name: str) -> Matrix:
        """Return a linear's weight: "fc", "layers.0.self_attn.q_proj"."""
        if name in self.int4:
            return load_int4(self.shards, self.int4[name])
        return load(self.shards, self.linears[name])

    def tensor(self, name: str) -> Array:
        """Return a tensor as stored, read-only: "hidden_norm.weight"."""
        return self.shards.array(name)


def read_drafter(directory: Path) -> DrafterCheckpoint:
    """Read the config and every header, and check that they describe the same model.

    No weight is read; the scales of a matrix are checked when the matrix is loaded.
    Raises: CheckpointError.
    """
    check_directory(directory)
    dims = drafter_dims(Fields.read(directory / "config.json"))
    if (directory / MASK_FILE).exists():
        raise CheckpointError(
            f"{directory / MASK_FILE} must be absent, a mask embedding of its own is not supported"
            " (got the file)"
        )
    shards = Shards.open(directory)
    layout = drafter_layout(dims)
    int4 = {
        name: locate_int4(shards, name, name, shape)
        for name, shape in layout.matrices.items()
        if is_int4(shards, name)
    }
    others = {name: shape for name, shape in layout.matrices.items() if name not in int4}
    parts = {part for linear in int4.values() for part in linear.parts}
    linears = check(shards, ExpectedTensors(others, layout.tensors), str, besides=parts)
    return DrafterCheckpoint(directory, dims, shards, linears, int4)


def drafter_layout(dims: DrafterDims) -> ExpectedTensors:
    """Return the tensors of a drafter: 58 for the 27B's, 81 with DFlash2."""
    a, hidden = dims.attention, dims.hidden
    query, kv = a.heads * a.head_dim, a.kv_heads * a.head_dim
    matrices = {"fc": (hidden, len(dims.taps) * hidden)}
    tensors: dict[str, tuple[int, ...]] = {
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for i in range(len(dims.layers)):
        layer = f"layers.{i}"
        matrices |= gated_mlp(f"{layer}.mlp", hidden, dims.intermediate)
        matrices |= {
            f"{layer}.self_attn.q_proj": (query, hidden),
            f"{layer}.self_attn.k_proj": (kv, hidden),
            f"{layer}.self_attn.v_proj": (kv, hidden),
            f"{layer}.self_attn.o_proj": (hidden, query),
        }
        tensors |= {
            f"{layer}.self_attn.q_norm.weight": (a.head_dim,),
            f"{layer}.self_attn.k_norm.weight": (a.head_dim,),
            f"{layer}.input_layernorm.weight": (hidden,),
            f"{layer}.post_attention_layernorm.weight": (hidden,),
        }
        if (conv := dims.conv) is not None:
            kernels = 2 * conv.taps * (hidden // conv.group)
            for stem in (f"{layer}.attention_conv", f"{layer}.mlp_conv"):
                matrices[f"{stem}.kernel_projection"] = (kernels, hidden)
                tensors[f"{stem}.base_kernel"] = (2, conv.taps, hidden)
    if dims.selector is not None:
        rank, stem = dims.selector.rank, "candidate_selector"
        matrices[f"{stem}.hidden_projection"] = (rank, hidden)
        for name in ("predecessor", "successor"):
            tensors[f"{stem}.{name}_codebook"] = (dims.vocab, rank)
    return ExpectedTensors(matrices, tensors)


def check_pair(target: TargetDims, drafter: DrafterDims) -> None:
    """Raise CheckpointError unless the drafter was made for a target of these sizes."""
    depth = len(target.layers)
    if drafter.hidden != target.hidden:
        raise _unfit("hidden_size", f"{target.hidden}, the target's", drafter.hidden)
    if drafter.vocab != target.vocab:
        raise _unfit("vocab_size", f"{target.vocab}, the target's", drafter.vocab)
    if drafter.target_layers not in (0, depth):
        raise _unfit("num_target_layers", f"{depth}, the target's depth", drafter.target_layers)
    if max(drafter.taps, default=0) >= depth:
        rule = f"layers of the target, 0 to {depth - 1}"
        raise _unfit("target_layer_ids", rule, list(drafter.taps))
    if drafter.mask_token >= target.vocab:
        rule = f"a row of the target's embedding, 0 to {target.vocab - 1}"
        raise _unfit("mask_token_id", rule, drafter.mask_token)


def _unfit(what: str, rule: str, value: object) -> CheckpointError:
    return CheckpointError(f"the drafter's {what} must be {rule} (got {value})")
