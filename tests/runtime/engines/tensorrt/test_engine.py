"""The TensorRT engine's checks, bindings and captures, with stand-ins of TensorRT and driver."""

from __future__ import annotations

import itertools
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from stand_ins import tensorrt_module as trt
from stand_ins.fake_driver import FakeCuda, fake
from support.planner_nano import package, request
from support.trt_packages import planned, write

from thor_dflash.config.engine import EngineConfig
from thor_dflash.core.errors import EngineError
from thor_dflash.core.progress import Silent
from thor_dflash.package import manifest as package_manifest
from thor_dflash.package import trt_engine as sidecar
from thor_dflash.package.manifest import hash_file
from thor_dflash.plugins.contract import NEXT
from thor_dflash.plugins.tensorrt.node import fingerprint
from thor_dflash.runtime.decoding.proposers import DflashDrafter
from thor_dflash.runtime.engines.tensorrt.compatibility import RuntimeFacts
from thor_dflash.runtime.session import Session, open_session

HERE = RuntimeFacts(
    tensorrt=trt.__version__,
    device="Fake H100",
    capability=(9, 0),
    multiprocessors=132,
    kernels=fingerprint(),
)


def rewrite(out: Path, **changes: Any) -> None:
    """Change what the description of verify's engine says about where it was built."""
    plan = sidecar.read(out, "verify")
    card = out / f"verify{sidecar.ENDING}"
    card.write_text(sidecar.render(replace(plan, made=replace(plan.made, **changes))))
    found = package_manifest.read(out)
    write(out, replace(found, files={**found.files, card.name: hash_file(card)}))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return planned(package(tmp_path_factory.mktemp("trt") / "nano", engine="cuda"), HERE)


@pytest.fixture
def made(source: Path, tmp_path: Path) -> Path:
    """A copy of the package that a test may change, except for the weights, which are links."""
    out = tmp_path / "nano"
    for path in source.rglob("*"):
        if path.is_file():
            to = out / path.relative_to(source)
            to.parent.mkdir(parents=True, exist_ok=True)
            to.symlink_to(path) if path.suffix in (".bin", ".weights") else to.write_bytes(
                path.read_bytes()
            )
    return out


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    trt.stand_in(monkeypatch)
    return fake(monkeypatch)


def cycles(s: Session, count: int) -> int:
    """Number of cycles of a request; with this driver each commits one token."""
    return sum(bool(chunk.tokens) for chunk in s.run(request(s, 0, count), DflashDrafter()))


def test_a_cycle_is_captured_once_for_each_way_its_states_lie(made: Path, device: FakeCuda) -> None:
    with closing(open_session(made, EngineConfig(), Silent())) as s:
        assert cycles(s, 9) == cycles(s, 9) == 9
        captured, taken, launched = len(device.graphs), device.taken, count(device)
        for _ in range(20):
            cycles(s, 9)
        assert (len(device.graphs), device.taken, count(device)) == (captured, taken, launched)
        assert captured <= 8


def count(device: FakeCuda) -> int:
    """Number of kernel launches so far."""
    return device.calls.count("cuLaunchKernelEx")


@pytest.mark.slow
def test_it_captures_the_kernels_that_the_cuda_engine_captures(
    made: Path, device: FakeCuda, tmp_path: Path
) -> None:
    with closing(open_session(made, EngineConfig(), Silent())) as s:
        cycles(s, 9)
        ours = sorted(set(device.graphs))
    device.graphs.clear()
    other = package(tmp_path / "cuda", engine="cuda")
    with closing(open_session(other, EngineConfig(), Silent())) as s:
        cycles(s, 9)
    assert ours == sorted(set(device.graphs))


