"""What a build with TensorRT refuses, and that nothing is left behind when it does."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import Self

import pytest
import trt_recorder as recorder
from trt_builds import NANO, maker, options, record, record_hybrid, recording

from thor_dflash.builders import build as builds
from thor_dflash.builders.build import build
from thor_dflash.builders.tensorrt.deploy import deploy
from thor_dflash.builders.tensorrt.package import LOG
from thor_dflash.errors import ConfigError, EngineError, PackageError
from thor_dflash.program import Program, Step, Value
from thor_dflash.progress import Silent


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("build", r"prefill must build \(got: no tactic for a layer\)"),
        ("reformat", "1 copies into another format: Reformatting CopyNode for x"),
        ("type", "tokens of type "),
        ("layers", "plugins of .* nodes"),
        ("fp4", "none of 16 linears multiplied in FP4"),
        ("empty", "prefill.plan must load again"),
        ("shape", "TensorRT must make of the graph what it says"),
        ("extra", "layers that no node asked for: Cast.x"),
        ("profile", "TensorRT must take profile 0"),
    ],
)
def test_an_engine_that_is_not_what_was_meant_is_refused(
    tmp_path: Path, fault: str, words: str
) -> None:
    with pytest.raises(EngineError, match=words):
        record_hybrid(tmp_path, "modelopt", fault)
    assert not (tmp_path / "package").exists()
    assert not list(tmp_path.glob(".package*"))


def test_what_the_inspector_finds_can_be_noted_instead(tmp_path: Path) -> None:
    made = record_hybrid(tmp_path, "modelopt", "reformat", inspect="note")
    lines = (made.out / LOG).read_text().splitlines()
    assert lines[:2] == ["== prefill", "INSPECTED: 1 copies into another format: "
                         "Reformatting CopyNode for x"]  # fmt: skip


def test_a_plugin_that_is_missing_ends_the_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = recorder.IPluginRegistry.get_creator
    monkeypatch.setattr(
        recorder.IPluginRegistry,
        "get_creator",
        lambda self, kind, *rest: None if kind == "ThorGdn" else real(self, kind, *rest),
    )
    with pytest.raises(EngineError, match=r"TensorRT takes \(got: Plugin not found: ThorGdn 1"):
        record_hybrid(tmp_path, "bf16")
    assert not (tmp_path / "package").exists()


def test_a_prefill_in_fp4_needs_scales_for_its_rows(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="without an input_scale"):
        record(tmp_path / "p", NANO / "target", None, options(tmp_path, prefill_linears="tensorrt"))
    with pytest.raises(ConfigError, match="no NVFP4 weight"):
        record_hybrid(tmp_path, "bf16", prefill_linears="tensorrt")


def test_a_machine_without_tensorrt_is_told_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [n for n in sys.modules if n.startswith("thor_dflash.builders.tensorrt.engine")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    with pytest.raises(EngineError, match="must have TensorRT's Python package"):
        build(NANO / "target", None, tmp_path / "p", options(tmp_path), Silent())
    assert not list(tmp_path.iterdir())


def test_an_old_tensorrt_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "__version__", "10.12.0.36")
    with pytest.raises(EngineError, match=r"TensorRT 10.13 or later \(got 10.12.0.36\)"):
        record_hybrid(tmp_path, "bf16")


class _Stop(Silent):
    """A Ctrl-C while TensorRT builds, in one of its callbacks."""

    def __init__(self, at: str) -> None:
        self.at = at

    def _reach(self, at: str) -> None:
        if at == self.at and self.label.endswith("Timing"):
            self.at = ""  # once
            raise KeyboardInterrupt

    def task(self, label: str, total: int | None = None, unit: str = "") -> _Stop:  # type: ignore[override]
        self.label = label
        self._reach("start")
        return self

    def advance(self, n: int) -> None:
        self._reach("step")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._reach("finish")


@pytest.mark.parametrize("at", ["start", "step", "finish"])
def test_a_stop_reaches_tensorrt_and_comes_out_again(tmp_path: Path, at: str) -> None:
    with pytest.raises(KeyboardInterrupt):
        record(tmp_path / "p", NANO / "target", None, options(tmp_path), _Stop(at))
    assert not (tmp_path / "p").exists()


def test_a_stop_while_an_engine_is_written_comes_out_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(data: bytes) -> int:
        raise SystemExit

    with recording():
        streams = import_module("thor_dflash.builders.tensorrt.streams")
        writer = streams.Writer(tmp_path / "x.plan")
        monkeypatch.setattr(writer, "_file", SimpleNamespace(write=stopped))
        assert writer.write(b"engine") == 0
        assert isinstance(writer.failure, SystemExit)


def test_a_full_disk_is_told_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with recording():
        engine = import_module("thor_dflash.builders.tensorrt.engine")

        class Full(engine.Writer):  # type: ignore[misc, name-defined]
            def write(self, data: bytes) -> int:
                self.failure = OSError(28, "No space left on device")
                return 0

        monkeypatch.setattr(engine, "Writer", Full)
        monkeypatch.setattr(builds, "maker", maker)
        recorder.FAULTS.clear()
        with pytest.raises(PackageError, match="no space left on device"):
            build(NANO / "target", None, tmp_path / "p", options(tmp_path), Silent())


def test_a_step_that_reads_what_nobody_has_made_is_refused() -> None:
    rows = Value(dtype="bfloat16", shape=(16, 64))
    program = Program(
        name="step",
        inputs={},
        outputs={"y": rows},
        values={"later": rows},
        weights={},
        steps=(Step(name="one", room="linear", attributes={}, ports={"x": "later", "y0": "y"}),),
        scratch=0,
    )
    with pytest.raises(EngineError, match=r"one\.x must be made by an earlier step \(got later\)"):
        deploy(program)
