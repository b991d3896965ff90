"""A build: what its package holds, what it refuses and resumes, and that it is reproducible."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
from support.checkpoints import (
    GEOMETRIES,
    DrafterGeometry,
    read_config,
    write_config,
    write_drafter,
    write_target,
)
from support.samples import verify

from thor_dflash.builders.build import _key, build, make_plan
from thor_dflash.builders.checkpoint.drafter import read_drafter
from thor_dflash.builders.checkpoint.shards import Shards
from thor_dflash.builders.checkpoint.target import read_target
from thor_dflash.builders.output.atomic_package import AtomicPackage
from thor_dflash.config.build import BuildConfig
from thor_dflash.core.errors import CheckpointError, ConfigError
from thor_dflash.core.progress import Silent
from thor_dflash.package import manifest
from thor_dflash.plugins import OPS
from thor_dflash.plugins.contract import DOMAIN

GEOMETRY = GEOMETRIES["27b"]


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    write_target(tmp_path / "target", GEOMETRY, 1, "mixed")
    write_drafter(tmp_path / "drafter", GEOMETRY, DrafterGeometry(), 2)
    return tmp_path / "target", tmp_path / "drafter"


def digests(package: Path) -> dict[str, str]:
    return {
        p.relative_to(package).as_posix(): hashlib.sha256(p.read_bytes()).hexdigest()
        for p in package.rglob("*")
        if p.is_file() and p.name != manifest.NAME
    }


def test_the_same_checkpoints_give_the_same_bytes(pair: tuple[Path, Path], tmp_path: Path) -> None:
    for name in ("a", "b"):
        build(*pair, tmp_path / name, BuildConfig(), Silent())
    assert digests(tmp_path / "a") == digests(tmp_path / "b")


def test_manifest_says_what_is_stored(pair: tuple[Path, Path], tmp_path: Path) -> None:
    made = build(*pair, tmp_path / "p", BuildConfig(capacity=300), Silent())
    assert manifest.read(tmp_path / "p") == made
    verify(tmp_path / "p", made)
    assert made.skipped == read_target(pair[0]).skipped != ()
    kinds = {name: list(kinds) for name, kinds in made.quantisation.items()}
    assert kinds["gate_proj"] == ["nvfp4"]
    assert kinds["q_proj"] == ["fp8"]
    assert kinds["in_proj_qkv"] == ["bf16"]
    assert kinds["drafter.fc"] == ["bf16"]
    attention = sum(kind == "attention" for kind in GEOMETRIES_LAYERS)
    assert made.quantisation["q_proj"]["fp8"].count == attention
    codes = GEOMETRY.intermediate * GEOMETRY.hidden
    size = codes // 2 + codes // 16 + 4 * GEOMETRY.intermediate
    assert made.quantisation["gate_proj"]["nvfp4"].bytes == GEOMETRY.layers * size
    stored = sum(e.bytes for n, e in made.files.items() if n.startswith("weights/"))
    packed = sum(s.bytes for kinds in made.quantisation.values() for s in kinds.values())
    assert packed < stored


GEOMETRIES_LAYERS = tuple(
    "attention" if (i + 1) % 4 == 0 else "gdn" for i in range(GEOMETRY.layers)
)


def test_a_tied_head_is_stored_once(tmp_path: Path) -> None:
    geometry = GEOMETRIES["0.8b"]
    assert geometry.tied
    write_target(tmp_path / "t", geometry, 1)
    plan = make_plan(read_target(tmp_path / "t"), None, BuildConfig())
    table = geometry.vocab * geometry.hidden * 2
    assert table <= plan.weights.nbytes("weights/outer.bin") < 2 * table


def test_every_graph_is_valid_onnx_with_plugin_attributes_and_shapes_of_all_values(
    pair: tuple[Path, Path], tmp_path: Path
) -> None:
    build(*pair, tmp_path / "p", BuildConfig(), Silent())
    types = {op.type for op in OPS}
    for path in sorted((tmp_path / "p").glob("*.onnx")):
        onnx.checker.check_model(str(path))
        model = onnx.load(str(path), load_external_data=False)
        ours = [n for n in model.graph.node if n.domain == DOMAIN]
        assert ours, path.name
        for node in ours:
            attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
            assert attributes["plugin_namespace"] == DOMAIN.encode()
            assert attributes["plugin_version"] == b"1"
            assert node.op_type in types
        assert {n.domain for n in model.graph.node} <= {"", DOMAIN}
        _every_value_has_a_shape(model)


def _every_value_has_a_shape(model: onnx.ModelProto) -> None:
    known = {v.name for v in (*model.graph.value_info, *model.graph.output, *model.graph.input)}
    made = {name for node in model.graph.node for name in node.output}
    assert made <= known
    for value in (*model.graph.value_info, *model.graph.output):
        assert value.type.tensor_type.HasField("shape"), value.name


def test_a_state_is_read_and_left_under_one_name(pair: tuple[Path, Path], tmp_path: Path) -> None:
    build(*pair, tmp_path / "p", BuildConfig(), Silent())
    for path in sorted((tmp_path / "p").glob("*.onnx")):
        graph = onnx.load(str(path), load_external_data=False).graph
        inputs = {i.name: i.type.tensor_type.elem_type for i in graph.input}
        for out in graph.output:
            if out.name.startswith("next."):
                assert inputs[out.name.removeprefix("next.")] == out.type.tensor_type.elem_type
                readers = [n for n in graph.node if out.name.removeprefix("next.") in n.input]
                assert len(readers) == 1, "in-place state has one reader"


def mutate(key: str, value: object, where: str = "drafter") -> Callable[[Path, Path], None]:
    def change(target: Path, drafter: Path) -> None:
        directory = {"target": target, "drafter": drafter}[where]
        config = read_config(directory)
        config[key] = value
        write_config(directory, config)

    return change


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            BuildConfig(block=18, engine="tensorrt"),
            r"build.block must be <= 16, the drafter.s, for engine tensorrt \(got 18\)",
        ),
        (BuildConfig(block=7), r"build.block must be a multiple of 2 .* 6 value heads .*\(got 7\)"),
        (BuildConfig(capacity=17), r"build.capacity must be 18 to \d+.* \(got 17\)"),
        (BuildConfig(capacity=10**9), r"max_position_embeddings \(got 1000000000\)"),
    ],
)
def test_options_must_fit(
    pair: tuple[Path, Path], tmp_path: Path, config: BuildConfig, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        build(*pair, tmp_path / "p", config, Silent())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["drafter", "target"]


def only_attention(target: Path, drafter: Path) -> None:
    config = read_config(target)
    text = config.get("text_config", config)
    text["layer_types"] = ["full_attention"] * len(text["layer_types"])
    write_config(target, config)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (mutate("vocab_size", 300), "vocab"),
        (only_attention, "num_hidden_layers must be enough for both kinds of layer"),
        (mutate("model_type", "llama", "target"), "llama"),
    ],
)
def test_a_pair_that_does_not_fit_leaves_nothing(
    pair: tuple[Path, Path], tmp_path: Path, change: Callable[[Path, Path], None], message: str
) -> None:
    change(*pair)
    with pytest.raises(CheckpointError, match=message):
        build(*pair, tmp_path / "p", BuildConfig(), Silent())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["drafter", "target"]


def test_a_build_of_other_inputs_is_not_resumed(pair: tuple[Path, Path], tmp_path: Path) -> None:
    def key(config: BuildConfig) -> str:
        return _key(make_plan(read_target(pair[0]), read_drafter(pair[1]), config), None)

    base = key(BuildConfig())
    assert key(BuildConfig()) == base
    others = (
        BuildConfig(block=8),
        BuildConfig(chunk=32),
        BuildConfig(kv="fp8"),
        BuildConfig(activations="bf16"),
        BuildConfig(saves="states"),
        BuildConfig(capacity=99),
    )
    assert base not in {key(config) for config in others}
    plan = make_plan(read_target(pair[0]), read_drafter(pair[1]), BuildConfig())
    (pair[0] / "chat_template.jinja").touch()
    keys = [base, _key(plan, None)]
    for name in ("model.safetensors", "config.json", "chat_template.jinja"):
        os.utime(pair[0] / name, (1, 1))
        keys.append(_key(plan, None))
    assert len(set(keys)) == len(keys)


def test_a_killed_build_of_other_options_is_not_mixed_in(
    pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first, with an FP8 cache, is killed when its files are written, before it finishes."""
    build(*pair, tmp_path / "clean", BuildConfig(), Silent())
    killed(monkeypatch, *pair, tmp_path / "p", BuildConfig(kv="fp8"))
    assert (tmp_path / ".p.partial" / "verify.onnx").is_file()
    build(*pair, tmp_path / "p", BuildConfig(), Silent())
    assert digests(tmp_path / "p") == digests(tmp_path / "clean")


