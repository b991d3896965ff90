"""`thor-dflash calibrate` as a user runs it, and `quantize` with what it wrote."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from support.checkpoints import GEOMETRIES, read_safetensors, write_target

from thor_dflash.builders.build import build
from thor_dflash.builders.checkpoint.target import read_target
from thor_dflash.calib.calibrate import package_statistics
from thor_dflash.cli import main
from thor_dflash.config.build import BuildConfig
from thor_dflash.core.progress import Silent
from thor_dflash.package import manifest

SMALL = replace(GEOMETRIES["gqa2"], layers=2, interval=2, flat_rope=False)


def test_statistics_are_measured_and_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_target(tmp_path / os.fsdecode(b"caf\xe9"), SMALL, 1)
    prompts, made = tmp_path / "p.jsonl", tmp_path / "s.safetensors"
    prompts.write_text('{"tokens": [1, 2, 3, 4]}\n{"tokens": [5, 6, 7]}\n')
    given = ["--target", str(source), "--prompts", str(prompts), "--out", str(made)]
    assert main.main(["calibrate", *given, "--tokens", "6"]) == 0
    shown = capsys.readouterr()
    assert f"{made}: activations of 6 tokens in 2 documents" in shown.out
    assert "tokens or more are better" in shown.out
    assert "calibrating 2 layers" in shown.err
    out = tmp_path / "out"
    args = ["quantize", "--target", str(source), "--out", str(out), "--statistics", str(made)]
    assert main.main([*args, "--method", "act", "--preset", "all-nvfp4"]) == 0
    assert "method act, dialect modelopt, cache scales" in capsys.readouterr().out
    assert read_target(out).kv_scales(1) is not None
    report = json.loads((out / "quantization_report.json").read_text())
    assert (report["statistics"]["tokens"], report["settings"]["method"]) == ("6", "act")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("source") / "target", SMALL, 1)


@pytest.fixture(scope="module")
def package(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("package") / "p"
    build(source, None, out, BuildConfig(chunk=32, capacity=64, kv="f32"), Silent())
    return out


def given(package: Path, folder: Path) -> list[str]:
    prompts = folder / "p.jsonl"
    prompts.write_text(json.dumps({"tokens": [*range(100)]}) + '\n{"tokens": [5, 6, 7]}\n')
    return ["calibrate", "--package", str(package), "--prompts", str(prompts), "--out",
            str(folder / "s.safetensors"), "-s", "engine.threads=1"]  # fmt: skip


def scales(source: Path, folder: Path, statistics: Path) -> dict[str, bytes]:
    out = folder / statistics.stem
    args = ["quantize", "--target", str(source), "--out", str(out), "--statistics"]
    assert main.main([*args, str(statistics), "--method", "act", "--preset", "all-nvfp4"]) == 0
    made = read_safetensors(next(out.glob("*.safetensors")))
    return {name: x.tobytes() for name, x in made.items() if "scale" in name}


def test_a_package_is_measured(
    package: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(given(package, tmp_path)) == 0
    shown = capsys.readouterr()
    assert "note: documents are cut to 48 tokens, the context of the package" in shown.out
    assert "activations of 51 tokens in 2 documents" in shown.out
    assert "calibrating 51 tokens" in shown.err


@pytest.mark.slow
def test_a_package_and_its_checkpoint_give_the_same_scales(
    source: Path, package: Path, tmp_path: Path
) -> None:
    args = given(package, tmp_path)
    assert main.main(args) == 0
    other, at = tmp_path / "layers.safetensors", args.index("--prompts")
    args[1:3] = ["--target", str(source)]
    args[args.index("--out") + 1] = str(other)
    assert main.main([*args[: at + 4], "--set", "calibrate.context=48"]) == 0
    have = scales(source, tmp_path, tmp_path / "s.safetensors")
    want = scales(source, tmp_path, other)
    assert have.keys() == want.keys()
    pairs = [(a, b) for name in want for a, b in zip(have[name], want[name], strict=True)]
    assert sum(a != b for a, b in pairs) <= len(pairs) / 1000


def test_an_interrupted_run_leaves_nothing(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stopped:
        weights: dict[str, object] = {}  # noqa: RUF012

        def run(self, call: object) -> Iterator[object]:
            raise KeyboardInterrupt

    monkeypatch.setattr(package_statistics, "observer", lambda *args: Stopped())
    assert main.main(given(package, tmp_path)) != 0
    assert [p.name for p in tmp_path.iterdir()] == ["p.jsonl"]


def test_what_cannot_be_measured_is_refused(
    source: Path, package: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = given(package, tmp_path)
    for wrong in (args[:1] + args[3:], [*args, "--target", str(source)]):
        assert main.main(wrong) == 2
        assert "--target" in capsys.readouterr().err
    found = manifest.read(package)
    (tmp_path / "trt").mkdir()
    text = manifest.render(replace(found, engine="tensorrt"))
    (tmp_path / "trt" / manifest.NAME).write_text(text)
    capsys.readouterr()
    assert main.main(given(tmp_path / "trt", tmp_path)[:-2]) == 2
    assert "--package must be of engine ort or cuda" in capsys.readouterr().err
    (tmp_path / "p.jsonl").write_text('{"tokens": [256]}\n')
    assert main.main(args) == 2
    assert "tokens[0] must be 0 to 255" in capsys.readouterr().err
    assert not (tmp_path / "s.safetensors").exists()
