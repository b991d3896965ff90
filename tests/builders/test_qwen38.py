"""Qwen3.8-27B: its quantised checkpoints, by the kinds of their tensors, and its drafters, by the
published configurations, become packages of every engine.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from support.checkpoints import (
    GEOMETRIES,
    PREFIXES,
    DrafterGeometry,
    TargetGeometry,
    target_config,
    write_config,
    write_drafter,
    write_hollow,
    write_target,
)
from support.published_drafters import config_file

from thor_dflash.builders.build import BuildPlan, describe, make_plan
from thor_dflash.builders.checkpoint.drafter import drafter_layout, read_drafter
from thor_dflash.builders.checkpoint.drafter_config import drafter_dims
from thor_dflash.builders.checkpoint.json_fields import Fields
from thor_dflash.builders.checkpoint.target import read_target, target_layout
from thor_dflash.builders.checkpoint.target_config import target_dims
from thor_dflash.builders.tensorrt.deployment_graph import deploy
from thor_dflash.config.build import BuildConfig
from thor_dflash.core.model_dims import DrafterDims

SMALL = replace(GEOMETRIES["heads27b"], layers=8, value_heads=4)
BIG = TargetGeometry(
    vocab=248320, hidden=5120, intermediate=17408, layers=64, heads=24, kv_heads=4, head_dim=256,
    rotary=64, key_heads=16, value_heads=48, key_dim=128, value_dim=128, max_position=262144,
    prefix=PREFIXES[0], wrapper=True,
)  # fmt: skip
ENGINES = ("ort", "cuda", "tensorrt")

FP8_ATTENTION = "self_attn.=fp8 linear_attn.=fp8"
MIXES: dict[str, tuple[str, dict[str, set[str]]]] = {
    "nvidia": (
        f"mlp.=modelopt lm_head=modelopt {FP8_ATTENTION}",
        {"down_proj": {"nvfp4"}, "o_proj": {"fp8"}, "out_proj": {"fp8"}, "lm_head": {"nvfp4"},
         "in_proj_a": {"bf16"}},
    ),
    "unsloth": (
        f"layers.6.mlp=fp8 layers.7.mlp=fp8 mlp.=compressed-tensors lm_head=fp8 {FP8_ATTENTION}",
        {"down_proj": {"nvfp4", "fp8"}, "gate_proj": {"nvfp4", "fp8"}, "lm_head": {"fp8"}},
    ),
    "Inferact": (
        "in_proj=bf16 lm_head=bf16 =compressed-tensors",
        {"down_proj": {"nvfp4"}, "in_proj_qkv": {"bf16"}, "out_proj": {"nvfp4"},
         "lm_head": {"bf16"}},
    ),
    "QUASAR": (
        "in_proj_a=compressed-tensors lm_head=bf16 =compressed-tensors",
        {"in_proj_a": {"nvfp4"}, "in_proj_b": {"nvfp4"}, "lm_head": {"bf16"}},
    ),
}  # fmt: skip
"""Publisher -> how the tests write such a mixture, and classes of linears with their kinds. NVFP4
files made for FP4 rows have input scales, which are used only where TensorRT quantises the rows.
"""


@pytest.mark.parametrize(
    "mix",
    [
        pytest.param(mix, marks=pytest.mark.slow if mix in ("nvidia", "Inferact") else ())
        for mix in MIXES
    ],
)
def test_each_tensor_keeps_its_own_kind(mix: str, tmp_path: Path) -> None:
    how, kinds = MIXES[mix]
    g = replace(SMALL, mix=how)
    drafter = DrafterGeometry(second=True, block=8)
    write_target(tmp_path / "target", g, 1, "mixed")
    write_drafter(tmp_path / "drafter", g, drafter, 2, "modelopt")
    config = BuildConfig(engine="cuda", chunk=64, chunks=(32,))
    plan = make_plan(read_target(tmp_path / "target"), read_drafter(tmp_path / "drafter"), config)
    found = describe(plan).quantisation
    assert {name: set(found[name]) for name in kinds} == kinds
    assert set(found["drafter.kernel_projection"]) == {"nvfp4"}


@pytest.fixture(scope="module")
def hollow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directories of the 27B and of its published drafter, whose tensors have no content."""
    root = tmp_path_factory.mktemp("hollow")
    for name in ("target", "drafter"):
        (root / name).mkdir()
    write_config(root / "target", target_config(BIG))
    (root / "drafter" / "config.json").write_bytes(config_file())
    dims = target_dims(Fields.read(root / "target" / "config.json"))
    layout, drafts = target_layout(dims), drafter_layout(_drafter(root))
    names = {f"{n}.weight": s for n, s in layout.matrices.items()} | dict(layout.tensors)
    stored = {n if n.startswith("lm_head") else BIG.prefix + n: s for n, s in names.items()}
    write_hollow(root / "target" / "model.safetensors", stored)
    names = {f"{n}.weight": s for n, s in drafts.matrices.items()} | dict(drafts.tensors)
    write_hollow(root / "drafter" / "model.safetensors", names)
    return root


def _drafter(root: Path) -> DrafterDims:
    return drafter_dims(Fields.read(root / "drafter" / "config.json"))


def plans(root: Path) -> Iterator[BuildPlan]:
    for engine in ENGINES:
        config = BuildConfig(engine=engine, chunk=512, chunks=(512,))  # type: ignore[arg-type]
        yield make_plan(read_target(root / "target"), read_drafter(root / "drafter"), config)


@pytest.mark.slow
def test_the_published_pair_becomes_a_package_of_every_engine(hollow: Path) -> None:
    for plan in plans(hollow):
        made = describe(plan)
        assert (made.block, made.drafter) == (8, _drafter(hollow))
        assert made.quantisation["drafter.kernel_projection"]["bf16"].count == 10
        assert {"propose", "verify", "observe"} <= {graph.name for graph in plan.graphs}
        for program in plan.programs:
            assert deploy(program).plugins
