"""A checkpoint's scales of an FP8 cache are used if the cache is FP8, and only then."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from support.checkpoints import GEOMETRIES, read_safetensors, write_safetensors, write_target
from support.loop_models import prompt

from thor_dflash.builders.build import build
from thor_dflash.config.build import BuildConfig
from thor_dflash.config.engine import EngineConfig
from thor_dflash.core.progress import Silent
from thor_dflash.core.tensors import Array
from thor_dflash.package import manifest
from thor_dflash.runtime.measure.score import score
from thor_dflash.runtime.session import open_session

GEOMETRY = GEOMETRIES["4b"]


def logits(target: Path, package: Path, kv: str) -> Array:
    build(
        target,
        None,
        package,
        BuildConfig(kv="fp8" if kv == "fp8" else "f32", capacity=128),
        Silent(),
    )
    session = open_session(package, EngineConfig(threads=1), Silent())
    return score(session, prompt(70, 3), False, Silent())["logits"]


def scaled(tmp_path: Path, factor: float) -> Path:
    """A checkpoint whose attention layers carry k and v scales."""
    target = tmp_path / f"target{factor}"
    write_target(target, GEOMETRY, 5)
    file = target / "model.safetensors"
    tensors = dict(read_safetensors(file))
    for i in range(3, GEOMETRY.layers, 4):
        for n, scale in (("k", factor), ("v", factor / 2)):
            name = f"{GEOMETRY.prefix}layers.{i}.self_attn.{n}_proj.{n}_scale"
            tensors[name] = np.array(scale, np.float32)
    write_safetensors(file, tensors)
    return target


def test_scales_are_read_used_and_reported(tmp_path: Path) -> None:
    # Scales that are powers of two only shift FP8's exponents, which changes nothing in its range.
    fair, tiny = scaled(tmp_path, 2.0**-4), scaled(tmp_path, 2.0**-30)
    exact = logits(fair, tmp_path / "f32", "f32")
    assert np.array_equal(logits(tiny, tmp_path / "f32b", "f32"), exact)
    good = logits(fair, tmp_path / "good", "fp8")
    broken = logits(tiny, tmp_path / "bad", "fp8")
    size = np.sqrt(np.mean(exact**2))
    assert 1e-4 < np.sqrt(np.mean((good - exact) ** 2)) / size < 0.05
    # With tiny scales everything saturates at 448 * 2^-30, so that attention sees almost nothing.
    assert np.sqrt(np.mean((broken - exact) ** 2)) / size > 0.1
    scales = manifest.read(tmp_path / "good").kv_scales
    layers = sum((i + 1) % 4 == 0 for i in range(GEOMETRY.layers))
    assert (scales.layers, scales.low, scales.high) == (layers, 2.0**-5, 2.0**-4)
