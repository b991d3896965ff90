"""Whole checkpoints: bytes as the published quantisers write them, any layout, after any kill."""

from __future__ import annotations

import hashlib
import io
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import ml_dtypes
import numpy as np
import pytest
import safetensors
from emulator.compiler import COMPILER
from support.checkpoints import (
    GEOMETRIES,
    DrafterGeometry,
    change_tensors,
    dequantised,
    read_safetensors,
    write_drafter,
    write_hollow,
    write_target,
)
from support.emulated_encoder import EmulatedEncoder

from thor_dflash.builders.checkpoint.quantized_matrix import WeightFormat
from thor_dflash.builders.checkpoint.target import read_target, target_layout
from thor_dflash.builders.synthetic import QWEN36_27B
from thor_dflash.calib.quantize import checkpoint, plan_report, staged_checkpoint
from thor_dflash.calib.quantize.classes import PRESETS
from thor_dflash.calib.quantize.plan import QuantizePlan, make_plan
from thor_dflash.config.quantize import QuantizeConfig
from thor_dflash.core.errors import CheckpointError, ConfigError
from thor_dflash.core.progress import Lines, ProgressTask, Silent

GOLDENS = Path(__file__).parents[2] / "goldens" / "quantize"
SMALL = replace(GEOMETRIES["gqa2"], layers=2, interval=2, flat_rope=False)
MODELOPT = QuantizeConfig(method="rtn", dialect="modelopt", threads=2)
THEIRS = QuantizeConfig(method="rtn", dialect="compressed-tensors", threads=2)
ALL = QuantizeConfig(preset="all-nvfp4", method="rtn", threads=2)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model of the goldens."""
    return write_target(tmp_path_factory.mktemp("source") / "bf16", GEOMETRIES["heads27b"], 3)


def plan_of(source: Path, config: QuantizeConfig, **more: bool) -> QuantizePlan:
    read = checkpoint.read_source(source, None)
    return make_plan(read, config, **{"from_quantised": False, **more})


def quantized(source: Path, out: Path, config: QuantizeConfig, **more: bool) -> Path:
    checkpoint.write(plan_of(source, config, **more), out, Silent())
    return out


def files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


# ---- the same bytes as published quantisers
def test_every_tensor_is_modelopts(source: Path, tmp_path: Path) -> None:
    want = json.loads((GOLDENS / "modelopt.json").read_text())
    out = quantized(source, tmp_path / "out", MODELOPT)
    made = {
        name: [row["dtype"], row["shape"], hashlib.sha256(row["data"]).hexdigest()]
        for name, row in safetensors.deserialize((out / "model.safetensors").read_bytes())
    }
    # Of the rows: calibrated, and only needed to quantise these, too.
    assert made == {n: row for n, row in want["tensors"].items() if not n.endswith("input_scale")}
    ours = json.loads((out / "hf_quant_config.json").read_text())["quantization"]
    assert {**ours, "kv_cache_quant_algo": None} == want["config"]["quantization"]


def test_fp8_rows_are_those_of_compressed_tensors(source: Path, tmp_path: Path) -> None:
    want = json.loads((GOLDENS / "compressed_tensors.json").read_text())
    made = read_safetensors(quantized(source, tmp_path / "out", THEIRS) / "model.safetensors")
    hashes = {name: hashlib.sha256(made[name].tobytes()).hexdigest() for name in want}
    assert hashes == want


@pytest.mark.parametrize("method", ["rtn", "mse"])
def test_both_dialects_hold_the_same_values(source: Path, tmp_path: Path, method: Any) -> None:
    config = QuantizeConfig(preset="all-nvfp4", method=method, dialect="modelopt")
    ours = dequantised(quantized(source, tmp_path / "ours", config))
    config = QuantizeConfig(preset="all-nvfp4", method=method, dialect="compressed-tensors")
    theirs = dequantised(quantized(source, tmp_path / "theirs", config))
    assert ours.keys() == theirs.keys()
    for name, w in ours.items():
        np.testing.assert_allclose(theirs[name], w, rtol=2**-22, err_msg=name)


def test_the_search_lowers_the_error_of_every_linear(source: Path, tmp_path: Path) -> None:
    exact = dequantised(source)
    errors = []
    for method in ("rtn", "mse"):
        config = QuantizeConfig(preset="all-nvfp4", method=method)
        made = dequantised(quantized(source, tmp_path / method, config))
        errors.append({name: ((w - exact[name]) ** 2).sum() for name, w in made.items()})
    rtn, mse = errors
    changed = [name for name in rtn if rtn[name] > 0]
    assert len(changed) == 3 * 3 + 4 + 4 * 3 + 1
    assert all(mse[name] < 0.9 * rtn[name] for name in changed)


@pytest.mark.skipif(COMPILER is None, reason="needs g++ (Debian package g++)")
@pytest.mark.parametrize("dialect", ["bf16", "f16"])
def test_a_gpu_writes_the_same_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dialect: Any
) -> None:
    made = write_target(tmp_path / "bf16", SMALL, 3, dialect)
    config = QuantizeConfig(preset="mlp", threads=2)
    want = files(quantized(made, tmp_path / "cpu", config))
    monkeypatch.setattr("thor_dflash.calib.quantize.cuda_encoder.CudaEncoder", EmulatedGpu)
    monkeypatch.setattr("thor_dflash.calib.quantize.quantize.CudaEncoder", EmulatedGpu)
    monkeypatch.setattr("thor_dflash.calib.quantize.quantize.GPU_CHUNK", 2000)
    assert files(quantized(made, tmp_path / "gpu", replace(config, device="cuda"))) == want
    assert EmulatedGpu.calls == 2 * 3 * 4


class EmulatedGpu(EmulatedEncoder):
    """A context manager, as CudaEncoder is."""

    calls = 0

    def __init__(self, device: int, cubins: Path) -> None:
        del device, cubins
        type(self).calls = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def encode(self, rows: Any, scaling: Any) -> Any:
        type(self).calls += 1
        return super().encode(rows, scaling)


# ---- layouts
@pytest.mark.parametrize("preset", PRESETS)
def test_a_published_27b_layout_has_its_published_size(
    whole_27b: Any, monkeypatch: pytest.MonkeyPatch, preset: Any
) -> None:
    """Times of a verify step on a Thor that were computed from the sizes of published files."""
    monkeypatch.setattr(plan_report, "seconds", lambda plan: 60)  # measured, which takes a while
    plan = make_plan(whole_27b, QuantizeConfig(preset=preset), from_quantised=False)
    want = {
        "nvidia": 66.1, "all-nvfp4": 54.6, "unsloth": 82.5, "redhat": 90.4, "berkerdooo": 61.3,
        "fp8": 95.6, "keep": 189.4, "mlp": None, "unsloth-3.8": None,
    }[preset]  # fmt: skip
    moved = plan_report.step_bytes(plan) / plan_report.THOR * 1e3
    if want is not None:
        assert moved == pytest.approx(want, abs=0.06)
    text = plan_report.table(plan)
    assert f"{moved:.1f} ms" in text
    classes = {row.label: row.kind for row in plan_report.class_bytes(plan)}
    assert (classes["embedding"], classes["other"]) == ("bf16", "bf16")


@pytest.fixture(scope="module")
def whole_27b(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A 27B of zeros without content on the disk: only its headers are read."""
    directory = tmp_path_factory.mktemp("27b")
    from support.checkpoints import PREFIXES, TargetGeometry, target_config, write_config

    g = TargetGeometry(
        vocab=248320, hidden=5120, intermediate=17408, layers=64, heads=24, kv_heads=4,
        head_dim=256, rotary=64, key_heads=16, value_heads=48, key_dim=128, value_dim=128,
    )  # fmt: skip
    layout = target_layout(QWEN36_27B)
    write_config(directory, target_config(g))
    shapes = {f"{PREFIXES[2]}{n}": shape for n, shape in layout.tensors.items()}
    shapes |= {
        f"{'' if n == 'lm_head' else PREFIXES[2]}{n}.weight": shape
        for n, shape in layout.matrices.items()
    }
    write_hollow(directory / "model.safetensors", shapes)
    return read_target(directory)


