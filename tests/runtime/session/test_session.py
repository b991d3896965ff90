"""Admission, faults and telemetry of a session."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.loop_models import DEAD, answer, oracle, prompt, session

from thor_dflash.builders.build import build
from thor_dflash.config.build import BuildConfig
from thor_dflash.config.engine import EngineConfig
from thor_dflash.core.errors import ConfigError, ModelFault, PackageError, RequestError
from thor_dflash.core.progress import ProgressTask, Silent
from thor_dflash.package import manifest
from thor_dflash.plugins.accept import Record
from thor_dflash.runtime.decoding.proposers import DflashDrafter, NoDrafter
from thor_dflash.runtime.engines.ort import OrtEngine
from thor_dflash.runtime.engines.protocol import Graph
from thor_dflash.runtime.session import Request, open_session


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request(prompt=(), max_tokens=5), r"prompt must have at least one token"),
        (Request(prompt=(1, 512), max_tokens=5), r"prompt\[1\] must be 0 to 511 \(got 512\)"),
        (Request(prompt=(1,) * 490, max_tokens=7), r"<= 496 tokens.*\(got 490 \+ 7 = 497\)"),
        (Request(prompt=(1,), max_tokens=5, stop=frozenset(range(9))), r"at most 8 ids \(got 9\)"),
    ],
)
def test_admission_refuses_before_anything_runs(request_: Request, message: str) -> None:
    s = session()
    for refused in (s.generate, s.admit):
        with pytest.raises(RequestError, match=message):
            refused(request_)


def test_nan_ends_the_request_with_an_error_and_is_not_clamped() -> None:
    s = session()
    answers = s.run(Request(prompt=prompt(20, 1), max_tokens=40), DEAD)
    shown = [t for _ in range(4) for t in next(answers).tokens]
    name = next(n for n in s.model.state.tensors if n.endswith(".state"))
    tensor = s.model.state.tensors[name]
    s.model.engine.write(tensor, np.full(tensor.spec.at({}), np.nan, np.float32))
    with pytest.raises(ModelFault, match="logits after position .* must be finite"):
        list(answers)
    assert len(shown) >= 3
    assert s.report().finish == "error"


def test_nothing_past_max_tokens_is_committed() -> None:
    """Not even where the drafts of the last block are right for longer."""
    s, asked = session(), Request(prompt=prompt(40, 1), max_tokens=40)
    truth = answer(s, asked, NoDrafter())
    for most in (1, 2, 15, 16, 17, 24):
        assert answer(s, replace(asked, max_tokens=most), oracle(truth)) == truth[:most]
        assert s.model.state.length == len(asked.prompt) - 1 + most
        assert s.report().completion_tokens == most


def test_report_counts_what_happened() -> None:
    s = session()
    request = Request(prompt=prompt(40, 1), max_tokens=50)
    truth = answer(s, request, NoDrafter())
    plain = s.report().spec
    assert (plain.cycles, plain.drafted, plain.accepted) == (50, 0, 0)
    answer(s, request, DflashDrafter())
    spec, times = s.report().spec, s.report().timings
    assert sum((i + 1) * n for i, n in enumerate(spec.accept_hist)) == len(truth)
    assert sum(spec.accept_hist) == spec.cycles
    assert spec.drafted == 15 * spec.cycles
    assert spec.accepted == sum(spec.accepted_per_position) == len(truth) - spec.cycles
    assert spec.accept_len == len(truth) / spec.cycles
    assert 0 < times.prefill_ms < times.ttft_ms <= times.e2e_ms
    assert {"verify", "accept", "propose", "observe", "host"} <= set(s.report().phases_ms)


def package(tmp_path: Path) -> Path:
    from support.checkpoints import GEOMETRIES, write_target

    write_target(tmp_path / "t", GEOMETRIES["27b"], 1)
    build(tmp_path / "t", None, tmp_path / "p", BuildConfig(capacity=128), Silent())
    return tmp_path / "p"


@pytest.mark.parametrize("capacity", [1, 17, 10**6])
def test_capacity_must_fit_the_model(tmp_path: Path, capacity: int) -> None:
    with pytest.raises(
        ConfigError, match=rf"engine.capacity must be 18 to \d+.*\(got {capacity}\)"
    ):
        open_session(package(tmp_path), EngineConfig(capacity=capacity), Silent())


def test_a_damaged_weight_is_found_when_all_is_loaded_and_the_engine_is_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = package(tmp_path)
    weights = path / "weights" / "layer.01.bin"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    closed: list[object] = []
    monkeypatch.setattr(OrtEngine, "close", lambda engine: closed.append(engine))
    with pytest.raises(PackageError, match=r"\(got weights/layer.01.bin altered\); build it again"):
        open_session(path, EngineConfig(), Silent())
    assert len(closed) == 1
    # A bad option is refused before there is an engine that would have to be closed.
    with pytest.raises(ConfigError, match=r"engine.chunk must be"):
        open_session(path, EngineConfig(chunk=7), Silent())
    assert len(closed) == 1


def test_each_graph_that_is_loaded_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """ONNX Runtime takes up to a minute for those of a large model."""
    events: list[str] = []

    class Recorder(Silent):
        def task(self, label: str, total: int | None = None, unit: str = "") -> ProgressTask:
            shown = f"of {total} {unit}" if label == "loading graphs" else label
            return ProgressTask(lambda done, state: events.append(f"{state} {done} {shown}"))

    loaded = session().model.engine
    assert isinstance(loaded, OrtEngine)
    monkeypatch.setattr(OrtEngine, "load", lambda _, name: events.append(name) or load(name))
    load = loaded._graphs.__getitem__
    names = list(open_session(loaded.package, EngineConfig(), Recorder()).model.graphs)
    begin = events.index(names[0])
    of = f"of {len(names)} graphs"
    reports = [(name, f"running {i} {of}") for i, name in enumerate(names, 1)]
    assert events[begin : begin + 2 * len(names) + 1] == [
        *(event for pair in reports for event in pair), f"done {len(names)} {of}"
    ]  # fmt: skip


def test_a_package_that_is_replaced_while_it_is_loaded_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its new weights are hashed by nobody if those of the old package were hashed before."""
    from support.checkpoints import GEOMETRIES, write_target

    path, load, hash_file = package(tmp_path), OrtEngine.load, manifest.hash_file
    files, hashed = len(manifest.read(path).files), list[Path]()
    write_target(tmp_path / "t2", GEOMETRIES["27b"], 2)
    build(tmp_path / "t2", None, tmp_path / "p2", BuildConfig(capacity=128), Silent())

    def noted(file: Path, advance: Callable[[int], None]) -> manifest.FileEntry:
        entry = hash_file(file, advance)
        hashed.append(file)
        return entry

    def late(engine: OrtEngine, name: str) -> Graph:
        if (tmp_path / "p2").exists():
            while len(hashed) < files:
                time.sleep(0.01)
            path.rename(tmp_path / "old")
            (tmp_path / "p2").rename(path)
        return load(engine, name)

    closed: list[object] = []
    monkeypatch.setattr(manifest, "hash_file", noted)
    monkeypatch.setattr(OrtEngine, "load", late)
    monkeypatch.setattr(OrtEngine, "close", lambda engine: closed.append(engine))
    with pytest.raises(PackageError, match=r"must stay as it is .*\(got another package\)"):
        open_session(path, EngineConfig(), Silent())
    assert len(closed) == 1


@pytest.mark.parametrize("first", [512, 10**6, -1])
def test_a_token_outside_the_vocabulary_is_a_fault(
    first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    s = session()
    step = type(s.model).step

    def wrong(*a: object, **k: object) -> Record:
        record = step(*a, **k)  # type: ignore[arg-type]
        return replace(record, tokens=(first, *record.tokens[1:]))

    monkeypatch.setattr(type(s.model), "step", wrong)
    with pytest.raises(ModelFault, match=rf"must be ids below 512 \(got {first}\)"):
        list(s.run(Request(prompt=prompt(20, 1), max_tokens=4), DEAD))
