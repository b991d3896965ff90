"""The scripts that measure on a GPU run to their ends, on one that computes nothing: a mistake in
one would cost device time.
"""

from __future__ import annotations

import json
import sys
import time
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from stand_ins.fake_driver import fake
from support.planner_nano import package

from thor_dflash.builders import synthetic
from thor_dflash.cli.commands import bench
from thor_dflash.runtime.measure import tune as tuning

pytestmark = pytest.mark.slow
TESTS = Path(__file__).parent
COMMAND = """
import sys
import pytest
from stand_ins.fake_driver import fake
from test_gpu_scripts import small_27b
from thor_dflash.calib.synthetic import shapes
from thor_dflash.cli.commands import serve
from thor_dflash.cli.main import main
from thor_dflash.runtime.measure import tune
fake(pytest.MonkeyPatch())
tune.WARM_S = 0.0
serve.TUNE = f"import runpy; runpy.run_path({__file__!r})"
shapes.TARGETS["qwen3.6-27b"], shapes.DRAFTERS["qwen3.6-27b"] = small_27b()
sys.exit(main(sys.argv[1:]))
"""
"""The command line."""
TWO_PROCESSES = """
import mmap, os, sys, time
child = os.fork()
if child:  # it maps a file, the other one has as many bytes of its own
    kept = mmap.mmap(os.open(sys.argv[1], os.O_RDONLY), 0, prot=mmap.PROT_READ)
    sum(kept[::4096])
else:
    kept = b"x" * (64 << 20)
time.sleep(0.6)
child and os.wait()
"""


def small_27b() -> tuple[Any, Any]:
    """Target and drafter that have the layers and the taps of the 27B alone."""
    from dataclasses import replace

    target, drafter = synthetic.SHAPES["qwen3.6-27b"]
    sizes = {"vocab": 2048, "hidden": 512, "intermediate": 1024}
    few = {"heads": 4, "kv_heads": 2}
    gdn = replace(target.gdn, key_heads=2, value_heads=6)
    attention = replace(target.attention, **few)
    small = replace(target, **sizes, attention=attention, gdn=gdn)
    attention = replace(drafter.attention, **few)
    return small, replace(drafter, **sizes, attention=attention, mask_token=2000)


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    path = tmp_path / "command.py"
    path.write_text(COMMAND)
    monkeypatch.setenv("PYTHONPATH", f"{TESTS.parent}:{TESTS}")
    return [sys.executable, str(path)]


def test_a_rehearsal(
    command: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    script = import_module("gpu.rehearse")
    for name, value in (("COMMAND", command), ("KILLS", 2), ("PROBE", 1 << 24)):
        monkeypatch.setattr(script, name, value)
    given = ["--work", str(tmp_path / "work"), "--layers", "8", "--method", "rtn"]
    assert script.main([*given, "disk"]) == 0
    assert script.main([*given, "--seconds", "0.5"]) == script.AGAIN
    notes = json.loads((tmp_path / "work" / "rehearsal.json").read_text())
    assert list(notes["interrupted"].values()) == [pytest.approx(0.5, abs=0.4)]
    assert script.main(given) == 0
    capsys.readouterr()
    assert script.main([*given, "report"]) == 0
    found = json.loads(capsys.readouterr().out)["rehearsal"]
    figures = {(part, name): value for part, name, value in found}
    assert figures["kills", "same bytes"] is True
    assert figures["gpu", "same bytes"] is False, "nothing was computed"
    assert figures["generate", "output tokens"] == 64
    assert figures["ready", "from process start to ready, s"] > 0


def test_the_memory_of_a_command_is_that_of_all_its_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, size = import_module("gpu.rehearse"), 64 << 20
    (tmp_path / "file").write_bytes(bytes(size))
    monkeypatch.setattr(script, "COMMAND", [sys.executable, "-c", TWO_PROCESSES])
    run = script.Rehearsal(SimpleNamespace(work=tmp_path), time.monotonic() + 60)
    found = run.run(tmp_path / "file")
    assert found.status == 0
    assert size < found.anonymous < 1.8 * size
    assert 2 * size < found.peak < 3 * size


def test_the_tuning_of_a_server(
    command: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    script = import_module("gpu.serve_tuning")
    monkeypatch.setattr(script, "COMMAND", command)
    assert script.main(["--package", str(package(tmp_path / "nano", engine="cuda"))]) == 0
    found = json.loads(capsys.readouterr().out)
    tuned = {name: bool(measured) for name, _, measured, *_ in found["serve"][1:]}
    assert tuned == {"first": True, "second": False, "off": False}
    # The child that looks for devices has none, and the device writes no answer.
    [_, wrong] = found["named"][-1]
    assert wrong == "both must give the same plan; the doctor must be content"


@pytest.mark.parametrize("options", ["--rounds 1 --again", "--cycle --planted"])
def test_times_of_tuned_launches(
    options: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = import_module("gpu.tune_times")
    monkeypatch.setitem(synthetic.SHAPES, "qwen3.6-27b", small_27b())  # type: ignore[arg-type]
    monkeypatch.setattr(bench, "DRAFT_VOCABULARY", 1024)
    monkeypatch.setattr(script, "clock", lambda bench: 1e9)
    monkeypatch.setattr(tuning, "WARM_S", 0.0)
    fake(monkeypatch)
    assert script.main(options.split()) == 0
    tables = json.loads(capsys.readouterr().out)
    names = ["planted"] if "planted" in options else ["tuning", "launches", "changed", "steps"]
    assert list(tables) == [*names, *["tuned twice"] * ("again" in options)]
    assert all({len(row) for row in table} == {len(table[0])} for table in tables.values())