def test_some_layers_may_differ(source: Path) -> None:
    kinds = plan_of(source, QuantizeConfig(classes=("mlp:1-2=fp8", "gdn_out=keep"))).kinds
    found = {i: kinds[f"layers.{i}.mlp.up_proj"] for i in range(4)}
    four, eight = WeightFormat.NVFP4, WeightFormat.FP8
    assert found == {0: four, 1: eight, 2: eight, 3: four}
    assert kinds["layers.0.linear_attn.out_proj"] is None
    assert kinds["layers.0.linear_attn.in_proj_z"] is eight
    assert kinds["layers.0.linear_attn.in_proj_a"] is None


def test_what_is_not_quantised_is_copied(tmp_path: Path) -> None:
    made = write_target(tmp_path / "bf16", GEOMETRIES["sharded"], 4)
    (made / "tokenizer.json").write_text("{}")
    (made / "LICENSE").write_text("free")
    out = quantized(made, tmp_path / "out", ALL)
    assert files(out)["LICENSE"] == b"free"
    before: dict[str, Any] = {}
    for shard in made.glob("*.safetensors"):
        before |= read_safetensors(shard)
    after = read_safetensors(out / "model.safetensors")
    plain = {name for name, t in after.items() if t.dtype == ml_dtypes.bfloat16}
    assert len(plain) == 8 * 2 + 2 + 6 * (4 + 2) + 2 * 2
    assert all(after[name].tobytes() == before[name].tobytes() for name in plain)
    assert read_target(out).dims == read_target(made).dims


