"""A build that fails or is stopped ends with an error and leaves nothing behind, in a process that
goes on. Each of these cases crashed the process once.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import write_target
from support.trt_builds import (
    HYBRID,
    BuiltPackage,
    build_engine,
    builder,
    building,
    options,
    plan_of,
    tensorrt,
)

from thor_dflash.builders import build as builds
from thor_dflash.builders.output.weight_files import WeightFiles
from thor_dflash.builders.tensorrt.profiles import EngineGraphs
from thor_dflash.builders.tensorrt.weight_constants import EngineConstants
from thor_dflash.cli.main import main
from thor_dflash.core.errors import EngineError
from thor_dflash.core.progress import Silent
from thor_dflash.plugins.tensorrt.node import PluginNode

TWO = replace(HYBRID, layers=2, interval=2)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("failures") / "target", TWO, 1, "bf16")


@pytest.fixture(scope="module")
def prefill(target: Path) -> EngineGraphs:
    plan = plan_of(target, None, options(target))
    return next(one for one in plan.together if one.name == "prefill")


class Countdown:
    """Passes calls of functions on, and acts at one of them."""

    def __init__(self, act: Callable[[], object], at: int) -> None:
        self.act, self.at, self.count = act, at, 0

    def __call__(self, to: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            self.count += 1
            if self.count == self.at:
                self.act()
            return to(*args)

        return call


def fail() -> None:
    raise EngineError("no kernel for it")


@pytest.mark.parametrize(
    ("at", "call"),
    [
        ("thor_dflash.plugins.tensorrt.node.PluginNode.output_dtype", 3),
        ("thor_dflash.plugins.tensorrt.node.PluginNode.output_shapes", 3),
        ("thor_dflash.plugins.tensorrt.node.PluginNode.takes", 9),
        ("thor_dflash.plugins.tensorrt.node.PluginNode.site", 2),
        ("thor_dflash.plugins.cuda.enqueue.working", 1),
    ],
)
def test_a_build_ends_with_the_reason_of_a_plugin(
    prefill: EngineGraphs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str, call: int
) -> None:
    """TensorRT says no more than the number of an error, and of the workspace nothing."""
    module, _, name = at.partition(".PluginNode.") if "Node" in at else at.rpartition(".")
    holder = import_module(module)
    holder = vars(holder)["PluginNode"] if "Node" in at else holder
    counted = Countdown(fail, call)(vars(holder)[name])
    monkeypatch.setattr(holder, name, counted)
    with pytest.raises(EngineError, match="^no kernel for it$"):
        build_engine(tmp_path, prefill)


@pytest.mark.parametrize("pos", [0, 5, 30])
def test_a_format_that_a_plugin_refuses_ends_the_build(
    prefill: EngineGraphs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pos: int
) -> None:
    asked: list[str] = []
    takes = PluginNode.takes

    def refuse(self: PluginNode, port: str, *rest: Any) -> bool:
        asked.append(port)
        return len(asked) <= pos and takes(self, port, *rest)

    monkeypatch.setattr(PluginNode, "takes", refuse)
    with pytest.raises(EngineError, match="prefill must build .*format"):
        build_engine(tmp_path, prefill)


CALLBACKS = {
    "thor_dflash.plugins.tensorrt.host.Messages": ["log"],
    "thor_dflash.plugins.tensorrt.plugin.Plugin": ["get_capability_interface", "clone"],
    "thor_dflash.plugins.tensorrt.plugin.Creator": ["create_plugin"],
    "thor_dflash.builders.tensorrt.build_progress.BuildProgress": ["step_complete", "phase_start"],
    "thor_dflash.builders.tensorrt.engine_file.EngineFileWriter": ["write"],
}
"""Methods that TensorRT calls while it builds."""


def interrupted(tmp: Path, prefill: EngineGraphs, at: int) -> int:
    """Build an engine, with a Ctrl-C within one of TensorRT's calls; return their number."""
    count = Countdown(lambda: signal.raise_signal(signal.SIGINT), at)
    with building(), pytest.MonkeyPatch.context() as patch:
        by = builder(BuiltPackage(tmp), options(tmp).tensorrt, Silent())
        for path, names in CALLBACKS.items():
            module, _, kind = path.rpartition(".")
            for name in names:
                holder = vars(import_module(module))[kind]
                patch.setattr(holder, name, count(vars(holder)[name]))
        nodes = [node for _, node in prefill.graphs[0].plugins]
        with by.calls(nodes):
            by.build(prefill, EngineConstants(WeightFiles()), tmp, tmp / "x.plan")
    return count.count


@pytest.mark.parametrize("points", [8, pytest.param(20, marks=pytest.mark.slow)])
def test_ctrl_c_ends_a_build_wherever_it_comes(
    prefill: EngineGraphs, tmp_path: Path, points: int
) -> None:
    """An exception raised in a call of TensorRT would be lost, or crash it."""
    before = signal.getsignal(signal.SIGINT)
    calls = interrupted(tmp_path, prefill, 0)
    assert calls > 200
    for point in range(points):
        with pytest.raises(KeyboardInterrupt):
            interrupted(tmp_path, prefill, 1 + point * (calls - 1) // (points - 1))
        assert signal.getsignal(signal.SIGINT) is before


def test_a_second_ctrl_c_ends_the_process(tmp_path: Path) -> None:
    with building():
        from thor_dflash.builders.tensorrt.build_progress import BuildProgress

        before = signal.getsignal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt), BuildProgress("x", Silent()):
            signal.raise_signal(signal.SIGINT)
            assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL
        assert signal.getsignal(signal.SIGINT) is before


def test_a_full_disk_ends_the_build(prefill: EngineGraphs, tmp_path: Path) -> None:
    (tmp_path / "prefill.plan").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        build_engine(tmp_path, prefill)


def test_an_old_tensorrt_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensorrt(), "__version__", "10.12.0.36")
    with building(), pytest.raises(EngineError, match=r"10.13 or later \(got 10.12.0.36\)"):
        builder(BuiltPackage(tmp_path), options(tmp_path).tensorrt, Silent())


def command(target: Path, tmp: Path) -> int:
    """Run the build of a package by the command line; return its exit status."""
    made = BuiltPackage(tmp)
    with building(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(builds, "engine_builder", lambda c, p: builder(made, c, p))
        argv = ["build", "--engine", "tensorrt", "--target", str(target), "--out", str(tmp / "p")]
        settings = ["build.chunk=64", "build.capacity=512", f"build.tensorrt.timings={tmp / 't'}"]
        return main([*argv, *(word for item in settings for word in ("-s", item))])


@pytest.mark.parametrize(
    ("act", "status", "words"),
    [
        (fail, 2, "no kernel for it"),
        (lambda: signal.raise_signal(signal.SIGINT), 130, ""),
    ],
)
def test_the_command_line_reports_it_and_leaves_nothing(
    target: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    act: Callable[[], object],
    status: int,
    words: str,
) -> None:
    monkeypatch.setattr(PluginNode, "takes", Countdown(act, 20)(PluginNode.takes))
    assert command(target, tmp_path) == status
    assert words in capfd.readouterr().err.splitlines()[-1]
    assert not list(tmp_path.iterdir())
