"""Reads the vision tower of a Qwen3.5/3.6/3.8 checkpoint, and how it wants images prepared."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from thor_dflash.builders.checkpoint.expected_tensors import ExpectedTensors, check
from thor_dflash.builders.checkpoint.json_fields import Fields
from thor_dflash.builders.checkpoint.quantized_matrix import Matrix
from thor_dflash.builders.checkpoint.shards import Shards
from thor_dflash.core.errors import CheckpointError
from thor_dflash.core.model_dims import (
    FRAMES,
    MERGE,
    MERGED,
    PATCH,
    TowerDims,
    VisionDims,
)
from thor_dflash.core.tensors import Array

PREFIXES = ("model.visual.", "visual.", "vision_tower.")
PATCH_EMBED = "patch_embed.proj"
POSITIONS = "pos_embed.weight"
PROCESSOR = "preprocessor_config.json"
BICUBIC = 3
VisionMode = Literal["auto", "on", "off"]

TOKENS = ("image_token_id", "vision_start_token_id", "vision_end_token_id", "video_token_id")


@dataclass(frozen=True, slots=True)
class VisionCheckpoint:
    """The tower's tensors. Names are relative to `prefix`; the files stay mapped."""

    directory: Path
    dims: VisionDims
    prefix: str
    shards: Shards
    names: frozenset[str]
    """Stored names of the tower's tensors."""

    def matrix(self, name: str) -> Matrix:
        """Return a linear's weight: "blocks.3.attn.qkv", for example."""
        codes = self.shards.array(f"{self.prefix}{name}.weight")
        return Matrix(name, codes.reshape(len(codes), -1))

    def tensor(self, name: str) -> Array:
        """Return another tensor; a bias in float32, in which it is added."""
        stored = self.shards.array(self.prefix + name)
        return stored.astype(np.float32) if name.endswith(".bias") else stored


def read_vision(directory: Path, mode: VisionMode) -> VisionCheckpoint | None:
    """Read the headers of the tower, and check that it is whole. No weight is read.

    Returns None if `mode` is off, or is auto and the checkpoint holds nothing of a tower.
    Raises: CheckpointError.
    """
    if mode == "off":
        return None
    shards = Shards.open(directory)
    found = [prefix for prefix in PREFIXES if any(name.startswith(prefix) for name in shards)]
    if not found and mode == "auto":
        return None
    if len(found) != 1:
        rule = " or ".join(f"{prefix}*" for prefix in PREFIXES)
        got = " and ".join(found) or "none of them"
        raise CheckpointError(f"{directory} must hold {rule} for build.vision {mode} (got {got})")
    try:
        return _read(directory, found[0], shards)
    except CheckpointError as e:
        raise CheckpointError(f"{e}; --vision off builds without images") from e


def _read(directory: Path, prefix: str, shards: Shards) -> VisionCheckpoint:
    config = Fields.read(directory / "config.json")
    tower, out = _tower(config)
    own = frozenset(name for name in shards if name.startswith(prefix))
    others = [name for name in shards if name not in own]
    check(shards, tower_layout(tower, out), lambda name: prefix + name, besides=others)
    shortest, longest = _pixels(Fields.read(directory / PROCESSOR))
    tokens = {key: config.integer(key, least=0) for key in TOKENS}
    dims = VisionDims(
        tower=tower,
        mrope=_mrope(config.section("text_config")),
        image_token=tokens["image_token_id"],
        reserved=tuple(tokens.values()),
        shortest=shortest,
        longest=longest,
    )
    return VisionCheckpoint(directory, dims, prefix, shards, own)