@pytest.mark.parametrize("overlap", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.slow
def test_launches_overlap_only_if_the_engine_may(
    made: Path, device: FakeCuda, overlap: bool
) -> None:
    early = device.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    with closing(open_session(made, EngineConfig(overlap=overlap), Silent())) as s:
        cycles(s, 3)
    assert any(early in attributes for attributes in device.launched) == overlap


def contexts(s: Session) -> dict[Any, Any]:
    """(a call, places of its states) -> execution context."""
    engine: Any = s.model.engine
    bounds = engine.replay.bound.values()
    return {(b.call, places): made for b in bounds for places, made in b.contexts.items()}


def test_what_a_context_is_bound_to(made: Path, device: FakeCuda) -> None:
    """States are updated in place or swap places; all contexts read one copy of a weight; the runs
    before a capture leave cleared states.
    """
    with closing(open_session(made, EngineConfig(), Silent())) as s:
        last = len(device.calls) - device.calls[::-1].index("cuLaunchKernelEx")
        engine: Any = s.model.engine
        places = sum(len(tensor.places) for tensor in engine.tensors.all)
        assert device.calls[last:].count("cuMemsetD8Async") == places
        weights: dict[str, set[int]] = {}
        turned = 0
        for (call, fronts), context in contexts(s).items():
            plan, at = sidecar.read(made, context.engine.program.name), context._at
            other = contexts(s)[call, tuple(1 - front for front in fronts)]._at
            for name in (n for n in plan.outputs if n.removeprefix(NEXT) in plan.inputs):
                state = name.removeprefix(NEXT)
                assert (at[name] == at[state]) == (name in plan.in_place), name
                assert (at[name], at[state]) in ((other[state], other[name]), (at[state],) * 2)
                turned += at[name] != at[state]
            for name in plan.weights:
                weights.setdefault(name, set()).add(at[name])
        assert turned > 0
        assert len(weights) > 20
        assert all(len(found) == 1 for found in weights.values())
        assert len(set.union(*weights.values())) == len(weights)


@pytest.mark.slow
def test_each_step_reads_what_the_one_before_it_left(made: Path, device: FakeCuda) -> None:
    with closing(open_session(made, EngineConfig(graphs=False), Silent())) as s:
        states: list[tuple[dict[str, int], dict[str, int]]] = []
        for _ in range(3):
            before = {id(c): c.ran for c in contexts(s).values()}
            s.model.engine.run([s.model.call("verify")])
            [ran] = [c for c in contexts(s).values() if c.ran > before[id(c)]]
            names = [n for n in ran.engine.program.outputs if n.startswith(NEXT)]
            states.append(
                ({n: ran._at[n.removeprefix(NEXT)] for n in names}, {n: ran._at[n] for n in names})
            )
        for (_, left), (read, _) in itertools.pairwise(states):
            assert read == left


@pytest.mark.slow
def test_closing_leaves_space_for_the_next_engine(made: Path, device: FakeCuda) -> None:
    for _ in range(2):
        with closing(open_session(made, EngineConfig(), Silent())) as s:
            cycles(s, 3)
            with pytest.raises(EngineError, match="registered once in a process"):
                open_session(made, EngineConfig(), Silent())
        assert not trt.get_plugin_registry().creators
        assert device.alive == {}


def test_an_engine_of_another_build_is_refused(made: Path, device: FakeCuda) -> None:
    rewrite(made, tensorrt="10.16.2.1")
    with pytest.raises(EngineError, match=r"verify: TensorRT must be 10.16.2.1"):
        open_session(made, EngineConfig(), Silent())


@pytest.mark.parametrize(
    "at",
    [
        "ICudaEngine.create_execution_context",  # gives None
        "IExecutionContext.infer_shapes",  # raises RuntimeError
    ],
)
def test_what_tensorrt_refuses_is_reported_in_its_words(
    made: Path, device: FakeCuda, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    name, method = at.split(".")

    def fail(self: Any, *_: object) -> None:
        engine = self if name == "ICudaEngine" else self.engine
        engine.logger.log(trt.ILogger.Severity.ERROR, "no memory for it")
        if method == "infer_shapes":
            raise RuntimeError("Error in it.")

    monkeypatch.setattr(vars(trt)[name], method, fail)
    wrong = r"TensorRT engine \S+ must take its tensors \(got: no memory for it\)"
    with pytest.raises(EngineError, match=wrong):
        open_session(made, EngineConfig(), Silent())
