"""`thor-dflash calibrate` as a user runs it, and `quantize` with what it wrote."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from support.checkpoints import GEOMETRIES, write_target

from thor_dflash.builders.checkpoint.target import read_target
from thor_dflash.cli import main

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
