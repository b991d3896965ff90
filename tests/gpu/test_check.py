"""The commands `check` and `doctor` on a device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from thor_dflash.builders.build import build
from thor_dflash.calib.check.compare import Reference, compare, make, some_tokens, tracer
from thor_dflash.config.build import BuildConfig
from thor_dflash.config.engine import EngineConfig
from thor_dflash.core.progress import Silent
from thor_dflash.runtime.engines.cuda.engine import CudaEngine
from thor_dflash.runtime.session import Session, open_session

pytestmark = pytest.mark.gpu
NANO = Path(__file__).parents[2] / "models" / "planner-nano"


def package(out: Path, engine: str) -> Path:
    options = {"kv": "fp8", "activations": "bf16", "chunk": 64, "capacity": 512}
    config = BuildConfig(engine=engine, **options)  # type: ignore[arg-type]
    build(NANO / "target", NANO / "drafter", out, config, Silent())
    return out


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return package(tmp_path_factory.mktemp("cuda") / "nano", "cuda")


@pytest.fixture
def session(made: Path) -> Iterator[Session]:
    with closing(open_session(made, EngineConfig(), Silent())) as opened:
        yield opened


def test_every_operator_on_the_device_agrees_with_its_definition(
    session: Session, made: Path
) -> None:
    show = tracer(session, made)
    report = compare(session, show, None, some_tokens(session), "all", None, Silent())
    assert report.right, [walk.wrong for walk in report.walks]
    assert {walk.graph for walk in report.walks} == {
        "verify", "accept", "accept_sampled", "propose", "sample_drafts", "observe",
        "sample_drafts_rejection", "accept_rejection",
        "prefill", "prefill.chunk32", "observe_chunk", "observe_chunk.chunk32",
    }  # fmt: skip


def test_the_device_agrees_with_onnx_runtime_and_a_wrong_weight_is_located(
    session: Session, made: Path, tmp_path: Path
) -> None:
    graphs = package(tmp_path / "ort", "ort")
    with closing(open_session(graphs, EngineConfig(), Silent())) as other:
        tokens = some_tokens(session)
        golden = make(other, None, tokens, Silent())
        reference = Reference(golden, other, tracer(other, graphs))
        show = tracer(session, made)
        assert compare(session, show, reference, tokens, "auto", None, Silent()).right

        engine = session.model.engine
        assert isinstance(engine, CudaEngine)
        call = session.model.call("verify")
        steps = engine.program(call.graph.name).steps
        step = next(s for s in steps if s.name == "layers.1.mlp.down_proj")
        weight = engine.program(call.graph.name).weights[step.ports["scales"]]
        engine.driver("cuMemsetD8", engine.place(call, step, "scales"), 0, weight.nbytes)
        report = compare(session, show, reference, tokens, "auto", None, Silent())
        assert not report.right
        assert report.walks[0].parts
        assert report.walks[0].parts.step == step.name