def _tower(root: Fields) -> tuple[TowerDims, int]:
    """Return the tower's sizes and the columns of its result, which are the text's."""
    vision, text = root.section("vision_config"), root.section("text_config")
    vision.expect("model_type", "qwen3_5", "qwen3_5_vision")
    known: dict[str, object] = {
        "in_channels": 3,
        "patch_size": PATCH,
        "temporal_patch_size": FRAMES,
        "spatial_merge_size": MERGE,
        "hidden_act": "gelu_pytorch_tanh",
        "deepstack_visual_indexes": [],
    }
    for key, value in known.items():
        vision.expect(key, value)
    hidden, heads = vision.integer("hidden_size"), vision.integer("num_heads")
    if hidden % heads or hidden // heads % 4:
        raise vision.wrong("num_heads", f"a number of heads, {hidden} / 4 columns shared by them")
    positions = vision.integer("num_position_embeddings")
    side = round(positions**0.5)
    if side * side != positions:
        raise vision.wrong("num_position_embeddings", "a square number")
    if (out := vision.integer("out_hidden_size")) != (want := text.integer("hidden_size")):
        raise vision.wrong("out_hidden_size", f"{want}, as text_config.hidden_size")
    theta = 1e4
    if vision.given("rope_parameters"):
        theta = vision.section("rope_parameters").number("rope_theta")
    tower = TowerDims(
        depth=vision.integer("depth"),
        hidden=hidden,
        heads=heads,
        intermediate=vision.integer("intermediate_size"),
        positions=side,
        rope_theta=theta,
    )
    return tower, out


def tower_layout(tower: TowerDims, out: int) -> ExpectedTensors:
    """Return the tensors of a tower: 333 for the 27B. All are plain, since none is quantised in any
    checkpoint that works. Source: NVIDIA/Model-Optimizer#1687.
    """
    c, i, wide = tower.hidden, tower.intermediate, MERGED * tower.hidden
    found: dict[str, tuple[int, ...]] = {
        f"{PATCH_EMBED}.weight": (c, 3, FRAMES, PATCH, PATCH),
        f"{PATCH_EMBED}.bias": (c,),
        POSITIONS: (tower.positions**2, c),
        "merger.norm.weight": (c,),
        "merger.norm.bias": (c,),
    }
    linears = {"merger.linear_fc1": (wide, wide), "merger.linear_fc2": (out, wide)}
    for block in (f"blocks.{n}" for n in range(tower.depth)):
        linears |= {f"{block}.attn.qkv": (3 * c, c), f"{block}.attn.proj": (c, c)}
        linears |= {f"{block}.mlp.linear_fc1": (i, c), f"{block}.mlp.linear_fc2": (c, i)}
        for norm in ("norm1", "norm2"):
            found |= {f"{block}.{norm}.{part}": (c,) for part in ("weight", "bias")}
    for name, shape in linears.items():
        found |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    return ExpectedTensors({}, found)


def _pixels(processor: Fields) -> tuple[int, int]:
    """Return least and most pixels of a resized image; refuse any other preparation than ours."""
    for key, value in (
        ("patch_size", PATCH),
        ("temporal_patch_size", FRAMES),
        ("merge_size", MERGE),
        ("image_mean", [0.5, 0.5, 0.5]),
        ("image_std", [0.5, 0.5, 0.5]),
        ("resample", BICUBIC),
        ("do_resize", True),
        ("do_normalize", True),
        ("do_rescale", True),
    ):
        processor.expect(key, value)
    if processor.given("rescale_factor") and processor.number("rescale_factor") != 1 / 255:
        raise processor.wrong("rescale_factor", "1/255")
    if processor.given("size"):
        size = processor.section("size")
        return size.integer("shortest_edge"), size.integer("longest_edge")
    return processor.integer("min_pixels"), processor.integer("max_pixels")


def _mrope(text: Fields) -> tuple[int, int]:
    """Return how many pairs of a head's columns turn by height and by width."""
    rope = text.section("rope_parameters")
    sections = rope.integers("mrope_section")
    rule = "three sections, as many pairs as are rotated"
    rotated = rope.number("partial_rotary_factor") * text.integer("head_dim") / 2
    if len(sections) != 3 or sum(sections) != rotated:
        raise rope.wrong("mrope_section", f"{rule}, {rotated:g} in all")
    if not rope.given("mrope_interleaved") or not rope.flag("mrope_interleaved"):
        raise rope.wrong("mrope_interleaved", "true")
    return sections[1], sections[2]
