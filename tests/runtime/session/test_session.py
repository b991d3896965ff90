"""Admission, faults and telemetry of a session."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.loop_models import DEAD, answer, drafts, oracle, prompt, session

from thor_dflash.builders.build import build
from thor_dflash.config.build import BuildConfig
from thor_dflash.config.engine import EngineConfig
from thor_dflash.core.errors import ConfigError, EngineError, ModelFault, PackageError, RequestError
from thor_dflash.core.progress import Silent
from thor_dflash.core.tensors import DType, TensorSpec
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
        (Request(prompt=(1, -1), max_tokens=5), r"prompt\[1\] must be 0 to 511 \(got -1\)"),
        (Request(prompt=(1,), max_tokens=0), r"max_tokens must be >= 1 \(got 0\)"),
        (Request(prompt=(1,) * 490, max_tokens=7), r"<= 496 tokens.*\(got 490 \+ 7 = 497\)"),
        (Request(prompt=(1,), max_tokens=5, stop=frozenset(range(9))), r"at most 8 ids \(got 9\)"),
        (Request(prompt=(1,), max_tokens=5, stop=frozenset({5, 512})), r"ids 0 to 511 \(got 512\)"),
        (Request(prompt=(1,), max_tokens=5, stop=frozenset({-1})), r"stop must be ids .*got -1"),
    ],
)
def test_admission_refuses_before_anything_runs(request_: Request, message: str) -> None:
    s = session()
    for refused in (s.generate, s.admit):
        with pytest.raises(RequestError, match=message):
            refused(request_)


def test_every_place_for_a_stop_id_may_be_taken() -> None:
    s, request = session(), Request(prompt=prompt(40, 1), max_tokens=20)
    truth = answer(s, request, NoDrafter())
    unsaid = [t for t in range(240) if t not in truth][:7]
    last = max(truth)
    assert last > unsaid[-1], "in the last place"
    full = replace(request, stop=frozenset({*unsaid, last}))
    s.admit(full)
    assert answer(s, full, NoDrafter()) == truth[: truth.index(last)]


def test_a_package_without_a_drafter_says_so() -> None:
    s = session(drafter=False)
    with pytest.raises(RequestError, match=r"drafter must be none.*\(got dflash\)"):
        s.generate(Request(prompt=(1,), max_tokens=1))
    assert len(answer(s, Request(prompt=(1,), max_tokens=3), NoDrafter())) == 3


@pytest.mark.parametrize(("length", "tokens"), [(300, 84), (382, 2), (383, 1)])
def test_the_longest_admitted_request_fits(length: int, tokens: int) -> None:
    # The limit, 384 rows, is a whole number of cache tiles but not of chunks: the padding of the
    # last chunk ends past it, and rounding up to whole tiles would not hide that rows are missing.
    s = session(chunk=100, capacity=400)
    assert s.model.limit == 384
    request = Request(prompt=prompt(length, 1), max_tokens=tokens)
    truth = answer(s, request, NoDrafter())
    assert len(truth) == tokens
    assert answer(s, request, oracle([*truth, *[1] * 16])) == truth
    assert answer(s, request, DflashDrafter()) == truth


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


def test_no_report_before_a_request_ended() -> None:
    s = session(capacity=333)
    with pytest.raises(RequestError, match="report"):
        s.report()


def test_no_report_while_a_request_runs() -> None:
    s, request = session(), Request(prompt=prompt(20, 1), max_tokens=4)
    answer(s, request, NoDrafter())
    assert s.report().finish == "length"
    answers = s.run(request, NoDrafter())
    next(answers)
    with pytest.raises(RequestError, match="report"):
        s.report()
    answers.close()
    assert s.report().finish == "cancelled"


def test_prompt_progress_is_told() -> None:
    s = session()
    chunks = list(s.generate(Request(prompt=prompt(100, 1), max_tokens=2)))
    assert [c.prompt_done for c in chunks if not c.tokens and not c.finish] == [32, 64, 96, 99]


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


def test_more_threads_than_cores_are_refused_before_anything_is_read(tmp_path: Path) -> None:
    cores = os.cpu_count() or 1
    with pytest.raises(ConfigError, match=rf"engine.threads must be <= {cores}, .*{cores + 1}"):
        open_session(tmp_path / "none", EngineConfig(threads=cores + 1), Silent())


def test_a_damaged_graph_is_named(tmp_path: Path) -> None:
    path = package(tmp_path)
    (path / "verify.onnx").write_bytes(b"no")
    with pytest.raises(PackageError, match=r"verify\.onnx"):
        open_session(path, EngineConfig(), Silent())


def test_a_graph_that_does_not_load_is_an_engine_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = package(tmp_path)
    (path / "verify.onnx").write_bytes(b"no")
    monkeypatch.setattr(manifest, "checking", lambda *_: nullcontext())
    with pytest.raises(EngineError, match=r"verify\.onnx must load in ONNX Runtime"):
        open_session(path, EngineConfig(), Silent())


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


def test_drafts_of_minus_one_do_not_agree_with_rows_that_are_faults() -> None:
    """The choice after a row with NaN logits is -1. A draft of -1 must not count as agreeing with
    it: the fault that is reported is that of the first row.
    """
    s = session()
    answers = s.run(Request(prompt=prompt(20, 1), max_tokens=40), drafts(lambda n: [-1] * 15))
    next(answers)
    next(answers)
    at = s.model.state.length
    name = next(n for n in s.model.state.tensors if n.endswith(".state"))
    tensor = s.model.state.tensors[name]
    s.model.engine.write(tensor, np.full(tensor.spec.at({}), np.nan, np.float32))
    with pytest.raises(ModelFault, match=rf"logits after position {at} must be finite"):
        list(answers)


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


def test_what_does_not_fit_in_memory_says_so() -> None:
    engine = session().model.engine
    huge = TensorSpec("cache", DType.F32, (1 << 30, 1 << 20))
    with pytest.raises(EngineError, match=r"cache: .* must fit in memory .*engine.capacity"):
        engine.empty(huge, {})