def killed(
    monkeypatch: pytest.MonkeyPatch, target: Path, drafter: Path, out: Path, config: BuildConfig
) -> None:
    """A build that is killed when its files are written: leaves all of them, but not the lock."""

    def discard(stage: AtomicPackage) -> None:
        os.close(stage._lock)
        stage._lock = -1

    with monkeypatch.context() as patch:
        patch.setattr(AtomicPackage, "finish", lambda *_: 1 / 0)
        patch.setattr(AtomicPackage, "_discard", discard)
        with pytest.raises(ZeroDivisionError):
            build(target, drafter, out, config, Silent())


@pytest.mark.parametrize(
    ("eos", "message"),
    [(list(range(9)), r"at most 8 ids \(got 9\)"), (10**6, r"below \d+ \(got 1000000\)")],
)
def test_stop_ids_are_checked_before_anything_is_written(
    pair: tuple[Path, Path],
    tmp_path: Path,
    eos: object,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (pair[0] / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    monkeypatch.setattr(
        "thor_dflash.builders.output.weight_files.WeightFiles.write", lambda *_: 1 / 0
    )
    with pytest.raises(CheckpointError, match=message):
        build(*pair, tmp_path / "p", BuildConfig(), Silent())


@pytest.mark.parametrize(
    ("tensor", "bad"),
    [
        ("layers.0.linear_attn.in_proj_qkv.weight", b"\x80\x7f"),  # bf16: infinity
        ("embed_tokens.weight", b"\xc0\xff"),
    ],
)
def test_what_is_no_number_is_named_and_leaves_nothing(
    pair: tuple[Path, Path], tmp_path: Path, tensor: str, bad: bytes
) -> None:
    shards = Shards.open(pair[0])
    name = next(name for name in shards if name.endswith(tensor))
    entry = shards.entry(name)
    with entry.file.open("r+b") as file:
        file.seek(entry.begin + 7 * len(bad))
        file.write(bad)
    with pytest.raises(CheckpointError, match=rf"{tensor} must hold finite numbers .* at \[0, 7\]"):
        build(*pair, tmp_path / "p", BuildConfig(), Silent())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["drafter", "target"]
