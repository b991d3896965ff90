"""What a build with TensorRT refuses, and how it ends if the disk is full or the user stops it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest
from stand_ins import trt_recorder as recorder
from stand_ins.trt_parser import INetworkDefinition, ITensor
from support.trt_builds import NANO, options, record, record_hybrid

from thor_dflash.builders.tensorrt.deployment_graph import deploy
from thor_dflash.core.errors import ConfigError, EngineError
from thor_dflash.core.progress import Silent
from thor_dflash.package.launch_program import Program, Step, Value

Report = dict[str, Any]
"""What the inspector of a recorded engine shows: layers and tensors."""


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("build", r"prefill must build \(got: no tactic for a layer\)"),
        ("reformat", "1 copies into another format: Reformatting CopyNode for x"),
        ("type", "tokens of type "),
        ("layers", "plugins of .* nodes"),
        ("fp4", "none of 13 linears multiplied in FP4"),
        ("empty", "prefill.plan must load again"),
        ("shape", "TensorRT must parse the graph as written"),
        ("extra", "layers that no node needs: Cast.x"),
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


def drop_input(network: INetworkDefinition) -> None:
    network.layers[1].inputs.pop()


def more(count: int) -> Callable[[INetworkDefinition], None]:
    kind, shape = recorder.DataType.FLOAT, recorder.Dims((1,))
    return lambda n: n.inputs.extend(ITensor(f"m{i}", kind, shape) for i in range(count))


def retype(network: INetworkDefinition) -> None:
    network.outputs[0].dtype = recorder.DataType.HALF


def read_as_shape(network: INetworkDefinition) -> None:
    next(t for t in network.inputs if t.name == "tokens").is_shape_tensor = True


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (more(5), r"got input m0 too many, input m1 too many, input m2 too many, and 2 more\)"),
        (retype, r"got output \S+ of type "),
        (read_as_shape, r"got tokens read as a shape\)"),
        (drop_input, r"got \S+ with \d+ inputs and \d+ outputs\)"),
        (lambda n: n.layers.pop(0), r"got \d+ plugins of \d+ nodes\)"),
    ],
)
def test_a_network_that_is_not_its_graph_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[INetworkDefinition], object],
    words: str,
) -> None:
    real = recorder.OnnxParser.parse_model_proto

    def parse(parser: recorder.OnnxParser) -> bool:
        done = real(parser)
        change(parser._network)
        return done

    monkeypatch.setattr(recorder.OnnxParser, "parse_model_proto", parse)
    with pytest.raises(EngineError, match=rf"TensorRT must parse the graph .* \({words}"):
        record_hybrid(tmp_path, "bf16")


def shown(monkeypatch: pytest.MonkeyPatch, change: Callable[[Report], object]) -> None:
    """Make the recorder's engines show something else to the inspector, changed by `change`."""
    real = recorder._plan

    def plan(network: INetworkDefinition) -> Report:
        made = real(network)
        change(made)
        return made

    monkeypatch.setattr(recorder, "_plan", plan)


def by_profile(plan: Report) -> None:
    """The inspector lists every layer twice, as for two profiles."""
    plan["Layers"] *= 2


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda p: p["tensors"].append({"name": "x", "type": 0}), r"got tensor x too many\)"),
        (by_profile, r"got \d+ plugins of \d+ nodes\)"),
    ],
)
def test_an_engine_of_other_tensors_or_layers_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Report], object], words: str
) -> None:
    shown(monkeypatch, change)
    with pytest.raises(EngineError, match=rf"must hold nothing that the graph does not \({words}"):
        record_hybrid(tmp_path, "bf16")


@pytest.mark.parametrize(
    ("method", "found", "words"),
    [
        ("get_tensor_format", recorder.TensorFormat.CHW32, "in another format than rows"),
        ("get_tensor_location", recorder.TensorLocation.HOST, "in the host's memory"),
    ],
)
def test_a_tensor_that_lies_another_way_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, found: object, words: str
) -> None:
    real = vars(recorder.ICudaEngine)[method]

    def get(engine: recorder.ICudaEngine, name: str, profile: int = 1) -> object:
        return found if (name, profile) == ("tokens", 1) else real(engine, name)

    monkeypatch.setattr(recorder.ICudaEngine, method, get)
    with pytest.raises(EngineError, match=rf"\(got tokens {words}\)"):
        record_hybrid(tmp_path, "modelopt")


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


def test_an_old_tensorrt_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "__version__", "10.12.0.36")
    with pytest.raises(EngineError, match=r"TensorRT 10.13 or later \(got 10.12.0.36\)"):
        record_hybrid(tmp_path, "bf16")


class _Stop(Silent):
    """A progress report that raises KeyboardInterrupt in one of TensorRT's callbacks."""

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


@pytest.mark.parametrize("at", ["start", "finish"])
def test_a_stop_reaches_tensorrt_and_comes_out_again(tmp_path: Path, at: str) -> None:
    with pytest.raises(KeyboardInterrupt):
        record(tmp_path / "p", NANO / "target", None, options(tmp_path), _Stop(at))
    assert not (tmp_path / "p").exists()
    assert at == "finish" or not recorder.BUILT, "TensorRT stops at the next step"


def test_a_step_that_reads_what_nobody_has_made_is_refused() -> None:
    rows = Value(dtype="bfloat16", shape=(16, 64))
    program = Program(
        name="step",
        inputs={},
        outputs={"y": rows},
        values={"later": rows},
        weights={},
        steps=(Step(name="one", op="linear", attributes={}, ports={"x": "later", "y0": "y"}),),
        scratch=0,
    )
    with pytest.raises(EngineError, match=r"one\.x must be made by an earlier step \(got later\)"):
        deploy(program)
