"""`score` equals transformers on the goldens, for every geometry and every way to store weights.

The goldens hold logits and taps of some rows; goldens/transformers/README.md tells how they are
made.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import numpy as np
import pytest
from numpy.typing import NDArray
from support.checkpoints import (
    GEOMETRIES,
    DrafterGeometry,
    TargetGeometry,
    read_safetensors,
    write_drafter,
    write_safetensors,
    write_target,
)

from thor_dflash.builders.build import build
from thor_dflash.config.build import BuildConfig
from thor_dflash.config.engine import EngineConfig
from thor_dflash.core.progress import Silent
from thor_dflash.runtime.measure.score import score
from thor_dflash.runtime.session import Session, open_session

Arrays = dict[str, NDArray[Any]]
Damage = Callable[[TargetGeometry, Arrays], None]

GOLDENS = Path(__file__).parents[2] / "goldens" / "transformers"
NAMES = sorted(file.name.removesuffix(".npz") for file in GOLDENS.glob("*.npz"))

SAME = 1e-4
"""Largest difference from transformers, relative to its largest value. A part of it is float32's
rounding: transformers itself gives slightly different values when it reads token by token."""

CAPACITY = 384

DIFFERENT = 1e-2
"""Least difference of a wrong model: a hundred times SAME."""


def golden(name: str) -> Arrays:
    """Arrays of a golden, named <geometry>.<way to store weights>."""
    with np.load(GOLDENS / f"{name}.npz") as file:
        return dict(file)


def checkpoint(directory: Path, name: str) -> Path:
    """Write the target from which the golden was made, and a drafter that has the golden's taps."""
    geometry, dialect = name.rsplit(".", 1)
    g, want = GEOMETRIES[geometry], golden(name)
    write_target(directory / "target", g, int(want["seed"]), dialect)  # type: ignore[arg-type]
    taps = tuple(int(i) for i in want["tap_layers"])
    write_drafter(directory / "drafter", g, DrafterGeometry(taps=taps), 1)
    return directory


def opened(directory: Path, config: BuildConfig | None = None, taps: bool = True) -> Session:
    config = config or BuildConfig(capacity=CAPACITY)
    drafter = directory / "drafter" if taps else None
    build(directory / "target", drafter, directory / "package", config, Silent())
    return open_session(directory / "package", EngineConfig(threads=1), Silent())


def scored(
    name: str,
    config: BuildConfig | None = None,
    harm: Damage | None = None,
    taps: bool = False,
) -> Arrays:
    """Logits (and taps) of all rows of a golden, as this project computes them. `harm` changes the
    checkpoint before. Without taps the package is built without a drafter.
    """
    tokens = [int(t) for t in golden(name)["tokens"]]
    with TemporaryDirectory() as held:
        directory = checkpoint(Path(held), name)
        if harm is not None:
            damage(directory / "target", GEOMETRIES[name.rsplit(".", 1)[0]], harm)
        session = opened(directory, config, taps)
        try:
            return score(session, tokens, taps, Silent())
        finally:
            session.close()


@cache
def plain(name: str) -> Arrays:
    """The results of the ordinary build."""
    return scored(name, taps=True)


def damage(directory: Path, g: TargetGeometry, harm: Damage) -> None:
    """Change tensors of a one-file checkpoint. `harm` gets names without the model's prefix."""
    file = directory / "model.safetensors"
    prefix = g.prefix
    tensors = {name.removeprefix(prefix): t for name, t in read_safetensors(file).items()}
    outside = [name for name in tensors if name.startswith(("lm_head", "mtp.", "model.visual."))]
    harm(g, tensors)
    named = {name if name in outside else prefix + name: t for name, t in tensors.items()}
    write_safetensors(file, named)


def distance(got: NDArray[Any], want: NDArray[Any]) -> float:
    """Largest difference, relative to the largest value."""
    a, b = got.astype(np.float64), want.astype(np.float64)
    return float(np.abs(a - b).max() / np.abs(b).max())


def off(got: Arrays, name: str) -> dict[str, float]:
    """Distances of logits and taps from a golden's."""
    want = golden(name)
    return {what: distance(rows[want["rows"]], want[what]) for what, rows in got.items()}


QUICK = {"27b.bf16", "0.8b.bf16", "gqa2.modelopt", "gqa2.fp8"}
"""Goldens of the quick suite: two geometries, a tied head, three ways to store weights."""


@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in NAMES]
)
def test_logits_and_taps_are_those_of_transformers(name: str) -> None:
    got = plain(name)
    assert got.keys() == {"logits", "taps"}
    assert got["logits"].dtype == np.float32
    assert got["logits"].shape == (len(golden(name)["tokens"]), golden(name)["logits"].shape[1])
    assert max(off(got, name).values()) <= SAME


def cost(name: str, config: BuildConfig) -> float:
    """Root mean square error of another build's logits, relative to that of the logits."""
    want = plain(name)["logits"]
    error = scored(name, config)["logits"] - want
    return float(np.sqrt((error**2).mean() / (want**2).mean()))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kv"), [("0.8b.bf16", "f32"), ("27b.bf16", "fp8"), ("heads27b.bf16", "fp8")]
)
def test_bf16_activations_cost_no_more_than_in_transformers(
    name: str, kv: Literal["f32", "fp8"]
) -> None:
    """transformers in bfloat16 rounds wherever this project does, and in more places. Beside that,
    the error of an FP8 cache is negligible.
    """
    theirs = float(golden(name)["bf16_cost"])
    got = cost(name, BuildConfig(capacity=CAPACITY, activations="bf16", kv=kv))
    assert theirs / 10 < got < 1.25 * theirs


def _plus_one(*ends: str) -> Damage:
    """Add 1 to every tensor whose name, with a slash before it, ends in one of these."""

    def harm(_: TargetGeometry, tensors: Arrays) -> None:
        for name, t in tensors.items():
            if f"/{name}".endswith(ends):
                tensors[name] = (t.astype(np.float32) + 1).astype(t.dtype)

    return harm


def _scaled(end: str, factor: float) -> Damage:
    def harm(_: TargetGeometry, tensors: Arrays) -> None:
        for name, t in tensors.items():
            if name.endswith(end):
                tensors[name] = (t.astype(np.float32) * factor).astype(t.dtype)

    return harm


WRONG: dict[str, tuple[str, Damage]] = {
    "layer norms without their 1": ("27b.bf16", _plus_one("_layernorm.weight")),
    "final norm without its 1": ("27b.bf16", _plus_one("/norm.weight")),
    "q and k norms without their 1": ("27b.bf16", _plus_one("q_norm.weight", "k_norm.weight")),
    "gdn norm with a 1": ("27b.bf16", _plus_one("linear_attn.norm.weight")),
    "time step bias off by one": ("27b.bf16", _plus_one("dt_bias")),
    "a multiplier taken for a divisor": ("gqa2.modelopt", _scaled("weight_scale_2", 8)),
    "a divisor taken for a multiplier": (
        "gqa2.compressed-tensors",
        _scaled("weight_global_scale", 8),
    ),
    "an fp8 scale taken for the largest value": ("gqa2.fp8", _scaled("o_proj.weight_scale", 448)),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", WRONG)
def test_a_model_read_wrongly_is_far_away(what: str) -> None:
    name, harm = WRONG[what]
    assert off(scored(name, harm=harm), name)["logits"] >= DIFFERENT
