"""The bench without a device: that it runs, what it measures, and what it reports."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from benching import ARGUMENTS
from fake_cuda import MS, OK, fake

from thor_dflash import cli
from thor_dflash.builders import hollow
from thor_dflash.config import BuildConfig, EngineConfig
from thor_dflash.plugins.cuda.enqueue import Arguments
from thor_dflash.plugins.launch import AHEAD
from thor_dflash.plugins.rules import ROOT
from thor_dflash.progress import Silent
from thor_dflash.runtime import coldstart
from thor_dflash.runtime.engines.cuda import bench, figures
from thor_dflash.runtime.engines.cuda.bench import Keep, Loop, Share, Timing, everything
from thor_dflash.runtime.engines.cuda.bound import Planned, cuda
from thor_dflash.runtime.engines.cuda.capture import Captured
from thor_dflash.runtime.engines.cuda.engine import CudaEngine
from thor_dflash.runtime.engines.cuda.figures import THOR_READ, Figure, Target, judge, table
from thor_dflash.runtime.engines.cuda.random import RandomWeights

READ = 3e12
STEP = SimpleNamespace


class Known:
    """A stand-in for a Bench with given times, step -> ms. Its model has three layers with 1 GB of
    weights each.
    """

    device = "a device"
    chunk = 512
    memory: Mapping[str, int] = {"weights": 3 * 10**9, "cache": 10**9}

    def __init__(self, ms: Mapping[str, float]) -> None:
        self.ms = ms
        self.length = 0
        self.measured = 0

    def bandwidth(self) -> float:
        return READ

    def captured(self) -> int:
        return 5 * 10**6

    def bytes(self, name: str, rooms_: Sequence[str]) -> int:
        return {"verify": 3 * 10**9, "propose": 10**8, "observe": 10**7}[name]

    def shares(self, name: str, rooms_: Sequence[str]) -> dict[str, Share]:
        return {"layers.*.down": Share(frozenset({"a", "b"}), 3 * 10**9)}

    def launches(self, names: Sequence[str]) -> int:
        return 100 * len(names)

    def cache_bytes(self) -> int:
        return 32768

    def state_bytes(self) -> int:
        return 3 * 10**8

    def steps(self, names: Sequence[str], keep: Keep = everything) -> Timing:
        key = "+".join(names)
        if keep is not everything:
            parts = [r for r in ("linear", "gdn") if keep(STEP(room=r, name="a"))]  # type: ignore[arg-type]
            key += f":{parts[0] if len(parts) == 1 else 'other'}"
        grown = 32768 * max(0, self.length - 2048) / READ * 1e3 * self.ms["growth"]
        self.measured += 1
        drifted = self.measured * self.ms.get("drift", 0.0)
        ms = self.ms.get(key, 1.0) + (grown + drifted if key == "verify" else 0)
        return Timing(ms, ms, ms, 1)

    def repeated(self, names: Sequence[str], seconds: float) -> Timing:
        return Timing(7.7, 7.5, 8.25, 600)

    def at(self, length: int, accepted: int) -> None:
        self.length = length

    def prefill(self, tokens: int) -> float:
        return self.ms["prefill"]

    def loop(self, prompt: int, cycles: int) -> Loop:
        return Loop(0.0100, 0.0098, 0.0002, 0.0004)


def measured(**ms: float) -> dict[str, Figure]:
    """The bench's figures, by section and name, for the usual times and those given."""
    times = {"verify:linear": 1.25, "verify:gdn": 0.3, "verify": 6.0, "growth": 1.12,
             "propose+verify+accept+observe": 7.5, "verify.1:linear": 1.25,
             "verify.32:linear": 1.5, "verify+accept": 6.06, "prefill": 0.5, **ms}  # fmt: skip
    rows = list(figures.figures(Known(times), Silent()))
    return {f"{row.section}/{row.name}": row for row in rows}


def test_figures_are_judged_by_their_required_values() -> None:
    rows = measured()
    want = {
        "linears of a verify, share of read rate": (80, "missed"),
        "the same linears at 1 row": (1.0, "aim"),
        "the same linears at 32 rows": (1.2, "missed"),
        "gdn of a verify": (0.3, "reached"),
        "verify at 2048": (6.0, "reached"),
        "cycle at 2048": (7.5, "missed"),
        "plain step": (1.01, "aim"),
        "growth from 2048 to 8192": (1.12, "reached"),
        "growth from 2048 to 32768": (1.12, "reached"),
        "prefill of 2048 tokens": (0.5, "missed"),
        "host time of a cycle outside the graph": (2.0, "reached"),
    }
    assert want.keys() == figures.TARGETS.keys()
    for name, (value, verdict) in want.items():
        row = rows[f"figures/{name}"]
        assert row.value == pytest.approx(value), name
        assert row.verdict == verdict, name


