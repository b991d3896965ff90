"""The TensorRT engine, TensorRT and the driver stood in for: what it checks, binds and captures."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import stand_in_trt as trt
from fake_cuda import MEMORY, Fake, fake
from nano import package, request

from thor_dflash import manifest as package_manifest
from thor_dflash import plan as sidecar
from thor_dflash import program as programs
from thor_dflash.builders.tensorrt.deploy import deploy
from thor_dflash.config import EngineConfig
from thor_dflash.errors import EngineError
from thor_dflash.manifest import Manifest, hash_file
from thor_dflash.plan import Made, Plan, PlanNode
from thor_dflash.plugins.tensorrt.node import fingerprint
from thor_dflash.program import Program
from thor_dflash.progress import Silent
from thor_dflash.runtime.engines.tensorrt.check import Here, check
from thor_dflash.runtime.propose import Dflash
from thor_dflash.runtime.session import Session, open_session

HERE = Here(
    tensorrt=trt.__version__,
    device="Fake H100",
    capability=(9, 0),
    multiprocessors=132,
    kernels=fingerprint(),
)


def planned(out: Path, here: Here) -> Path:
    """A package for the CUDA engine made one for TensorRT: its programs are the engines."""
    found = package_manifest.read(out)
    files = dict(found.files)
    for path in sorted(out.glob(f"*{programs.ENDING}")):
        program = programs.read(out, path.name.removesuffix(programs.ENDING))
        engine = out / f"{program.name}.plan"
        path.rename(engine)
        card = out / f"{program.name}{sidecar.ENDING}"
        card.write_text(sidecar.render(describe(program, engine, here)))
        del files[path.name]
        files |= {p.name: hash_file(p) for p in (engine, card)}
    write(out, replace(found, engine="tensorrt", files=files))
    return out


def describe(program: Program, engine: Path, here: Here) -> Plan:
    deployed = deploy(program)
    return Plan(
        name=program.name,
        file=engine.name,
        sha256=hash_file(engine).sha256,
        profile=0,
        inputs=deployed.inputs,
        outputs=deployed.outputs,
        weights=deployed.weights,
        in_place=deployed.in_place,
        nodes=tuple(
            PlanNode(name=name, room=node.room, fields=node.fields())
            for name, node in deployed.plugins
        ),
        made=Made(
            tensorrt=here.tensorrt,
            capability=here.capability,
            device=here.device,
            multiprocessors=here.multiprocessors,
            kernels=here.kernels,
        ),
    )


def write(out: Path, manifest: Manifest) -> None:
    (out / package_manifest.NAME).write_text(package_manifest.render(manifest))


def rewrite(out: Path, **changes: Any) -> None:
    """Change what the verify engine is said to be made with."""
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
    """A package a test may damage: files are linked, and replaced, never written to."""
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
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fake]:
    trt.stand_in(monkeypatch)
    yield fake(monkeypatch)


def cycles(s: Session, count: int) -> int:
    """Cycles of a request, which commit one token each with this driver."""
    return sum(bool(chunk.tokens) for chunk in s.run(request(s, 0, count), Dflash()))


def test_a_cycle_is_captured_once_for_each_way_its_states_lie(made: Path, device: Fake) -> None:
    with closing(open_session(made, EngineConfig(), Silent())) as s:
        assert cycles(s, 9) == cycles(s, 9) == 9
        captured, taken, launched = len(device.graphs), device.taken, count(device)
        for _ in range(20):
            cycles(s, 9)
        assert (len(device.graphs), device.taken, count(device)) == (captured, taken, launched)
        assert captured <= 8


def count(device: Fake) -> int:
    return device.calls.count("cuLaunchKernelEx")


def test_it_captures_the_kernels_that_the_cuda_engine_captures(
    made: Path, device: Fake, tmp_path: Path
) -> None:
    with closing(open_session(made, EngineConfig(), Silent())) as s:
        cycles(s, 9)
        ours = sorted(set(device.graphs))
    device.graphs.clear()
    other = package(tmp_path / "cuda", engine="cuda")
    with closing(open_session(other, EngineConfig(), Silent())) as s:
        cycles(s, 9)
    assert ours == sorted(set(device.graphs))


def test_closing_leaves_room_for_the_next_engine(made: Path, device: Fake) -> None:
    for _ in range(2):
        with closing(open_session(made, EngineConfig(), Silent())) as s:
            cycles(s, 3)
            with pytest.raises(EngineError, match="registered once in a process"):
                open_session(made, EngineConfig(), Silent())
        assert not trt.get_plugin_registry().creators


def test_what_does_not_fit_is_refused_before_it_is_taken(made: Path, device: Fake) -> None:
    device.taken = MEMORY - (260 << 20)
    with pytest.raises(EngineError, match=r"the package must fit .*lower engine\.capacity"):
        open_session(made, EngineConfig(), Silent())


def test_a_context_that_the_engine_was_not_built_for_is_refused(
    made: Path, device: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trt, "MOST", 512)
    with pytest.raises(EngineError, match=r"attention\.\S+ must be .*set engine\.capacity to what"):
        open_session(made, EngineConfig(), Silent())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tensorrt": "10.16.2.1"}, r"TensorRT must be 10.16.2.1, .*\(got 10.13.3.9\)"),
        ({"capability": (11, 0)}, r"compute capability must be 11.0 \(got 9.0\)"),
        ({"device": "Thor"}, r"the device must be Thor \(got Fake H100\)"),
        ({"multiprocessors": 20}, r"20 multiprocessors \(got 132; a power mode"),
        ({"kernels": "0" * 64}, r"the kernels of thor-dflash must be .* 000000000000 \(got"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_an_engine_of_another_build_or_machine_says_so_and_what_to_do(
    made: Path, device: Fake, change: dict[str, Any], words: str
) -> None:
    rewrite(made, **change)
    with pytest.raises(EngineError, match=f"verify: {words}.*; build the package here"):
        open_session(made, EngineConfig(), Silent())


def test_every_mismatch_is_said_at_once() -> None:
    plan = describe_any()
    with pytest.raises(EngineError) as e:
        check(plan, replace(HERE, tensorrt="11.4.0.106", kernels="1" * 64), None)
    for word in ("11.4.0.106", "111111111111", "the engine that was described (got none"):
        assert word in str(e.value)


def describe_any() -> Plan:
    made = Made(
        tensorrt=HERE.tensorrt,
        capability=HERE.capability,
        device=HERE.device,
        multiprocessors=HERE.multiprocessors,
        kernels=HERE.kernels,
    )
    return Plan(
        name="verify",
        file="verify.plan",
        sha256="2" * 64,
        profile=0,
        inputs={},
        outputs={},
        weights={},
        nodes=(),
        made=made,
    )


def test_an_engine_that_tensorrt_does_not_load_is_told_in_its_words(
    made: Path, device: Fake
) -> None:
    engine = made / "verify.plan"
    engine.write_text("{")
    plan = replace(sidecar.read(made, "verify"), sha256=hash_file(engine).sha256)
    card = made / f"verify{sidecar.ENDING}"
    card.write_text(sidecar.render(plan))
    found = package_manifest.read(made)
    new = {p.name: hash_file(p) for p in (engine, card)}
    write(made, replace(found, files={**found.files, **new}))
    with pytest.raises(
        EngineError, match=r"verify.plan must be an engine .*\(got: it is no engine"
    ):
        open_session(made, EngineConfig(), Silent())


def test_a_description_survives_its_file(tmp_path: Path) -> None:
    plan = describe_any()
    (tmp_path / f"verify{sidecar.ENDING}").write_text(sidecar.render(plan))
    assert sidecar.read(tmp_path, "verify") == plan
    assert json.loads(sidecar.render(plan))["made"]["tensorrt"] == HERE.tensorrt
