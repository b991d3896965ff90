"""Which linears a checkpoint declares W4A16, in each place and form in which it may do so. A scale
that is stored for their rows is not used.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import Dialect, TargetGeometry, read_config, write_config, write_target

from thor_dflash.builders.checkpoint.target import read_target

P = "model.language_model."
SMALL = TargetGeometry(prefix=P)
UP, DOWN = "layers.0.mlp.up_proj", "layers.0.mlp.down_proj"
ONLY, BOTH = {"quant_algo": "W4A16_NVFP4"}, {"quant_algo": "NVFP4"}
FP4 = {"num_bits": 4, "type": "float", "group_size": 16}


def mixed(**algorithms: str) -> dict[str, Any]:
    """A table of MIXED_PRECISION."""
    named = {"up": UP, "down": DOWN}
    layers = {P + named[name]: {"quant_algo": algo} for name, algo in algorithms.items()}
    return {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}


def group(*targets: str, **rows: object) -> dict[str, Any]:
    """A group whose weights are FP4; `input_activations` is the type of the rows, if given."""
    return {"weights": FP4, **({"targets": list(targets)} if targets else {}), **rows}


def groups(*every: dict[str, Any]) -> dict[str, Any]:
    return {"config_groups": {f"group_{i}": one for i, one in enumerate(every)}}


def with_tables(directory: Path, dialect: Dialect, config: object, beside: object) -> None:
    write_target(directory, SMALL, 0, dialect)
    write_config(directory, {**read_config(directory), "quantization_config": config})
    if beside is not None:
        (directory / "hf_quant_config.json").write_text(json.dumps({"quantization": beside}))


CASES: list[tuple[Any, Any, bool, bool]] = [
    # config.json, hf_quant_config.json, and whether `up` and `down` are declared W4A16
    (None, None, False, False),
    (BOTH, BOTH, False, False),
    (ONLY, None, True, True),
    (None, ONLY, True, True),
    (BOTH, ONLY, True, True),
    (mixed(up="W4A16_NVFP4", down="NVFP4"), None, True, False),
    (None, mixed(up="NVFP4", down="W4A16_NVFP4"), False, True),
    (None, mixed(up="W4A16_NVFP4"), True, False),
    (groups(group(input_activations=None)), None, True, True),
    (groups(group("Linear", input_activations=None)), None, True, True),
    (groups(group("Linear")), None, True, True),
    (groups(group("Linear", input_activations=FP4)), None, False, False),
    (groups(group("Linear", input_activations=FP4), group(P + UP)), None, True, False),
    (groups(group("Linear"), group(P + UP, input_activations=FP4)), None, False, True),
    (groups(group("re:.*up_proj$"), group("re:.*", input_activations=FP4)), None, False, False),
    (groups(group("re:.*mlp.up_proj$")), None, True, False),
    (groups(group(f"model.{DOWN}")), None, False, True),  # listed under another prefix
    # patterns that leave out a linear, which they match without its prefix
    (groups(group("Linear", input_activations=FP4), group(f"re:(?!{P}{UP}).*")), None, False, True),
    (
        groups(group("Linear", input_activations=FP4), group(r"re:layers\.0\.", f"re:{P}{DOWN}")),
        None,
        False,
        True,
    ),
    (groups({"input_activations": None}), None, False, False),  # no weights: nothing is declared
    (groups(group("Embedding")), None, False, False),
    ({"config_groups": {"W4A16": ["Linear"]}, "quantized_layers": [1]}, {}, False, False),
]


@pytest.mark.parametrize(("config", "beside", "up", "down"), CASES)
def test_scales_for_rows_are_not_used_where_only_weights_are_quantised(
    config: object, beside: object, up: bool, down: bool, tmp_path: Path
) -> None:
    with_tables(tmp_path, "modelopt" if up else "compressed-tensors", config, beside)
    checkpoint = read_target(tmp_path)
    found = [checkpoint.matrix(name).input_scale is None for name in (UP, DOWN)]
    assert found == [up, down]


def test_the_head_is_listed_beside_the_model(tmp_path: Path) -> None:
    table = {"quantized_layers": {"lm_head": ONLY}}
    with_tables(tmp_path, "modelopt", table, None)
    checkpoint = read_target(tmp_path)
    assert checkpoint.matrix("lm_head").input_scale is None
    assert checkpoint.matrix(UP).input_scale is not None
