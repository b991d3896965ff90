"""Writing a package of random weights: it is complete, or nothing is left on disk."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
from stand_ins.fake_driver import fake
from support.samples import verify
from support.tiny_bench import ARGUMENTS

from thor_dflash.cli import main
from thor_dflash.core.errors import EngineError
from thor_dflash.package import manifest
from thor_dflash.runtime.measure.random_weights import RandomWeights


@pytest.mark.usefixtures("small_shape")
def test_a_random_package_on_disk_is_a_whole_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    fake(monkeypatch)
    child = [{"section": "ready", "name": n, "value": v, "unit": "s"} for n, v in
             (("loaded", 3.0), ("ready", 1e6))]  # fmt: skip

    def run(command: Sequence[str], **options: object) -> object:
        assert command[4:] == ["--package", str(tmp_path / "out"), "--ready", "--json", *settings]
        return SimpleNamespace(returncode=0, stdout=json.dumps(child), stderr="")

    (tmp_path / "one.toml").write_text("[engine]\ncapacity = 2048\n")
    settings = ["-c", str(tmp_path / "one.toml"), "-s", "engine.overlap=false"]
    others = ["-s", "build.chunk=512"]  # for the package; not passed on to the other process
    # The command's alone: the engine asks for the power mode by another process.
    monkeypatch.setattr("thor_dflash.cli.commands.bench.subprocess", SimpleNamespace(run=run))
    out = ["--ready", "--out", str(tmp_path / "out")]
    assert main.main([*ARGUMENTS, *settings, *others, *out]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows] == ["reading the package from disk", "loaded", "ready"]
    assert rows[-1]["must"] == pytest.approx(rows[0]["value"] + 10, abs=1e-3)
    assert rows[-1]["verdict"] == "missed"
    found = manifest.read(tmp_path / "out")
    verify(tmp_path / "out", found)
    weights = [name for name in found.files if name.endswith(".bin")]
    assert len(weights) > 1
    # A session can open it.
    assert main.main(["bench", "--package", str(tmp_path / "out"), "--ready", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert 0 < rows[0]["value"] < rows[1]["value"] < rows[2]["value"]
    # If the context is too short for the prompt that --ready uses, the error names the setting.
    few = ["-s", f"engine.capacity={found.block + 3}"]
    assert main.main(["bench", "--package", str(tmp_path / "out"), "--ready", *few]) == 2
    written = f"engine.capacity must be at least {found.block + 4} for --ready"
    assert written in capsys.readouterr().err
    # An existing package is neither overwritten nor written into.
    assert main.main([*ARGUMENTS, "--ready", "--out", str(tmp_path / "out" / "in")]) == 2
    assert "--out must be outside any package" in capsys.readouterr().err
    assert main.main([*ARGUMENTS, "--ready", "--out", str(tmp_path / "out")]) == 2
    assert "must be a new directory" in capsys.readouterr().err


@pytest.mark.usefixtures("small_shape")
@pytest.mark.parametrize(
    ("error", "outs"),
    [(KeyboardInterrupt, ("out", "there/new/out", "new/../out")), (EngineError, ("new/deep/out",))],
)
def test_a_random_package_that_is_not_finished_leaves_nothing(
    error: type[BaseException],
    outs: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    fake(monkeypatch)

    def stop(*arguments: object) -> None:
        raise error

    monkeypatch.setattr(RandomWeights, "__call__", stop)
    cubins = ["-s", f"engine.cubins={tmp_path / 'cubins'}"]
    (tmp_path / "there").mkdir()
    for out in outs:
        status = main.main([*ARGUMENTS, *cubins, "--ready", "--out", str(tmp_path / out)])
        assert status == (130 if error is KeyboardInterrupt else 2)
        assert sorted(p.name for p in tmp_path.rglob("*") if "cubins" not in p.parts) == ["there"]
