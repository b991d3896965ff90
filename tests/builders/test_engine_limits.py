"""Sizes that an engine cannot run are refused before anything is written, by the user's keys."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest

from thor_dflash.builders.build import make_plan
from thor_dflash.builders.checkpoint.drafter import drafter_layout
from thor_dflash.builders.checkpoint.quantized_matrix import WeightFormat
from thor_dflash.builders.checkpoint.target import target_layout
from thor_dflash.builders.synthetic import QWEN36_27B, QWEN36_27B_DFLASH, SyntheticCheckpoint
from thor_dflash.config.build import BuildConfig
from thor_dflash.core.errors import ThorError

Engine = Literal["ort", "cuda", "tensorrt"]
SMALL: dict[str, Any] = {"vocab": 512, "hidden": 64, "intermediate": 96}
TARGET = replace(
    QWEN36_27B,
    **SMALL,
    layers=("gdn", "attention"),
    attention=replace(QWEN36_27B.attention, heads=4, kv_heads=2),
    gdn=replace(QWEN36_27B.gdn, key_heads=2, value_heads=4),
)
DRAFTER = replace(
    QWEN36_27B_DFLASH,
    **SMALL,
    layers=QWEN36_27B_DFLASH.layers[-1:],
    attention=replace(QWEN36_27B_DFLASH.attention, heads=4, kv_heads=2),
    taps=(0, 1),
    mask_token=500,
    target_layers=2,
)


def changed(dims: Any, **change: Any) -> Any:
    """Sizes with some changed; `gdn__key_dim`, for example, is that of a part."""
    for key, value in change.items():
        part, _, name = key.partition("__")
        new = changed(getattr(dims, part), **{name: value}) if name else value
        dims = replace(dims, **{part: new})
    return dims


def refusal(directory: Path, config: BuildConfig, target: Any = TARGET, drafter: Any = None) -> str:
    """Why there is no such build; "" if there is one."""
    made = SyntheticCheckpoint(directory, target, target_layout(target), kind=WeightFormat.FP8)
    other = None
    if drafter:
        other = SyntheticCheckpoint(
            directory, drafter, drafter_layout(drafter), kind=WeightFormat.FP8
        )
    try:
        make_plan(made, other, config)
    except ThorError as error:
        return str(error).removeprefix(f"{directory}: ")
    return ""


# ---- ort -----------------------------------------------------------------------------------------
NARROW = changed(TARGET, attention__rotary_dim=8)


@pytest.mark.parametrize(
    ("change", "key", "width"),
    [
        ({"hidden": 66}, "hidden_size", 66),
        (
            {"attention__kv_heads": 1, "attention__head_dim": 18},
            "num_key_value_heads * head_dim",
            18,
        ),
    ],
)
def test_rows_that_do_not_begin_alike_are_refused_for_ort(
    change: dict[str, int], key: str, width: int, tmp_path: Path
) -> None:
    message = refusal(tmp_path, BuildConfig(), changed(NARROW, **change))
    assert message == f"{key} must be a multiple of 4 for engine ort (got {width})"


# ---- cuda, tensorrt ------------------------------------------------------------------------------
ON_GPU = pytest.mark.parametrize("engine", ["cuda", "tensorrt"])


@ON_GPU
@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"vocab": 511}, "vocab_size must be a multiple of 2 for engine {} (got 511)"),
        (
            {"gdn__key_heads": 1, "gdn__value_heads": 3},
            "linear_num_value_heads must be a multiple of 2 for engine {} (got 3)",
        ),
        ({"hidden": 72}, "linear.x must have a multiple of 16 columns (got 72)"),
        ({"attention__head_dim": 128}, "verify_attention.head_dim must be 256 (got 128)"),
        ({"attention__rotary_dim": 96}, "rotary_dim must be a power of two, 16 to 256 (got 96)"),
        ({"gdn__key_dim": 64}, "gdn.key_dim must be 128 (got 64)"),
    ],
    ids=str,
)
def test_targets_that_no_kernel_takes_are_refused(
    change: dict[str, int], why: str, engine: Engine, tmp_path: Path
) -> None:
    message = refusal(tmp_path, BuildConfig(engine=engine), changed(TARGET, **change))
    assert why.format(engine) in message


WIDEST = {"attention__heads": 12, "attention__rotary_dim": 256}
"""With a bf16 cache too, the rows of a step share their memory with the most of other things."""
FULL = "verify_attention.shared memory must be at most 232448 bytes (got 232704)"


@ON_GPU
@pytest.mark.parametrize(
    ("change", "block", "chunk", "kv", "why"),
    [
        (WIDEST, 32, 64, "bf16", FULL),
        (WIDEST, 16, 32, "bf16", FULL),
        (WIDEST, 31, 33, "bf16", ""),
        (WIDEST, 32, 32, "fp8", ""),
        ({}, 33, 64, "fp8", "must be at most 32 rows (got 33)"),
    ],
)
def test_steps_with_too_many_rows_are_refused(
    change: dict[str, int],
    block: int,
    chunk: int,
    kv: Literal["bf16", "fp8"],
    why: str,
    engine: Engine,
    tmp_path: Path,
) -> None:
    config = BuildConfig(engine=engine, block=block, chunk=chunk, chunks=(chunk,), kv=kv)
    message = refusal(tmp_path, config, changed(TARGET, **change))
    assert why in message if why else not message


@pytest.mark.parametrize(
    ("engine", "count"), [("cuda", 3), ("tensorrt", 3), ("cuda", 4), ("ort", 3)]
)
def test_an_odd_draft_vocabulary_is_refused_where_our_kernels_run(
    engine: Engine, count: int, tmp_path: Path
) -> None:
    path = tmp_path / "ids.json"
    path.write_text(json.dumps(list(range(count))))
    config = BuildConfig(engine=engine, draft_ids=str(path))
    rule = f"build.draft_ids must hold an even number of ids for engine {engine} (got {count})"
    message = refusal(tmp_path, config, TARGET, DRAFTER)
    assert message == (rule if engine != "ort" and count % 2 else "")
