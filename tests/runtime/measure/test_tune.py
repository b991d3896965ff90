"""Tuning on a driver without a device: what is measured, kept, used and refused."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
from stand_ins.fake_driver import OK, FakeCuda, fake
from support.doctor_machines import H100, H100_GPU, THOR
from support.planner_nano import package

from thor_dflash.cli import main
from thor_dflash.cli.commands import serve
from thor_dflash.config.engine import EngineConfig
from thor_dflash.core.errors import ConfigError, EngineError, PackageError
from thor_dflash.core.progress import Lines, ProgressTask, Silent
from thor_dflash.core.strict_records import encode
from thor_dflash.package import manifest
from thor_dflash.plugins.cuda.driver import Driver
from thor_dflash.runtime.doctor import package as doctor
from thor_dflash.runtime.doctor.facts import Cuda
from thor_dflash.runtime.engines.cuda import engine as engines
from thor_dflash.runtime.engines.cuda import tuning_record
from thor_dflash.runtime.engines.cuda.engine import CudaEngine, LaunchTrial
from thor_dflash.runtime.engines.cuda.tuning_record import TuningFile, tuning_file
from thor_dflash.runtime.measure import tune as tuning
from thor_dflash.runtime.measure.chain_timer import ChainTimer, TunableLaunch
from thor_dflash.runtime.measure.launch_search import Times
from thor_dflash.runtime.measure.tune import Tuning, needed, tune_package
from thor_dflash.runtime.session import Session, open_session
from thor_dflash.runtime.session.prefix_file import StoredPrefix, read_prefix, write_prefix


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return package(tmp_path_factory.mktemp("tune") / "nano", engine="cuda")


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    monkeypatch.setattr(tuning, "WARM_S", 0.0)
    return fake(monkeypatch)


@pytest.fixture
def config(tmp_path: Path) -> EngineConfig:
    return EngineConfig(tunings=str(tmp_path / "tunings"))


@pytest.fixture(scope="module")
def records(made: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tuning]:
    """Two records of the package: "slow", of slow rules, and "tie", with the rules' choices."""
    with pytest.MonkeyPatch.context() as patch:
        fake(patch)
        patch.setattr(tuning, "WARM_S", 0.0)
        slow_rules(patch)
        config = EngineConfig(tunings=str(tmp_path_factory.mktemp("records")))
        slow = tune_package(made, config, Silent())
    rules = {key: replace(one, chosen=0) for key, one in slow.record.launches.items()}
    return {"slow": slow, "tie": replace(slow, record=replace(slow.record, launches=rules))}


def put(one: Tuning, config: EngineConfig, power: str = "default") -> Path:
    """Put a record where the engine looks for it."""
    config.tunings_directory.mkdir()
    name = one.path.name.replace("default", power.lower())
    record = replace(one.record, power="" if power == "default" else power).sealed()
    (config.tunings_directory / name).write_text(json.dumps(encode(record)))
    return config.tunings_directory / name


@contextmanager
def opened(made: Path, config: EngineConfig) -> Iterator[Session]:
    with closing(open_session(made, config, Silent())) as session:
        yield session


def slow_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule's linears take 100 us, their other choices 1 us less each."""
    known: dict[int, int] = {}
    trials = ChainTimer.trials

    def numbered(self: ChainTimer, one: TunableLaunch, *rest: object) -> list[LaunchTrial]:
        found = trials(self, one, *rest)  # type: ignore[arg-type]
        for i, trial in enumerate(found):
            known[trial.memory] = i if one.site.op.name == "linear" else 0
        return found

    def sample(self: ChainTimer, one: object, trial: LaunchTrial, at: object) -> Times:
        return (100.0 - known[trial.memory],)

    monkeypatch.setattr(ChainTimer, "trials", numbered)
    monkeypatch.setattr(ChainTimer, "sample", sample)


def cuts(session: Session) -> list[tuple[int, tuple[int, int, int]]]:
    """Cluster size and grid of every launch of a verify."""
    engine = session.model.engine
    assert isinstance(engine, CudaEngine)
    bound = engine.replay.bound[session.model.call("verify")]
    return [(one.launch.cluster, one.launch.grid) for one in bound.launches]


def test_a_tie_keeps_the_rules_and_their_bits(
    made: Path, device: FakeCuda, config: EngineConfig, records: dict[str, Tuning]
) -> None:
    assert needed(made, config)
    done = records["tie"]
    assert len(done.measured) > 8
    assert not done.record.choices()
    put(done, config)
    assert not needed(made, config)
    with opened(made, replace(config, tune="required")) as session:
        assert "tuned" not in session.model.engine.device