def test_a_cycle_is_also_reported_without_rest() -> None:
    row = measured()["without rest/cycle at 2048"]
    assert (row.value, row.must) == (7.7, None)
    assert row.note == "7.500 to 8.250 ms, medians of 30 in 5 s"


def test_growth_is_of_neighbours_while_clocks_drift() -> None:
    """Each measurement of a verify takes 0.1 ms more than the one before, which is more than 6,144
    tokens of context cost.
    """
    rows = measured(drift=0.1)
    for length in figures.LONG:
        assert rows[f"figures/growth from 2048 to {length}"].value == pytest.approx(1.12)


@pytest.mark.parametrize(
    ("value", "verdict"), [(84.9, "missed"), (85, "reached"), (91.9, "reached"), (92, "aim")]
)
def test_a_target_may_be_a_least_value(value: float, verdict: str) -> None:
    assert judge(Figure("", "", value, "%"), Target(85, 92, at_least=True)).verdict == verdict


def test_the_prediction_is_the_same_bytes_at_the_same_share_of_the_read_rate() -> None:
    rows = measured()
    for name, ms in (("linears of a verify", 1.25), ("gdn of a verify", 0.3), ("propose", 1.0)):
        row = rows[f"predicted on a Jetson Thor/{name}"]
        assert row.value == pytest.approx(ms * READ / THOR_READ), name
    assert "80.0% of read rate" in rows["predicted on a Jetson Thor/linears of a verify"].note


def test_memory_is_reported_by_kind_and_in_total_with_the_graphs() -> None:
    rows = measured()
    assert rows["memory/graphs"].value == 5
    assert rows["memory/together"].value == 4005


def test_the_table_is_aligned_and_has_every_figure() -> None:
    rows = list(measured().values())
    lines = table(rows).splitlines()
    point = 2 + max(len(row.name) for row in rows) + len("123456")
    for row in rows:
        [line] = [x for x in lines if x.startswith(f"  {row.name} ") and row.note in x]
        assert f"{row.value:.3f} {row.unit}" in line
        assert line[point] == ".", line


