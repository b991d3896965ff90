"""Quantising with statistics: weighted scales, scales of the cache, input_scale."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.checkpoints import (
    GEOMETRIES,
    DrafterGeometry,
    dequantised,
    read_safetensors,
    write_drafter,
    write_target,
)

from thor_dflash.builders.checkpoint.target import read_target, target_layout
from thor_dflash.calib.quantize import checkpoint
from thor_dflash.calib.quantize.cache_scales import power_of_two
from thor_dflash.calib.quantize.plan import QuantizePlan, make_plan
from thor_dflash.calib.quantize.statistics import (
    CacheStatistics,
    InputStatistics,
    fingerprint,
    input_of,
    read_statistics,
    statistics_file,
)
from thor_dflash.config.quantize import QuantizeConfig
from thor_dflash.core.errors import ConfigError
from thor_dflash.core.progress import Silent


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("source") / "bf16", GEOMETRIES["gqa2"], 3)


def written(source: Path, v_amax: float = 3.0, v_rms: float = 0.5, k_amax: float = 9.0) -> Path:
    """Statistics of uneven channels, beside the source."""
    target = read_target(source)
    rng = np.random.default_rng(2)
    inputs = {}
    for name, (_, columns) in target_layout(target.dims).matrices.items():
        energy = rng.lognormal(0, 1.5, columns).astype(np.float32)
        inputs.setdefault(input_of(name), InputStatistics(energy, float(energy.max())))
    heads = np.array([k_amax / 2, k_amax], np.float32), np.array([v_amax, v_amax / 4], np.float32)
    metadata = {"model": fingerprint(target), "tokens": "100"}
    data = statistics_file(inputs, {3: CacheStatistics(*heads, v_rms)}, metadata)
    path = source.parent / f"{v_amax}-{v_rms}-{k_amax}.safetensors"
    path.write_bytes(data)
    return path


def planned(source: Path, statistics: Path | None, config: QuantizeConfig) -> QuantizePlan:
    return make_plan(
        checkpoint.read_source(source, None),
        config,
        from_quantised=False,
        statistics=read_statistics(statistics) if statistics else None,
    )


def quantized(source: Path, out: Path, statistics: Path | None, **settings: Any) -> Any:
    plan = planned(source, statistics, QuantizeConfig(**settings))
    return checkpoint.write(plan, out, Silent())


def test_weighted_scales_have_the_smallest_weighted_error(source: Path, tmp_path: Path) -> None:
    path = written(source)
    exact, found = dequantised(source), read_statistics(path)
    errors: dict[str, dict[str, float]] = {}
    for method in ("rtn", "mse", "act"):
        given = path if method == "act" else None
        quantized(source, tmp_path / method, given, preset="all-nvfp4", method=method)
        for name, w in dequantised(tmp_path / method).items():
            linear = input_of(name.removeprefix("model.").removesuffix(".weight"))
            if linear in found.inputs and not np.array_equal(w, exact[name]):
                weighted = ((w - exact[name]) ** 2 * found.inputs[linear].energy).sum()
                errors.setdefault(name, {})[method] = float(weighted)
    assert len(errors) == 3 * 3 + 4 + 4 * 3 + 1
    for name, one in errors.items():
        assert one["act"] < 0.9 * one["mse"], name
        assert one["act"] < 0.8 * one["rtn"], name


SCALES = [
    ({"v_amax": 3.0}, 1.0),
    ({"v_amax": 358.0}, 1.0),
    ({"v_amax": 359.0}, 2.0),  # 1.25 * 359 > 448
    ({"v_amax": 5000.0}, 16.0),
    ({"v_amax": 0.3, "v_rms": 0.06}, 2.0**-10),
    ({"v_amax": 3.0, "v_rms": 0.06}, 2.0**-6),
    ({"v_amax": 0.0, "v_rms": 0.0}, 1.0),
]


@pytest.mark.parametrize(("values", "scale"), SCALES)
def test_scales_of_the_cache_are_powers_of_two(
    source: Path, values: dict[str, float], scale: float
) -> None:
    [layer] = planned(source, written(source, **values), QuantizeConfig(preset="mlp")).cache
    assert (layer.layer, layer.k_scale, layer.v_scale) == (3, 1.0, scale)
    assert max(layer.v_amax) == np.float32(values["v_amax"])


@pytest.mark.parametrize("dialect", ["modelopt", "compressed-tensors"])
def test_scales_of_the_cache_are_those_that_a_build_reads(
    source: Path, tmp_path: Path, dialect: Any
) -> None:
    path = written(source, v_amax=5000.0)
    report = quantized(source, tmp_path / "out", path, preset="mlp", method="rtn", dialect=dialect)
    target = read_target(tmp_path / "out")
    assert target.kv_scales(3) == (1.0, 16.0)
    assert target.kv_scales(0) is None
    assert not target.skipped
    table = json.loads((tmp_path / "out" / "quantization_report.json").read_text())
    assert table["cache"][0]["v_scale"] == report.cache[0].v_scale == 16
    assert table["statistics"]["tokens"] == "100"


def test_a_scale_leaves_a_margin() -> None:
    for amax in (1e-30, 0.01, 1.0, 358.4, 358.5, 1e6):
        scale = power_of_two(amax)
        assert 1.25 * amax / scale <= 448
        assert scale == 2.0**-10 or 1.25 * amax / scale > 224


def test_keys_need_no_scale_unless_their_norm_allows_it(source: Path, tmp_path: Path) -> None:
    from support.checkpoints import change_tensors

    made = write_target(tmp_path / "bf16", GEOMETRIES["gqa2"], 3)
    path = written(made, k_amax=900.0)  # which the norm of `made` excludes
    assert planned(made, path, QuantizeConfig(preset="mlp")).cache[0].k_scale == 1

    def change(tensors: dict[str, Any]) -> None:
        name = "model.layers.3.self_attn.k_norm.weight"
        tensors[name] = np.full_like(tensors[name], 200)

    change_tensors(made, change)
    [layer] = planned(made, path, QuantizeConfig(preset="mlp")).cache
    assert layer.k_bound == 8 * 201
    assert layer.k_scale == 4


def test_modelopts_fp8_gets_the_scale_of_its_rows(source: Path, tmp_path: Path) -> None:
    path = written(source)
    settings: dict[str, Any] = {"preset": "nvidia", "dialect": "modelopt", "method": "rtn"}
    quantized(source, tmp_path / "with", path, **settings)
    quantized(source, tmp_path / "without", None, **settings)
    made = read_safetensors(tmp_path / "with" / "model.safetensors")
    before = read_safetensors(tmp_path / "without" / "model.safetensors")
    scales = {name for name in made if name.endswith("input_scale")}
    assert len(scales) == 4 + 3 * 3
    assert made.keys() - before.keys() == scales | {
        f"model.layers.3.self_attn.{p}_proj.{p}_scale" for p in "kv"
    }
    assert all(made[name].tobytes() == before[name].tobytes() for name in before)
    inputs = read_statistics(path).inputs
    for name in scales:
        linear = name.removeprefix("model.").removesuffix(".input_scale")
        assert made[name] == np.float32(inputs[input_of(linear)].amax / 448)
    read_target(tmp_path / "with")


@pytest.mark.parametrize(
    ("dialect", "preset"),
    [("modelopt", "mlp"), ("modelopt", "nvidia"), ("compressed-tensors", "nvidia")],
)
def test_quantised_rows_get_a_scale_and_a_declaration(
    source: Path, tmp_path: Path, dialect: Any, preset: Any
) -> None:
    """As modelopt's NVFP4 and compressed-tensors' W4A4: a multiplier, or a divisor."""
    path, out = written(source), tmp_path / "out"
    settings: dict[str, Any] = {"preset": preset, "dialect": dialect, "method": "rtn"}
    quantized(source, out, path, activations="nvfp4", **settings)
    quantized(source, tmp_path / "without", path, **settings)
    inputs, target = read_statistics(path).inputs, read_target(out)
    plain = read_target(tmp_path / "without")
    for name in ("layers.0.mlp.up_proj", "layers.3.mlp.down_proj"):
        scale = np.float32(inputs[input_of(name)].amax) / np.float32(2688)
        assert target.matrix(name).input_scale == pytest.approx(scale, rel=1e-6)
        assert plain.matrix(name).input_scale is None
        assert target.matrix(name).codes.tobytes() == plain.matrix(name).codes.tobytes()
    table = json.loads((out / "config.json").read_text())["quantization_config"]
    four = [g for g in table["config_groups"].values() if g["weights"]["num_bits"] == 4]
    assert [g["input_activations"]["num_bits"] for g in four] == [4]
    if dialect == "compressed-tensors":
        assert four[0]["input_activations"]["dynamic"] == "local"
    elif preset == "mlp":
        assert table["quant_algo"] == "NVFP4"
    else:
        assert {row["quant_algo"] for row in table["quantized_layers"].values()} == {"NVFP4", "FP8"}


def test_settings_that_need_statistics_are_refused_without(source: Path, tmp_path: Path) -> None:
    for settings in ({"method": "act"}, {"kv": "scales"}, {"activations": "nvfp4"}):
        with pytest.raises(ConfigError, match="must go with --statistics"):
            quantized(source, tmp_path / "out", None, **settings)
    drafter = write_drafter(tmp_path / "d", GEOMETRIES["gqa2"], DrafterGeometry(), 1)
    read = checkpoint.read_source(None, drafter)
    given = read_statistics(written(source))
    for config, found in ((QuantizeConfig(method="act"), None), (QuantizeConfig(), given)):
        with pytest.raises(ConfigError, match="must be rtn or mse for a drafter"):
            make_plan(read, config, from_quantised=False, statistics=found)
    assert not (tmp_path / "out").exists()


def test_no_scales_are_written_where_none_are_wanted(source: Path, tmp_path: Path) -> None:
    path = written(source)
    for kv, algorithm in (("cast", "FP8"), ("none", None)):
        out = tmp_path / kv
        assert not quantized(source, out, path, preset="mlp", kv=kv).cache
        assert read_target(out).kv_scales(3) is None
        own = json.loads((out / "hf_quant_config.json").read_text())["quantization"]
        assert own["kv_cache_quant_algo"] == algorithm
