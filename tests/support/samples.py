"""Dimensions, a manifest and a package without a model, for tests that need one of these."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from thor_dflash.core.model_dims import (
    AttentionDims,
    DrafterDims,
    DraftLayerDims,
    GdnDims,
    TargetDims,
)
from thor_dflash.core.progress import Progress, Silent
from thor_dflash.package.manifest import (
    NAME,
    CheckpointSource,
    KvScales,
    Manifest,
    TensorTotals,
    checking,
    hash_file,
    render,
)

ATTENTION = AttentionDims(heads=4, kv_heads=2, head_dim=256, rotary_dim=64, rope_theta=1e7)
TARGET = TargetDims(
    vocab=300,
    hidden=128,
    intermediate=256,
    layers=("gdn", "gdn", "gdn", "attention"),
    attention=ATTENTION,
    gdn=GdnDims(key_heads=1, value_heads=2, key_dim=128, value_dim=128, conv_kernel=4),
    eps=1e-6,
    tied=True,
    max_position=4096,
)
DRAFTER = DrafterDims(
    vocab=300,
    hidden=128,
    intermediate=256,
    layers=(DraftLayerDims(causal=True, window=2048), DraftLayerDims(causal=False, window=0)),
    attention=ATTENTION,
    eps=1e-6,
    block=16,
    taps=(0, 3),
    mask_token=270,
    target_layers=4,
    max_position=4096,
)
MANIFEST = Manifest(
    tool="0.1.0",
    created="2026-01-02T03:04:05Z",
    engine="ort",
    block=16,
    chunk=64,
    capacity=512,
    kv="f32",
    activations="f32",
    saves="records",
    vocab_limit=280,
    stop_tokens=(271, 272),
    tokenizer=False,
    skipped=("model.visual.patch", "mtp.fc.weight"),
    target=TARGET,
    drafter=DRAFTER,
    kv_scales=KvScales(layers=1, low=0.5, high=2.0),
    quantisation={
        "mlp": {"nvfp4": TensorTotals(count=12, bytes=4096)},
        "head": {"bf16": TensorTotals(count=1, bytes=9)},
    },
    sources={"target": CheckpointSource(directory="nano", config_sha256="ab" * 32)},
    files={},
)


def verify(package: Path, manifest: Manifest, progress: Progress | None = None) -> None:
    """Check every file of a package against its manifest, hashes included."""
    with checking(package, manifest, progress or Silent()):
        pass


def package(directory: Path, **files: bytes) -> Manifest:
    """Write a package of these files (`a__b` is a file b in a folder a); return its manifest."""
    named = {name.replace("__", "/"): content for name, content in files.items()}
    for name, content in named.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(content)
    manifest = replace(MANIFEST, files={name: hash_file(directory / name) for name in named})
    (directory / NAME).write_text(render(manifest))
    return manifest