# ---- through the verb ----------------------------------------------------------------------------
@pytest.mark.usefixtures("small_shape")
def test_one_command_measures_everything(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    device = fake(monkeypatch)
    assert cli.main([*ARGUMENTS, "-s", f"engine.cubins={tmp_path}"]) == 0
    rows = json.loads(capsys.readouterr().out)
    named = {f"{row['section']}/{row['name']}": row for row in rows}
    assert {row["name"] for row in rows if row["must"] is not None} == figures.TARGETS.keys()
    assert named["figures/cycle at 2048"]["value"] == MS
    host = named["figures/host time of a cycle outside the graph"]["note"]
    assert f"{MS:.3f} ms in the graph" in host
    assert named["memory/graphs"]["value"] > 0
    cycle = int(named["figures/cycle at 2048"]["note"].split()[0])
    assert cycle in device.graphs
    ablations = {name: row for name, row in named.items() if name.startswith("ablations/")}
    left_out = ("no dependent launch", "no graph", "states instead of records", "no fusion")
    assert ablations.keys() == {
        f"ablations/{what}: {step}" for what in left_out for step in ("verify", "cycle")
    }
    apart = int(ablations["ablations/no fusion: cycle"]["note"].split()[1])
    assert apart > 1.5 * cycle


@contextmanager
def opened(folder: Path, widths: tuple[int, ...]) -> Iterator[bench.Bench]:
    """A bench of the small shape; its package is in `folder`."""
    made = hollow.write_hollow("small", folder, BuildConfig(engine="cuda"), widths)
    weights = RandomWeights(folder, folder)
    with closing(CudaEngine(folder, EngineConfig(), Silent(), weights)) as engine:
        yield bench.open_bench(engine, made, 4096, widths, folder)


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
def test_a_weight_that_is_fetched_ahead_is_counted_where_it_is_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake(monkeypatch)
    with opened(tmp_path, ()) as it:
        program = it.engine.program("verify")
        for kind, share in it.shares("verify", figures.LINEARS).items():
            read = {s.ports["packed"] for s in program.steps if s.name in share.names}
            own = sum(program.weights[name].nbytes for name in read)
            assert own <= share.nbytes < 1.5 * own, kind


@pytest.mark.usefixtures("small_shape")
def test_an_excerpt_prefetches_no_weight_for_a_step_left_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake(monkeypatch)
    with opened(tmp_path, ()) as it:
        engine, call = it.engine, it.call("verify")

        def fetching(*kept: str) -> set[str]:
            """Rooms whose launches get the address of a weight to prefetch."""
            found: set[str] = set()

            def capture(name: str, calls: Sequence[Sequence[tuple[Planned, Arguments]]], *,
                        graph: bool) -> Captured:  # fmt: skip
                for planned, arguments in itertools.chain.from_iterable(calls):
                    at = engine.place(call, planned.step, AHEAD)
                    if at and ("address", at) in arguments:
                        found.add(planned.step.room)
                return Captured(name, engine.driver, lambda: None)

            monkeypatch.setattr(engine._launcher, "capture", capture)
            engine.excerpt([call], bench.rooms(*kept))
            return found

        assert fetching("gdn", "verify_attention") == set()
        assert fetching("gdn", "linear") == {"gdn", "linear"}
        assert fetching("linear") == {"linear"}


@pytest.mark.usefixtures("small_shape")
def test_the_bench_rests_before_timing_a_step_but_not_between_repetitions(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake(monkeypatch)
    slept: list[float] = []
    ticks = iter([0.0, 1.0, 2.0, 3.0])
    with opened(tmp_path, ()) as it:
        monkeypatch.setattr(
            bench, "time", SimpleNamespace(sleep=slept.append, perf_counter=ticks.__next__)
        )
        monkeypatch.setattr(bench, "REST", 0.25)
        assert it.steps(["verify"]).runs == bench.RUNS
        assert slept == [0.25]
        assert it.repeated(["verify"], 2.5).runs == 3 * bench.BATCH
        assert slept == [0.25]


@pytest.mark.usefixtures("small_shape")
def test_one_slow_cycle_does_not_change_the_hosts_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake(monkeypatch)
    warm, cycles = [9.0] * bench.WARM, [2.0, 3.0, 50.0, 2.0, 3.0]
    ticks = itertools.accumulate([*warm, *cycles], initial=0.0)
    with opened(tmp_path, ()) as it:
        monkeypatch.setattr(bench, "time", SimpleNamespace(perf_counter=ticks.__next__))
        found = it.loop(20, len(cycles))
    assert (found.clock, found.graph) == (3.0, MS / 1e3)
    assert found.host == pytest.approx(3.0 - MS / 1e3)
    assert found.mean == pytest.approx(12.0 - MS / 1e3)


@pytest.mark.usefixtures("small_shape")
def test_each_cycle_is_compared_with_its_own_graph(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    device = fake(monkeypatch)
    warm, cycles = [9.0] * bench.WARM, [2.0, 3.0, 50.0, 2.5, 3.0]
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
        monkeypatch.setattr(bench, "time", SimpleNamespace(perf_counter=ticks.__next__))
        found = it.loop(20, len(cycles))
    assert (found.host, found.mean) == (1.0, 1.0)


def test_a_missing_device_is_reported_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["bench", "--shape", "qwen3.6-27b", "--random-weights", "--engine", "cuda"]
    if cli.main([*arguments, "-s", "engine.device=99"]) != 2:
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
        (["--shape", "qwen3.6-27b", "--random-weights", "--engine", "cuda", "--ready"], "--out"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", *options]) == 2
    assert words in capsys.readouterr().err


SLEEPER = """
import time
from thor_dflash.runtime import coldstart
time.sleep(0.3)
print(coldstart.since_start())
"""


def test_the_time_since_a_process_began() -> None:
    began = time.monotonic()
    told = subprocess.run(
        [sys.executable, "-c", SLEEPER], check=True, capture_output=True, text=True, timeout=60
    )
    took = time.monotonic() - began
    assert 0.3 <= float(told.stdout) <= took + 0.02  # the kernel counts in ticks of 10 ms


def test_every_byte_is_read_once(tmp_path: Path) -> None:
    sizes = (0, 5, coldstart.PIECE, coldstart.PIECE + 1)
    files = [tmp_path / str(size) for size in sizes]
    for path, size in zip(files, sizes, strict=True):
        path.write_bytes(b"x" * size)
    seen: list[int] = []
    coldstart.forget(files)
    assert coldstart.read_seconds(files, seen.append) > 0
    assert sum(seen) == sum(sizes)


def test_the_kernel_that_measures_bandwidth_exists() -> None:
    assert (ROOT / "cuda" / "bandwidth.cu").exists()