def test_a_drafter_is_quantised_too(tmp_path: Path) -> None:
    target = GEOMETRIES["27b"]
    made = write_drafter(tmp_path / "bf16", target, DrafterGeometry(second=True), 5)
    plan = make_plan(checkpoint.read_source(None, made), QuantizeConfig(), from_quantised=False)
    assert plan.kinds["fc"] is WeightFormat.NVFP4
    assert plan.kinds["candidate_selector.hidden_projection"] is None
    checkpoint.write(plan, tmp_path / "out", Silent())
    made_dims = checkpoint.read_source(None, tmp_path / "out").dims
    assert made_dims == checkpoint.read_source(None, made).dims


def test_large_checkpoints_have_several_shards(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = dequantised(quantized(source, tmp_path / "one", ALL))
    monkeypatch.setattr("thor_dflash.calib.quantize.plan.SHARD_BYTES", 40_000)
    out = quantized(source, tmp_path / "many", ALL)
    assert len(list(out.glob("model-*-of-*.safetensors"))) > 3
    assert read_target(out).linears.keys() == read_target(source).linears.keys()
    for name, w in dequantised(out).items():
        np.testing.assert_array_equal(w, whole[name])


# ---- kills
class Killed(BaseException):
    """Ends a run as a kill does: nothing is tidied up afterwards."""


class KillAfter(Silent):
    """Ends the run once so many bytes have been reported."""

    def __init__(self, count: int) -> None:
        self.left = count

    def task(self, label: str, total: int | None = None, unit: str = "") -> ProgressTask:
        def show(done: int, state: str) -> None:
            if label == "quantising" and done >= self.left and state == "running":
                raise Killed

        return ProgressTask(show)


@pytest.mark.parametrize("share", [0.02, 0.4, 0.97])
def test_a_killed_run_continues_to_the_same_bytes(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    monkeypatch.setattr("thor_dflash.calib.quantize.plan.COPY_BYTES", 10_000)
    want = files(quantized(source, tmp_path / "whole", MODELOPT))
    plan, out = plan_of(source, MODELOPT), tmp_path / "out"
    total = sum(unit.reads for unit in plan.units)
    with pytest.raises(Killed):
        checkpoint.write(plan, out, KillAfter(int(share * total)))
    partial = tmp_path / ".out.partial"
    journal = partial / staged_checkpoint.JOURNAL
    assert not out.exists()
    rows = journal.read_bytes().splitlines()
    assert 1 <= len(rows) <= len(plan.units)
    with journal.open("ab") as file:
        file.write(b'{"unit": "torn')
    if len(rows) > 2:  # what a machine that lost power has lost
        tensor = next(iter(json.loads(rows[1])["tensors"]))
        shard = next(s for s in plan.files if tensor in s.begins)
        with (partial / shard.name).open("r+b") as file:
            file.seek(shard.begins[tensor])
            file.write(b"\xff" * 8)
    checkpoint.write(plan_of(source, MODELOPT), out, Silent())
    assert files(out) == want
    assert not partial.exists()


@pytest.mark.slow
def test_a_run_killed_at_any_write_continues_to_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also within a write, and between a unit and its line in the journal."""
    made = write_target(tmp_path / "bf16", SMALL, 3)
    monkeypatch.setattr("thor_dflash.calib.quantize.plan.COPY_BYTES", 10_000)
    monkeypatch.setattr("thor_dflash.calib.quantize.plan.SHARD_BYTES", 60_000)
    want = files(quantized(made, tmp_path / "whole", MODELOPT))
    left, stage = 0, staged_checkpoint.StagedCheckpoint
    steps = {name: getattr(stage, name) for name in ("write", "finish_unit", "note", "finish")}

    def cut(name: str) -> Any:
        def step(self: Any, *given: Any) -> None:
            nonlocal left
            left -= 1
            if not left and name == "write":
                steps[name](self, *given[:2], given[2][: len(given[2]) // 2])
            if not left:
                raise Killed
            steps[name](self, *given)

        return step

    for name in steps:
        monkeypatch.setattr(stage, name, cut(name))
    ends, at = 0, 1
    while not ends:
        out, left = tmp_path / f"killed{at}", at
        try:
            quantized(made, out, MODELOPT)
            ends = at
        except Killed:
            left = 0
            quantized(made, out, MODELOPT)
        assert files(out) == want, at
        shutil.rmtree(out)
        at += 3
    assert ends > 60


class Interrupted(Silent):
    """Ctrl-C as soon as a task begins."""

    def task(self, *args: object) -> ProgressTask:
        raise KeyboardInterrupt


def test_an_interrupt_names_what_stays(source: Path, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt, match=r"same command continues with .*\.out\.partial"):
        checkpoint.write(plan_of(source, MODELOPT), tmp_path / "out", Interrupted())


def test_a_run_killed_in_its_first_line_begins_anew(source: Path, tmp_path: Path) -> None:
    partial = tmp_path / ".out.partial"
    partial.mkdir()
    (partial / staged_checkpoint.JOURNAL).write_text('{"key": "torn')
    assert quantized(source, tmp_path / "out", MODELOPT).is_dir()
    assert not partial.exists()


def test_a_stopped_run_with_other_settings_begins_anew(source: Path, tmp_path: Path) -> None:
    with pytest.raises(Killed):
        checkpoint.write(plan_of(source, MODELOPT), tmp_path / "out", KillAfter(10**6))
    shown = io.StringIO()
    out = tmp_path / "out"
    checkpoint.write(plan_of(source, ALL), out, Lines(shown))
    assert "beginning anew" in shown.getvalue()
    assert files(out) == files(quantized(source, tmp_path / "whole", ALL))


# ---- hostile input
def broken(tmp_path: Path, change: Any, geometry: str = "27b", dialect: Any = "bf16") -> Path:
    made = write_target(tmp_path / "source", GEOMETRIES[geometry], 6, dialect)
    change_tensors(made, change)
    return made


def spoil(name: str, value: float) -> Any:
    def change(tensors: dict[str, Any]) -> None:
        tensors[name] = np.array(tensors[name])
        tensors[name].reshape(-1)[-1] = value

    return change


UP, NORM = "layers.2.mlp.up_proj.weight", "norm.weight"


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("name", [UP, NORM, "layers.3.self_attn.q_proj.weight"])
def test_a_weight_that_is_no_number_is_refused(tmp_path: Path, name: str, value: float) -> None:
    made = broken(tmp_path, spoil(f"model.language_model.{name}", value))
    with pytest.raises(CheckpointError, match=rf"model\.safetensors: .*{name}.* finite"):
        quantized(made, tmp_path / "out", MODELOPT)
    assert {path.name for path in tmp_path.iterdir()} == {"source"}


@pytest.mark.parametrize(
    ("classes", "error"),
    [
        ("mlp", "quantize.classes must be CLASS=FORMAT"),
        ("mlp=int4", "quantize.classes must be CLASS=FORMAT"),
        ("mlp:7-9=fp8", "quantize.classes must name linears of this model"),
        ("fc=nvfp4", "quantize.classes must name linears of this model"),
    ],
)
def test_a_rule_that_means_nothing_is_refused(source: Path, classes: str, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        plan_of(source, QuantizeConfig(classes=(classes,)))
    with pytest.raises(ConfigError, match=r"quantize\.preset unsloth-3\.8 must name linears"):
        plan_of(source, QuantizeConfig(preset="unsloth-3.8"))


def test_a_tied_head_is_not_quantised(tmp_path: Path) -> None:
    made = write_target(tmp_path / "tied", GEOMETRIES["0.8b"], 7)
    assert "lm_head" not in plan_of(made, ALL).kinds
    with pytest.raises(ConfigError, match="must name linears of this model"):
        plan_of(made, QuantizeConfig(classes=("head=nvfp4",)))


def test_a_quantised_source_is_rounded_again_only_on_purpose(tmp_path: Path) -> None:
    made = write_target(tmp_path / "source", GEOMETRIES["27b"], 8, "mixed")
    with pytest.raises(CheckpointError, match="--from-quantised"):
        plan_of(made, ALL)
    plan = plan_of(made, QuantizeConfig(preset="mlp", method="rtn"), from_quantised=True)
    assert "layers.0.mlp.up_proj" in plan.twice
    report = checkpoint.write(plan, tmp_path / "out", Silent())
    assert report.rounded_twice == plan.twice
    before, after = dequantised(made), dequantised(tmp_path / "out")
    for name in ("model.layers.3.self_attn.k_proj.weight", "model.layers.1.mlp.down_proj.weight"):
        # What had a scale per block has its nearest one again; FP8 becomes BF16.
        np.testing.assert_allclose(after[name], before[name], rtol=0.3, atol=2e-3)
    assert after["lm_head.weight"].shape == before["lm_head.weight"].shape


def test_columns_that_no_block_fits_are_refused(tmp_path: Path) -> None:
    made = write_target(tmp_path / "odd", replace(GEOMETRIES["gqa2"], intermediate=100), 9)
    with pytest.raises(CheckpointError, match=r"down_proj\.weight must have a multiple of 16"):
        plan_of(made, ALL)
    assert quantized(made, tmp_path / "out", QuantizeConfig(preset="fp8")).is_dir()


def test_zeros_get_scale_one(tmp_path: Path) -> None:
    name = "model.language_model.layers.1.mlp.down_proj"

    def change(tensors: dict[str, Any]) -> None:
        tensors[f"{name}.weight"] = tensors[f"{name}.weight"] * 0

    made = broken(tmp_path, change)
    report = checkpoint.write(plan_of(made, MODELOPT), tmp_path / "out", Silent())
    assert report.zero == ("layers.1.mlp.down_proj",)
    tensors = read_safetensors(tmp_path / "out" / "model.safetensors")
    assert float(tensors[f"{name}.weight_scale_2"]) == 1
    assert set(tensors[f"{name}.weight_scale"].view(np.uint8).flat) == {0x38}
    assert not tensors[f"{name}.weight"].any()


def test_a_small_disk_is_refused_before_anything_is_written(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = (0, 0, 1 << 20)
    monkeypatch.setattr(
        staged_checkpoint.shutil, "disk_usage", lambda path: type("", (), {"free": free[2]})
    )
    with pytest.raises(ConfigError, match=r"disk of --out must have \d+ bytes free \(got 1048576"):
        quantized(source, tmp_path / "out", MODELOPT)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("where", ["", "inside", "../taken"])
def test_out_must_be_new_and_outside_the_source(tmp_path: Path, where: str) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "taken").mkdir()
    with pytest.raises(ConfigError, match="--out must be"):
        staged_checkpoint.check_out(tmp_path / "source" / where, tmp_path / "source")
    with pytest.raises(ConfigError, match="in a directory that exists"):
        staged_checkpoint.check_out(tmp_path / "none" / "out", tmp_path / "source")


def test_two_runs_do_not_write_one_directory(source: Path, tmp_path: Path) -> None:
    plan = plan_of(source, MODELOPT)
    with (
        staged_checkpoint.StagedCheckpoint(tmp_path / "out", plan.files, "key"),
        pytest.raises(ConfigError, match="one run at a time"),
    ):
        checkpoint.write(plan, tmp_path / "out", Silent())
    (tmp_path / ".other.partial").mkdir()
    (tmp_path / ".other.partial" / "mine").write_text("keep")
    with pytest.raises(ConfigError, match="must be free or a run that was stopped"):
        checkpoint.write(plan, tmp_path / "other", Silent())
    assert (tmp_path / ".other.partial" / "mine").read_text() == "keep"
