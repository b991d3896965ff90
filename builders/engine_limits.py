"""Refuses what an engine cannot run, by the keys of the checkpoint's config and of our own."""

from __future__ import annotations

from math import gcd

from thor_dflash.builders.checkpoint.protocols import TargetSource
from thor_dflash.core.errors import CheckpointError, ConfigError
from thor_dflash.core.model_dims import TargetDims
from thor_dflash.plugins.linear.launch import PAIR

LANES = 4
"""float32 elements that ONNX Runtime's kernels compute at a time."""


def check_target(target: TargetSource, engine: str, block: int) -> None:
    """Refuse a target, or a block for it, that the engine cannot run, or not with equal bits.

    Raises:
        CheckpointError: the target's sizes do not suit the engine.
        ConfigError: the block does not suit the target.
    """
    unit, sizes = (LANES, _normed(target.dims)) if engine == "ort" else (PAIR, _paired(target.dims))
    for key, size in sizes.items():
        if size % unit:
            raise CheckpointError(
                f"{target.directory}: {key} must be a multiple of {unit} for engine {engine} "
                f"(got {size})"
            )
    if engine == "ort":
        _check_block(target.dims, block)


def check_ids(count: int, engine: str) -> None:
    """Refuse a draft vocabulary with an odd number of ids where our kernels compute its logits.

    Raises:
        ConfigError: names the key.
    """
    if engine != "ort" and count % PAIR:
        raise ConfigError(
            f"build.draft_ids must hold an even number of ids for engine {engine} (got {count})"
        )


def _normed(dims: TargetDims) -> dict[str, int]:
    """Widths of rows whose elements, or those of each head, are summed.

    ONNX Runtime sums in an order that depends on where in memory a row begins, modulo 4 elements.
    If a row with all its heads is a multiple of 4 wide, all rows begin alike. Query heads are a
    multiple of the key/value heads, so their rows are too.
    """
    a, g = dims.attention, dims.gdn
    return {
        "hidden_size": dims.hidden,
        "num_key_value_heads * head_dim": a.kv_heads * a.head_dim,
        "linear_num_key_heads * linear_key_head_dim": g.key_heads * g.key_dim,
        "linear_num_value_heads * linear_value_head_dim": g.value_heads * g.value_dim,
    }


def _paired(dims: TargetDims) -> dict[str, int]:
    """Numbers of rows of weights that nothing else makes even."""
    return {"vocab_size": dims.vocab, "linear_num_value_heads": dims.gdn.value_heads}


def _check_block(dims: TargetDims, block: int) -> None:
    """Refuse a block in which a row's result would depend on its place. ONNX Runtime computes
    Softplus (of a row's gdn heads), Cos and Sin (of its angles) four elements at a time, and what
    remains at the end of a block with other bits.
    """
    each = dims.gdn.value_heads, dims.attention.rotary_dim // 2
    if block % (step := max(LANES // gcd(LANES, n) for n in each)):
        raise ConfigError(
            f"build.block must be a multiple of {step} for engine ort and a target with "
            f"{each[0]} value heads and {each[1]} angles a row (got {block})"
        )
