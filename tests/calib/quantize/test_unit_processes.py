"""Quantising in several processes: the same bytes, no error lost, no process left behind."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support.checkpoints import GEOMETRIES, change_tensors, write_target

from thor_dflash.calib.quantize import checkpoint
from thor_dflash.calib.quantize import quantize as quantizing
from thor_dflash.calib.quantize.plan import WorkUnit, make_plan
from thor_dflash.calib.quantize.staged_checkpoint import Row
from thor_dflash.calib.quantize.unit_processes import Advance, run_units
from thor_dflash.config.quantize import QuantizeConfig
from thor_dflash.core.errors import CheckpointError, EngineError
from thor_dflash.core.progress import ProgressTask, Silent
from thor_dflash.core.tensors import Array

UNITS = [WorkUnit(f"unit {i}", None, (), (), 10 * i) for i in range(6)]


def run(work: Callable[[WorkUnit, Advance], Row], count: int = 2) -> tuple[list[Row], int]:
    """The rows of UNITS, and the bytes of the progress."""
    rows: list[Row] = []
    shown = [0]
    task = ProgressTask(lambda done, _: shown.append(done))
    run_units(UNITS, count, lambda: None, work, task, rows.append)
    return rows, shown[-1]


def test_every_unit_is_run_in_another_process_and_reported() -> None:
    def work(unit: WorkUnit, advance: Advance) -> Row:
        advance.advance(unit.reads)
        return {"unit": unit.label, "process": os.getpid()}

    rows, moved = run(work)
    assert sorted(row["unit"] for row in rows) == [unit.label for unit in UNITS]
    assert os.getpid() not in {row["process"] for row in rows}
    assert moved == sum(unit.reads for unit in UNITS)
    assert not multiprocessing.active_children()


def test_an_error_stops_the_other_units(tmp_path: Path) -> None:
    def work(unit: WorkUnit, advance: Advance) -> Row:
        if unit.label == UNITS[-2].label:
            raise CheckpointError("x.weight must hold finite numbers (got nan)")
        while True:
            (tmp_path / "alive").touch()
            advance.advance(1)
            time.sleep(0.01)

    with pytest.raises(CheckpointError, match="finite numbers"):
        run(work)
    assert (tmp_path / "alive").exists()
    assert not multiprocessing.active_children()


def test_a_process_that_is_killed_is_an_error() -> None:
    def work(unit: WorkUnit, advance: Advance) -> Row:
        os.kill(os.getpid(), signal.SIGKILL)
        return {}

    with pytest.raises(EngineError, match="must not be killed"):
        run(work)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("source") / "bf16", GEOMETRIES["gqa2"], 3)


def quantized(source: Path, out: Path, processes: int) -> dict[str, bytes]:
    config = QuantizeConfig(method="rtn", threads=processes)
    plan = make_plan(checkpoint.read_source(source, None), config, from_quantised=False)
    checkpoint.write(plan, out, Silent())
    return {path.name: path.read_bytes() for path in out.iterdir()}


def test_any_number_of_processes_writes_the_same_bytes(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    want = quantized(source, tmp_path / "threads", 3)
    monkeypatch.setattr(quantizing, "SMALL", 0)
    monkeypatch.setattr(quantizing, "_in_threads", None)
    assert quantized(source, tmp_path / "processes", 3) == want


def test_an_infinite_weight_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantizing, "SMALL", 0)
    made = write_target(tmp_path / "bf16", GEOMETRIES["gqa2"], 3)

    def spoil(tensors: dict[str, Array]) -> None:
        [name] = [name for name in tensors if name.endswith("layers.1.mlp.up_proj.weight")]
        tensors[name] = tensors[name].copy()
        tensors[name][3, 5] = np.inf

    change_tensors(made, spoil)
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.up_proj\.weight"):
        quantized(made, tmp_path / "out", 3)
    assert [path.name for path in tmp_path.iterdir()] == ["bf16"]


def living(group: int) -> list[int]:
    """The processes of a group that are no zombies."""
    found: list[int] = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, own = stat.read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue
        if int(own) == group and state != "Z":
            found.append(int(stat.parent.name))
    return found


@pytest.mark.slow
def test_a_killed_run_leaves_no_process_and_continues_at_once(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "thor_dflash.cli.main"]
    shape = ["synth", "--shape", "qwen3.5-0.8b", "--layers", "4", "--out", str(tmp_path / "bf16")]
    subprocess.run([*command, *shape], check=True, capture_output=True)
    command += ["quantize", "--target", str(tmp_path / "bf16")]
    command += ["--set", "quantize.threads=3", "--out"]
    subprocess.run([*command, str(tmp_path / "whole")], check=True, capture_output=True)
    journal = tmp_path / ".out.partial" / "quantize.jsonl"
    one = subprocess.Popen(
        [*command, str(tmp_path / "out")], start_new_session=True, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    while one.poll() is None and not (journal.exists() and journal.read_text().count("\n") > 1):
        time.sleep(0.01)
    assert len(living(one.pid)) > 1
    one.kill()
    one.wait()
    end = time.monotonic() + 5
    while living(one.pid) and time.monotonic() < end:
        time.sleep(0.01)
    assert not living(one.pid)
    again = subprocess.run([*command, str(tmp_path / "out")], check=True, capture_output=True)
    assert b"checking the stopped run" in again.stderr
    for path in (tmp_path / "whole").iterdir():
        assert path.read_bytes() == (tmp_path / "out" / path.name).read_bytes(), path.name
