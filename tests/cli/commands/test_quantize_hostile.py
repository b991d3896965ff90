"""Hostile input of `quantize` and `calibrate`: status 2, the fault by name, nothing written."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.checkpoints import GEOMETRIES, change_tensors, write_target

from thor_dflash.cli import main

SMALL = replace(GEOMETRIES["gqa2"], layers=2, interval=2, flat_rope=False)
SHARDED = replace(SMALL, shards=2)
INDEX = "model.safetensors.index.json"
Damage = Callable[[Path], object]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    held = tmp_path_factory.mktemp("sources")
    return {
        "one": write_target(held / "one", SMALL, 1),
        "two": write_target(held / "two", SHARDED, 1),
        "fp8": write_target(held / "fp8", SMALL, 1, "fp8"),
        "odd": write_target(held / "odd", replace(SMALL, intermediate=100), 1),
    }


def shard(source: Path, i: int = 0) -> Path:
    return sorted(source.glob("*.safetensors"))[i]


def cut(source: Path) -> None:
    os.truncate(shard(source), shard(source).stat().st_size - 100)


def index(change: Callable[[dict[str, Any]], object]) -> Damage:
    def damage(source: Path) -> None:
        table = json.loads((source / INDEX).read_text())
        change(table["weight_map"])
        (source / INDEX).write_text(json.dumps(table))

    return damage


def everywhere(place: str) -> Callable[[dict[str, Any]], object]:
    return lambda places: places.update(dict.fromkeys(places, place))


def twice(source: Path) -> None:
    (source / INDEX).unlink()
    data = shard(source).read_bytes()
    (source / "model.safetensors").write_bytes(data)
    (source / "other.safetensors").write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


def tensors(change: Callable[[dict[str, Any]], object]) -> Damage:
    return lambda source: change_tensors(source, change)


def without(name: str) -> Damage:
    return tensors(lambda held: held.pop(name))


def with_nan(name: str) -> Damage:
    def change(held: dict[str, Any]) -> None:
        held[name] = np.array(held[name])
        held[name].reshape(-1)[7] = np.nan

    return tensors(change)


def huge(source: Path) -> None:
    (source / "tokenizer.json").touch()
    os.truncate(source / "tokenizer.json", (1 << 26) + 1)


def config(text: str) -> Damage:
    return lambda source: (source / "config.json").write_text(text)


K_PROJ = "model.layers.1.self_attn.k_proj.weight"
CHECKPOINTS: dict[str, tuple[str, Damage, str]] = {
    "a shard cut short": ("two", cut, "model-00001-of-00002.safetensors must be a safetensors"),
    "a shard that is text": ("one", lambda s: shard(s).write_text("x"), "must be a safetensors"),
    "no shard": ("one", lambda s: shard(s).unlink(), "must hold one model.safetensors"),
    "a shard that is missing": ("two", lambda s: shard(s, 1).unlink(), "must be a file"),
    "an index to elsewhere": ("two", index(everywhere("../one.safetensors")), "beside the index"),
    "an index to a root": ("two", index(everywhere("/etc/passwd")), "beside the index"),
    "an index to nothing": ("two", index(everywhere("none.safetensors")), "must be a file"),
    "an index to a wrong shard": (
        "two", index(everywhere("model-00001-of-00002.safetensors")), "must be in model-00001-of",
    ),
    "an index without a tensor": ("two", index(lambda p: p.pop(K_PROJ)), f"{K_PROJ} must be in no"),
    "a name in two shards": ("two", twice, "must be in one shard"),
    "a missing member": ("one", without(K_PROJ), f"{K_PROJ} "),
    "NaN": ("one", with_nan(K_PROJ), f"{K_PROJ}, from row 0 on, must hold finite"),
    "NaN in a norm": ("one", with_nan("model.norm.weight"), "0 on, must hold finite"),
    "odd columns": ("odd", lambda s: None, "fp8 and keep take any (got 100)"),
    "quantised already": ("fp8", lambda s: None, "--from-quantised rounds a second time"),
    "no config": ("one", lambda s: (s / "config.json").unlink(), "config.json must be"),
    "a config that is no JSON": ("one", config("{"), "config.json must be"),
    "a config without sizes": ("one", config("{}"), "config.json"),
    "a huge small file": (
        "one", huge,
        "tokenizer.json must have at most",
    ),
}  # fmt: skip


def refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, error: str, *args: str | Path
) -> None:
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    assert main.main([*map(str, args)]) == 2
    shown = capsys.readouterr().err.splitlines()[-1]
    assert error in shown
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_hostile_checkpoint_is_refused(
    sources: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    kind, damage, error = CHECKPOINTS[name]
    source = shutil.copytree(sources[kind], tmp_path / "source")
    damage(source)
    args = ["--preset", "all-nvfp4", "--method", "rtn"]
    refused(
        capsys, tmp_path, error, "quantize", "--target", source, "--out", tmp_path / "out", *args
    )


OUTS = {
    "taken": "must be a new directory",
    "file": "must be a new directory",
    "link": "must be a new directory",
    "source/inside": "must be outside the checkpoint",
    "source": "must be outside the checkpoint",
    "none/out": "in a directory that exists",
    "file/out": "in a directory that exists",
    "n" * 250: "must be writable",
}


@pytest.mark.parametrize("out", OUTS)
def test_a_hostile_out_is_refused(
    sources: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], out: str
) -> None:
    source = shutil.copytree(sources["one"], tmp_path / "source")
    (tmp_path / "taken").mkdir()
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    place = tmp_path / out
    refused(capsys, tmp_path / "taken", OUTS[out], "quantize", "--target", source, "--out", place)
    assert (tmp_path / "file").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "link", "source", "taken"]


ARGUMENTS: dict[str, tuple[list[str], str]] = {
    "no statistics for act": (["--method", "act"], "act must go with --statistics"),
    "no statistics for scales": (["--kv", "scales"], "scales must go with --statistics"),
    "no such statistics": (["--statistics", "none"], "none must be a file"),
    "statistics of another kind": (["--statistics", "{model}"], "must be of format thor-dflash"),
    "statistics that are a directory": (["--statistics", "{source}"], "one must be a file"),
    "a class of no model": (["--class", "fc=fp8"], "must name linears of this model"),
    "layers that are none": (["--class", "mlp:5-9=fp8"], "must name linears of this model"),
    "huge layers": (["--class", f"mlp:0-{'9' * 400}=fp8"], "must be CLASS=FORMAT"),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_hostile_arguments_are_refused(
    sources: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    args, error = ARGUMENTS[name]
    source = sources["one"]
    given = [a.format(source=source, model=source / "model.safetensors") for a in args]
    refused(
        capsys, tmp_path, error, "quantize", "--target", source, "--out", tmp_path / "o", *given
    )


CALIBRATIONS: dict[str, tuple[str, str, str, str]] = {
    "no prompts": ("one", "s.safetensors", "", "must hold at least one document"),
    "text without a tokenizer": ("one", "s.safetensors", '{"text": "a"}', "has a tokenizer"),
    "an id past the end": ("one", "s.safetensors", '{"tokens": [256]}', "must be 0 to 255"),
    "another ending": ("one", "s.bin", '{"tokens": [1]}', "a path ending in .safetensors"),
    "no such directory": ("one", "none/s.safetensors", '{"tokens": [1]}', "a directory that exist"),
    "a directory": ("one", "d.safetensors", '{"tokens": [1]}', "must be a file in a directory"),
}


@pytest.mark.parametrize("name", CALIBRATIONS)
def test_hostile_calibrations_are_refused(
    sources: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    kind, out, prompts, error = CALIBRATIONS[name]
    (tmp_path / "d.safetensors").mkdir()
    path = tmp_path / "p.jsonl"
    path.write_text(prompts)
    args = ["calibrate", "--target", sources[kind], "--prompts", path, "--out", tmp_path / out]
    refused(capsys, tmp_path / "d.safetensors", error, *args)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["d.safetensors", "p.jsonl"]