def test_what_is_faster_is_used_and_named(
    made: Path, device: FakeCuda, config: EngineConfig, records: dict[str, Tuning], tmp_path: Path
) -> None:
    assert records["slow"].record.choices()
    put(records["slow"], config)
    with opened(made, config) as tuned, opened(made, replace(config, tune="off")) as rules:
        assert cuts(tuned) != cuts(rules)
        assert tuned.model.engine.device.startswith(f"{rules.model.engine.device}, tuned ")
        path, stored = tmp_path / "prefix", StoredPrefix("p", (1, 2, 3), False, 0)
        write_prefix(path, tuned.model, stored, tuned.model.state.snapshot())
        assert read_prefix(path, tuned.model, 1 << 30)[0] == stored
        with pytest.raises(PackageError, match=r"device .*\(got .*tuned .*put the prefix again"):
            read_prefix(path, rules.model, 1 << 30)


def test_a_record_of_another_power_mode_is_used_with_a_warning(
    made: Path,
    device: FakeCuda,
    config: EngineConfig,
    records: dict[str, Tuning],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    put(records["slow"], config, "MAXN")
    monkeypatch.setattr(engines, "power_mode", lambda: "70W")
    out = io.StringIO()
    with closing(open_session(made, config, Lines(out))) as session:
        assert "tuned" in session.model.engine.device
    assert "MAXN" in out.getvalue()
    assert "70W" in out.getvalue()


@pytest.mark.parametrize("damage", ["device", "kernels", "driver", "format", "JSON", "text"])
def test_a_record_that_is_not_of_this_device_is_refused(
    damage: str, device: FakeCuda, config: EngineConfig, records: dict[str, Tuning]
) -> None:
    path = put(records["tie"], config)
    record = json.loads(path.read_text())
    if damage in record:
        record[damage] = 7 if isinstance(record[damage], int) else "other"
    path.write_text({"JSON": "{", "text": "[]"}.get(damage) or json.dumps(record))
    match = damage if damage in record else "JSON"
    with closing(Driver()) as driver, pytest.raises(EngineError, match=f"{match}.*delete the file"):
        tuning_file(config.tunings_directory, driver.info, "").read()


@pytest.mark.parametrize("edit", [{"parts": 10**9}, {"parts": 0}, {"clusters": -1}, {"other": 1}])
def test_choices_that_were_edited_are_refused(
    edit: dict[str, int], device: FakeCuda, config: EngineConfig, records: dict[str, Tuning]
) -> None:
    path = put(records["slow"], config)
    record = json.loads(path.read_text())
    launch = next(x for x in record["launches"].values() if "down_proj" in x["name"])
    launch["candidates"][launch["chosen"]]["choice"].update(edit)
    path.write_text(json.dumps(record))
    # No engine is opened: one that took the choice would cut a launch into 10**9 parts.
    with closing(Driver()) as driver, pytest.raises(EngineError, match="sha256"):
        tuning_file(config.tunings_directory, driver.info, "").read()


def test_another_device_has_another_record(
    made: Path, device: FakeCuda, config: EngineConfig, records: dict[str, Tuning]
) -> None:
    put(records["tie"], config)
    device.__dict__["cuDriverGetVersion"] = lambda: (OK, 13010)
    assert needed(made, config)
    required = replace(config, tune="required")
    with pytest.raises(EngineError, match="tune --package"), opened(made, required):
        pass


def test_a_budget_leaves_launches_for_the_next_time(
    made: Path, device: FakeCuda, config: EngineConfig, records: dict[str, Tuning]
) -> None:
    kept = dict(device._sizes)
    first = tune_package(made, config, Silent(), 0.0)
    assert len(first.measured) == 1
    assert first.left == len(records["tie"].measured) - 1
    assert needed(made, config)
    assert device._sizes == kept, "no memory is left"


def test_what_ends_the_process_loses_nothing(
    made: Path, device: FakeCuda, config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    trials, calls = ChainTimer.trials, list[object]()

    def ended(self: ChainTimer, *args: object) -> list[LaunchTrial]:
        calls.append(args)
        if len(calls) == 3:
            monkeypatch.setattr(TuningFile, "write", lambda self, record: None)  # as after a kill
            raise SystemExit
        return trials(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(ChainTimer, "trials", ended)
    with pytest.raises(SystemExit):
        tune_package(made, config, Silent())
    with closing(Driver()) as driver:
        record = tuning_file(config.tunings_directory, driver.info, "").read()
    assert record is not None
    assert len(record.launches) == 2
    assert not record.packages


def test_measuring_again_keeps_what_it_does_not_measure(
    made: Path, device: FakeCuda, config: EngineConfig, records: dict[str, Tuning]
) -> None:
    put(records["slow"], config)
    done = tune_package(made, config, Silent(), 0.0, again=True)
    [measured] = done.measured
    old, new = records["slow"].record, done.record
    assert new.launches.keys() == old.launches.keys()
    assert {key for key in old.launches if new.launches[key] != old.launches[key]} == {measured}
    assert not needed(made, config)


def test_processes_measure_one_after_the_other(device: FakeCuda, config: EngineConfig) -> None:
    with closing(Driver()) as driver:
        file = tuning_file(config.tunings_directory, driver.info, "")
    waits, ended = threading.Event(), threading.Event()

    class Waiting(Silent):
        def task(self, *args: object) -> ProgressTask:
            waits.set()
            return ProgressTask(lambda done, state: None)

    def second() -> None:
        with file.alone(Waiting()):
            ended.set()

    with file.alone(Silent()):
        thread = threading.Thread(target=second)
        thread.start()
        assert waits.wait(60)
        assert not ended.is_set()
    thread.join(60)
    assert ended.is_set()


def test_a_process_that_never_ends_is_not_waited_for(
    device: FakeCuda, config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning_record, "WAIT_S", 0.0)
    with closing(Driver()) as driver:
        file = tuning_file(config.tunings_directory, driver.info, "")
    with file.alone(Silent()), pytest.raises(EngineError, match="free to tune"):
        file.alone(Silent()).__enter__()
    with file.alone(Silent()):
        pass


def test_the_command_prints_what_it_chose(
    made: Path,
    device: FakeCuda,
    config: EngineConfig,
    records: dict[str, Tuning],
    capsys: pytest.CaptureFixture[str],
) -> None:
    put(records["slow"], config)
    command = ["tune", "--package", str(made), "--set", f"engine.tunings={config.tunings}"]
    assert main.main([*command, "--explain"]) == 0
    out = capsys.readouterr().out
    assert "verify: layers.*.mlp.down_proj" in out
    assert main.main([*command, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["format"] == tuning_record.FORMAT
    assert main.main([*command, "--set", "engine.tune=off"]) == 2


def test_a_package_of_another_engine_is_refused(
    made: Path, config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = replace(manifest.read(made), engine="ort")
    monkeypatch.setattr(manifest, "read", lambda path: found)
    with pytest.raises(ConfigError, match="engine cuda"):
        tune_package(made, config, Silent())


@pytest.mark.parametrize("directory", ["file/in", "/proc/self"])
def test_a_directory_that_cannot_keep_a_record_is_refused_before_anything_is_compiled(
    directory: str, made: Path, device: FakeCuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No directory can be made below a file, and not even root can make a file in /proc."""
    monkeypatch.delattr(tuning, "_compiled")
    (tmp_path / "file").touch()
    with pytest.raises(EngineError, match="engine.tunings must be a directory"):
        tune_package(made, EngineConfig(tunings=str(tmp_path / directory)), Silent())


def test_a_directory_that_cannot_be_searched_is_refused(made: Path, device: FakeCuda) -> None:
    with pytest.raises(EngineError, match="engine.tunings must be a directory"):
        needed(made, EngineConfig(tunings="/tmp/" + "x" * 300))


@pytest.mark.parametrize("tune", ["auto", "required", "off"])
def test_a_doctor_offers_what_is_missing(
    tune: Literal["auto", "off", "required"],
    made: Path,
    device: FakeCuda,
    config: EngineConfig,
    records: dict[str, Tuning],
) -> None:
    with closing(Driver()) as driver:
        info = driver.info
    gpu = replace(H100_GPU, name=info.name, multiprocessors=info.device.multiprocessors)
    cuda = Cuda(driver=info.driver, devices=(gpu,))
    config = replace(config, tune=tune)
    [found] = doctor.tuning(H100, made, cuda, manifest.read(made), config)
    assert found.state == {"auto": "warn", "required": "wrong", "off": "ok"}[tune]
    assert found.remedy == ("" if tune == "off" else f"thor-dflash tune --package {made}")
    put(records["slow"], config)
    [found] = doctor.tuning(H100, made, cuda, manifest.read(made), config)
    assert found.state == "ok"
    [other] = doctor.tuning(THOR, made, cuda, manifest.read(made), config)
    assert other.state == ("ok" if tune == "off" else "warn"), "in power mode MAXN"


def test_a_server_measures_what_is_missing_once_and_in_another_process(
    made: Path, device: FakeCuda, config: EngineConfig, records: dict[str, Tuning]
) -> None:
    lines: list[str] = []
    for how in ("off", "required"):
        serve._tune(made, replace(config, tune=how), lines.append)  # type: ignore[arg-type]
    assert not lines
    with pytest.MonkeyPatch.context() as patch:
        given = "import sys; print(*sys.argv[1:]); sys.exit(3)"
        patch.setattr(serve, "TUNE", given)
        serve._tune(made, config, lines.append)
    assert lines[1] == f'tune: tune --package {made} --set engine.tunings="{config.tunings}"'
    assert lines[2].startswith("tuning failed with status 3")
    put(records["slow"], config)
    serve._tune(made, config, lines.append)
    assert len(lines) == 3


@pytest.mark.parametrize(("stdin", "status"), [(subprocess.PIPE, 2), (subprocess.DEVNULL, 1)])
def test_the_process_that_measures_ends_with_its_server(stdin: int, status: int) -> None:
    command = [sys.executable, "-c", serve.TUNE, "tune", "--package", "nothing/there"]
    with subprocess.Popen(command, stdin=stdin, stderr=subprocess.DEVNULL) as child:
        assert child.wait(60) == status
