"""`thor-dflash synth` as a user runs it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from thor_dflash.builders.checkpoint.mtp import read_mtp
from thor_dflash.calib.synthetic import shapes
from thor_dflash.cli import main


def test_a_plan_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["synth", "--shape", "qwen3.6-27b", "--out", str(tmp_path / "out"), "--plan"]
    assert main.main([*args, "--preset", "nvidia", "--method", "rtn"]) == 0
    out = capsys.readouterr().out
    assert "66.1 ms" in out
    assert not list(tmp_path.iterdir())


def test_what_is_written_can_be_quantised(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = replace(shapes.target_shape("qwen3.5-9b", 4), vocab=512, hidden=64, intermediate=64)
    monkeypatch.setattr("thor_dflash.calib.synthetic.shapes.TARGETS", {"tiny": tiny})
    out, again = tmp_path / "bf16", tmp_path / "nvfp4"
    assert main.main(["synth", "--shape", "tiny", "--mtp", "--out", str(out)]) == 0
    assert "random values" in capsys.readouterr().out
    assert main.main(["quantize", "--target", str(out), "--out", str(again)]) == 0
    assert read_mtp(again, 3).dims.hidden == 64, "the MTP layer is kept as it is"
    assert main.main(["synth", "--shape", "tiny", "--out", str(out)]) == 2
    assert main.main(["synth", "--shape", "tiny", "--drafter", "--mtp", "--plan"]) == 2
    assert main.main(["synth", "--shape", "tiny"]) == 2
    assert "--out must be given" in capsys.readouterr().err
