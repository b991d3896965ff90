"""`score` equals transformers on the goldens, for every geometry and every way to store weights.

The goldens hold logits and taps of some rows; goldens/transformers/README.md tells how they are
made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
    read_config,
    read_safetensors,
    write_config,
    write_drafter,
    write_safetensors,
    write_target,
)

from thor_dflash.builders.build import build
from thor_dflash.config.build import BuildConfig
from thor_dflash.config.engine import EngineConfig
from thor_dflash.core.progress import Silent
from thor_dflash.plugins.verify_attention import TILE
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


def test_the_goldens_cover_all_kinds_of_models() -> None:
    geometries = {name.rsplit(".", 1)[0] for name in NAMES}
    covered = [GEOMETRIES[name] for name in geometries]
    assert len(covered) >= 5
    assert {g.heads // g.kv_heads for g in covered} >= {2, 4, 6}
    assert {g.value_heads // g.key_heads for g in covered} >= {1, 2, 3}
    assert {g.prefix for g in covered} >= {"model.", "model.language_model."}
    assert {g.tied for g in covered} == {True, False}
    assert max(len(golden(name)["tokens"]) for name in NAMES) > 2 * TILE
    assert all(len(golden(name)["tokens"]) % 16 for name in NAMES)
    assert {name.rsplit(".", 1)[1] for name in NAMES} >= {
        *("bf16", "f16", "f32", "fp8", "mixed", "modelopt", "compressed-tensors")
    }


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


@pytest.fixture(scope="module")
def modelopt(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    session = opened(checkpoint(tmp_path_factory.mktemp("modelopt"), "gqa2.modelopt"))
    yield session
    session.close()


@pytest.mark.parametrize("count", [1, 16, 37])
def test_scoring_a_prefix_gives_the_first_rows_of_the_score(modelopt: Session, count: int) -> None:
    tokens = [int(t) for t in golden("gqa2.modelopt")["tokens"]]
    got = score(modelopt, tokens[:count], True, Silent())
    for what, rows in plain("gqa2.modelopt").items():
        np.testing.assert_array_equal(got[what], rows[:count])


def cost(name: str, config: BuildConfig) -> float:
    """Root mean square error of another build's logits, relative to that of the logits."""
    want = plain(name)["logits"]
    error = scored(name, config)["logits"] - want
    return float(np.sqrt((error**2).mean() / (want**2).mean()))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["27b.bf16", "heads27b.modelopt"])
def test_a_coarser_cache_costs_what_its_bits_say(name: str) -> None:
    """Rounding to bf16 changes a value by up to 2^-8 of it, rounding to E4M3 by 16 times as much.

    Errors of many keys and values average out, so the logits are off by less than one value is.
    """
    coarse = cost(name, BuildConfig(capacity=CAPACITY, kv="bf16"))
    coarsest = cost(name, BuildConfig(capacity=CAPACITY, kv="fp8"))
    assert 2**-13 < coarse < 2**-9
    assert 8 < coarsest / coarse < 32


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


@pytest.mark.slow
@pytest.mark.parametrize("name", ["27b.bf16", "heads27b.modelopt"])
def test_saving_states_instead_of_records_gives_the_same_results(name: str) -> None:
    got = scored(name, BuildConfig(capacity=CAPACITY, saves="states"), taps=True)
    assert max(off(got, name).values()) <= SAME


def _plus_one(*ends: str) -> Damage:
    """Add 1 to every tensor whose name, with a slash before it, ends in one of these."""

    def harm(_: TargetGeometry, tensors: Arrays) -> None:
        for name, t in tensors.items():
            if f"/{name}".endswith(ends):
                tensors[name] = (t.astype(np.float32) + 1).astype(t.dtype)

    return harm


def _rows(end: str, order: Callable[[TargetGeometry, NDArray[Any]], NDArray[Any]]) -> Damage:
    """Reorder the rows of the layers' tensors of that name."""

    def harm(g: TargetGeometry, tensors: Arrays) -> None:
        for name, t in tensors.items():
            if name.startswith("layers.") and name.endswith(end):
                tensors[name] = order(g, t)

    return harm


def _by_head(g: TargetGeometry, t: NDArray[Any]) -> NDArray[Any]:
    return t.reshape(g.heads, 2, g.head_dim, -1)


def _gates_first(g: TargetGeometry, t: NDArray[Any]) -> NDArray[Any]:
    return _by_head(g, t)[:, ::-1].reshape(t.shape)


def _all_queries_first(g: TargetGeometry, t: NDArray[Any]) -> NDArray[Any]:
    return _by_head(g, t).swapaxes(0, 1).reshape(t.shape)


def _keys_first(g: TargetGeometry, t: NDArray[Any]) -> NDArray[Any]:
    key = g.key_heads * g.key_dim
    return np.concatenate([t[key : 2 * key], t[:key], t[2 * key :]])


def _tiled(g: TargetGeometry, tensors: Arrays) -> None:
    """Value heads in the order in which head j would belong to key head j mod Hk."""
    order = np.arange(g.value_heads).reshape(g.key_heads, -1).T.reshape(-1)
    channel = (order[:, None] * g.value_dim + np.arange(g.value_dim)).reshape(-1)
    value = np.concatenate([np.arange(g.channels)[: -len(channel)], channel - len(channel)])
    ends = {"in_proj_z.weight": channel, "in_proj_a.weight": order, "in_proj_b.weight": order}
    ends |= {"A_log": order, "dt_bias": order}
    ends |= {"in_proj_qkv.weight": value, "conv1d.weight": value}
    for name, t in tensors.items():
        rows = next((rows for end, rows in ends.items() if name.endswith(end)), None)
        if rows is not None:
            tensors[name] = t[rows]
        elif name.endswith("linear_attn.out_proj.weight"):
            tensors[name] = t[:, channel]


def _odd_low(_: TargetGeometry, tensors: Arrays) -> None:
    for name, t in tensors.items():
        if t.dtype == np.uint8:
            tensors[name] = t >> 4 | t << 4


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
    "gate rows before query rows": ("27b.bf16", _rows("q_proj.weight", _gates_first)),
    "all queries, then all gates": ("27b.bf16", _rows("q_proj.weight", _all_queries_first)),
    "k before q in the convolution": ("27b.bf16", _rows("in_proj_qkv.weight", _keys_first)),
    "value heads tiled": ("27b.bf16", _tiled),
    "convolution taps reversed": ("27b.bf16", _rows("conv1d.weight", lambda _, t: t[..., ::-1])),
    "time step bias off by one": ("27b.bf16", _plus_one("dt_bias")),
    "even columns in the high nibble": ("gqa2.modelopt", _odd_low),
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


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [{"rope_theta": 1e4}, {"partial_rotary_factor": 0.5}],
    ids=lambda change: next(iter(change)),
)
def test_other_rotary_positions_are_far_away(tmp_path: Path, change: dict[str, float]) -> None:
    name = "gqa2.bf16"
    directory = checkpoint(tmp_path, name)
    write_config(directory / "target", read_config(directory / "target") | change)
    session = opened(directory, taps=False)
    tokens = [int(t) for t in golden(name)["tokens"]]
    assert off(score(session, tokens, False, Silent()), name)["logits"] >= DIFFERENT
    session.close()
