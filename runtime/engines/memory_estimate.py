"""The memory a package needs, computed from its manifest alone, without an engine or a device."""

from __future__ import annotations

from bisect import bisect_right

from thor_dflash.core.model_dims import DrafterDims, GdnDims
from thor_dflash.package.manifest import WEIGHTS, Manifest
from thor_dflash.plugins.verify_attention import TILE
from thor_dflash.runtime.decoding.model_runner import cache_rows, ring_rows

BYTES = {"f32": 4, "bf16": 2, "fp8": 1}
STORED = {"nvfp4": 4.5 / 8, "fp8": 1, "bf16": 2, "f16": 2, "f32": 4}
"""Bytes per weight; for NVFP4 including its share of the block scale."""


def needs(manifest: Manifest, capacity: int, block: int = 0) -> dict[str, int]:
    """Kind -> bytes for a context of `capacity` tokens and verify steps of `block` rows (0: those
    of the package); engines use the same kinds.

    Excludes activations between the operators of a step and the libraries' own memory.
    """
    block = block or manifest.block
    target, rows = manifest.target, BYTES[manifest.activations]
    attention, gdn = target.layers.count("attention"), target.layers.count("gdn")
    shape = target.attention
    token = 2 * shape.kv_heads * shape.head_dim * BYTES[manifest.kv]
    cache = cache_rows(capacity, manifest.block, manifest.widest_chunk)
    found = {
        "weights": sum(e.bytes for name, e in manifest.files.items() if _weights(name)),
        "cache": attention * token * cache,
        "state": gdn * _gdn(target.gdn, manifest.saves, block, rows),
        "logits": block * target.vocab * 4,
    }
    if manifest.drafter is not None:
        found["ring"] = _rings(manifest.drafter, manifest, capacity, rows)
    if manifest.engine == "ort":
        found["unpacked weights"] = _unpacked(manifest)
    return found


def per_token(manifest: Manifest) -> int:
    """Bytes that each further token of context takes."""
    block = manifest.block
    low, high = (sum(needs(manifest, block + n).values()) for n in (1 << 14, 1 << 15))
    return (high - low) >> 14


def shorter(manifest: Manifest, capacity: int, lacks: int) -> int:
    """The longest context, in tokens and whole tiles, that takes at least `lacks` bytes less than
    one of `capacity`; 0 if there is none.
    """
    most = sum(needs(manifest, capacity).values()) - lacks
    tiles = range(manifest.block // TILE + 1, -(-capacity // TILE))
    fit = bisect_right(tiles, most, key=lambda n: sum(needs(manifest, n * TILE).values()))
    return tiles[fit - 1] * TILE if fit else 0


def _weights(name: str) -> bool:
    return name.startswith(WEIGHTS) or name.endswith(".plan")


def _unpacked(manifest: Manifest) -> int:
    """Bytes of the float32 weights that ONNX Runtime makes when it loads a graph. The target's
    count once for verify and once for each prefill step size, all of which a server loads.
    """
    sizes = 1 + len(manifest.chunks)
    total = 0.0
    for name, kinds in manifest.quantisation.items():
        times = 1 if name.startswith("drafter.") else 1 + sizes
        total += times * sum(4 * share.bytes / STORED[kind] for kind, share in kinds.items())
    return round(total)


def _gdn(dims: GdnDims, saves: str, block: int, rows: int) -> int:
    """Bytes of a gdn layer's state, and of a block's records and convolution tail. An engine keeps
    two of the latter: one to read and one to write.
    """
    keys, values = dims.key_heads * dims.key_dim, dims.value_heads * dims.value_dim
    channels = 2 * keys + values
    state = dims.value_heads * dims.key_dim * dims.value_dim * 4
    if saves == "states":
        saved = channels * rows + state
    else:
        saved = channels * rows + (keys + values + dims.value_heads) * 4
    tail = (dims.conv_kernel - 1) * channels * rows
    return state + 2 * (block * saved + tail)


def _rings(drafter: DrafterDims, manifest: Manifest, capacity: int, rows: int) -> int:
    shape = drafter.attention
    token = 2 * shape.kv_heads * shape.head_dim * rows
    widest = manifest.widest_chunk
    slots = [ring_rows(layer.window, capacity, manifest.block, widest) for layer in drafter.layers]
    return token * sum(slots)
