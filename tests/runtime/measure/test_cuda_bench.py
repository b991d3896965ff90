"""The bench without a device: that it runs, what it measures, and what it reports."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from stand_ins.fake_driver import MS, OK, fake
from support.tiny_bench import ARGUMENTS

from thor_dflash.builders import synthetic
from thor_dflash.cli import main
from thor_dflash.config.build import BuildConfig
from thor_dflash.config.engine import EngineConfig
from thor_dflash.core.progress import Silent
from thor_dflash.runtime.engines.cuda.binding import cuda
from thor_dflash.runtime.engines.cuda.engine import CudaEngine
from thor_dflash.runtime.measure import bench_report, cuda_bench
from thor_dflash.runtime.measure.random_weights import RandomWeights


# ---- through the verb ----------------------------------------------------------------------------
@pytest.mark.usefixtures("small_shape")
def test_one_command_measures_everything(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    device = fake(monkeypatch)
    assert main.main([*ARGUMENTS, "-s", f"engine.cubins={tmp_path}"]) == 0
    rows = json.loads(capsys.readouterr().out)
    named = {f"{row['section']}/{row['name']}": row for row in rows}
    assert {row["name"] for row in rows if row["must"] is not None} == bench_report.TARGETS.keys()
    assert named["figures/cycle at 2048"]["value"] == MS
    host = named["figures/host time of a cycle outside the graph"]["note"]
    assert f"{MS:.3f} ms in the graph" in host
    assert named["memory/graphs"]["value"] > 0
    cycle = int(named["figures/cycle at 2048"]["note"].split()[0])
    assert cycle in device.graphs
    ablations = {name: row for name, row in named.items() if name.startswith("ablations/")}
    left_out = ("no dependent launch", "no graph", "states instead of records")
    assert ablations.keys() == {
        f"ablations/{what}: {step}" for what in left_out for step in ("verify", "cycle")
    }


@contextmanager
def opened(folder: Path, widths: tuple[int, ...]) -> Iterator[cuda_bench.CudaBench]:
    """A bench of the small shape; its package is in `folder`."""
    made = synthetic.write_synthetic("small", folder, BuildConfig(engine="cuda"), widths)
    weights = RandomWeights(folder, folder)
    with closing(CudaEngine(folder, EngineConfig(), Silent(), weights)) as engine:
        yield cuda_bench.open_bench(engine, made, 4096, widths, folder)


@pytest.mark.usefixtures("small_shape")
def test_an_excerpt_runs_at_the_length_that_was_set(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    device = fake(monkeypatch)
    with opened(tmp_path, (1,)) as it:
        for length in (2048, 3000):
            device.sent.clear()
            it.at(length, 7)
            it.steps(["verify"])
            sent = {at + i: data[i : i + 4] for at, data in device.sent
                    for i in range(0, len(data), 4)}  # fmt: skip
            for name in ("verify", "verify.1"):
                inputs = it.call(name).inputs
                for port, value in (("length", length), ("accepted", 7)):
                    assert sent[cuda(inputs[port]).now] == value.to_bytes(4, "little"), port


@pytest.mark.usefixtures("small_shape")
def test_each_cycle_is_compared_with_its_own_graph(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    device = fake(monkeypatch)
    warm, cycles = [9.0] * cuda_bench.WARM, [2.0, 3.0, 50.0, 2.5, 3.0]
    ticks = itertools.accumulate([*warm, *cycles], initial=0.0)
    times: Iterator[float] = itertools.repeat(9.0)
    with opened(tmp_path, ()) as it:
        note = it.engine.note

        def noted() -> list[float]:
            nonlocal times
            times = iter([1.0, 2.0, 49.0, 1.5, 2.0])
            return note()

        monkeypatch.setattr(it.engine, "note", noted)
        monkeypatch.setattr(device, "cuEventElapsedTime", lambda *_: (OK, 1e3 * next(times)))
        monkeypatch.setattr(cuda_bench, "time", SimpleNamespace(perf_counter=ticks.__next__))
        found = it.loop(20, len(cycles))
    assert (found.host, found.mean) == (1.0, 1.0)


SHAPE = ["--shape", "qwen3.6-27b", "--random-weights", "--engine", "cuda"]


def test_a_missing_device_is_reported_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    if main.main(["bench", *SHAPE, "-s", "engine.device=99"]) != 2:
        raise AssertionError("there is no device 99")
    err = capsys.readouterr().err
    assert err.startswith("thor-dflash: ")
    assert err.count("\n") == 1
    assert "NVIDIA's driver" in err or "engine.device" in err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--shape", "huge", "--random-weights"], "--shape must be one of qwen3.6-27b"),
        (["--shape", "qwen3.6-27b"], "--shape must go with --random-weights"),
        (["--shape", "qwen3.6-27b", "--random-weights"], "--engine cuda (got ort)"),
        (["--package", "p"], "--package must go with --ready"),
        ([*SHAPE, "--ready"], "--out"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["bench", *options]) == 2
    assert words in capsys.readouterr().err
