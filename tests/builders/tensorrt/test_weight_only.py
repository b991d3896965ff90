"""Prefill of a checkpoint whose rows must not be quantised keeps our kernels, though scales for the
rows are stored.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
from support.checkpoints import Dialect, read_config, write_config, write_target
from support.trt_builds import HYBRID

from thor_dflash.builders.build import make_plan, material
from thor_dflash.builders.checkpoint.target import read_target
from thor_dflash.builders.tensorrt.package import plan_engines
from thor_dflash.config.build import BuildConfig
from thor_dflash.config.tensorrt import TensorRTConfig
from thor_dflash.core.errors import ConfigError

FP4 = {"num_bits": 4, "type": "float", "group_size": 16}
EVERY = {
    f"model.layers.{i}.{name}": {"quant_algo": "NVFP4"}
    for i in range(HYBRID.layers)
    for name in ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
}
ONE = "model.layers.0.mlp.down_proj"


def algorithm(name: str) -> dict[str, Any]:
    return {"quant_method": "modelopt", "quant_algo": name}


def mixed(name: str) -> dict[str, Any]:
    """MIXED_PRECISION, with this algorithm for one linear and NVFP4 for the others."""
    layers = EVERY | {ONE: {"quant_algo": name}}
    return algorithm("MIXED_PRECISION") | {"quantized_layers": layers}


def group(rows: object) -> dict[str, Any]:
    """As compressed-tensors says it, with this type of the rows."""
    one = {"targets": ["Linear"], "weights": FP4, "input_activations": rows}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": one}}


def quantisers(
    directory: Path, dialect: Dialect, table: object, who: Literal["auto", "tensorrt"] = "auto"
) -> int:
    """Number of nodes of the prefills that quantise rows."""
    write_target(directory, HYBRID, 1, dialect)
    write_config(directory, {**read_config(directory), "quantization_config": table})
    section = TensorRTConfig(prefill_linears=who)
    config = BuildConfig(engine="tensorrt", chunk=64, chunks=(64,), tensorrt=section)
    made = plan_engines(material(make_plan(read_target(directory), None, config)))
    return sum(
        node.op_type == "TRT_FP4DynamicQuantize"
        for one in made.together
        if one.name.startswith("prefill")
        for node in one.model.graph.node
    )


CASES: list[tuple[Dialect, Any, Any]] = [
    ("modelopt", algorithm("NVFP4"), algorithm("W4A16_NVFP4")),
    ("modelopt", mixed("NVFP4"), mixed("W4A16_NVFP4")),
    ("compressed-tensors", group(FP4), group(None)),
]


@pytest.mark.parametrize(("dialect", "both", "only"), CASES, ids=["all", "mixed", "group"])
def test_rows_are_quantised_only_where_the_checkpoint_says_so(
    dialect: Dialect, both: object, only: object, tmp_path: Path
) -> None:
    assert quantisers(tmp_path, dialect, both) > 0
    assert quantisers(tmp_path, dialect, only) == 0
    assert quantisers(tmp_path, dialect, both, "tensorrt") > 0
    with pytest.raises(ConfigError, match=r"tensorrt, and layers\.0.* declared W4A16\)"):
        quantisers(tmp_path, dialect, only, "tensorrt")
