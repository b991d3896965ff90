"""`check` finds the operator, weight or step of a damaged package that is wrong, and no other."""

from __future__ import annotations

import dataclasses
import json
import shutil
from contextlib import closing
from functools import cache
from pathlib import Path

import numpy as np
import onnx
import pytest
from stand_ins.numpy_engine import Spoil, Stepping
from support.loop_models import prompt, session
from support.package_damage import graph, rehash, spoil_body, spoil_weight

from thor_dflash.builders.build import build
from thor_dflash.calib.check.compare import (
    NO_TOWER,
    CheckReport,
    Reference,
    compare,
    make,
    some_tokens,
    tracer,
    walk,
)
from thor_dflash.calib.check.cuda_trace import CudaTracer
from thor_dflash.calib.check.golden import arrays, read
from thor_dflash.calib.check.graph_inputs import walks
from thor_dflash.cli import main
from thor_dflash.config.build import BuildConfig
from thor_dflash.config.engine import EngineConfig
from thor_dflash.core.progress import Silent
from thor_dflash.core.tensors import Array
from thor_dflash.package import manifest
from thor_dflash.package.manifest import encoder_name
from thor_dflash.runtime.decoding.model_runner import ModelRunner
from thor_dflash.runtime.session import Session, open_session

NANO = Path(__file__).parents[3] / "models" / "planner-nano"
THREAD = EngineConfig(threads=1)


def directory(s: Session) -> Path:
    return Path(s.model.engine.package)  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def good() -> Path:
    return directory(session())


@pytest.fixture
def copy(good: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(good, tmp_path / "package"))


@cache
def reference_of(package: Path) -> Reference:
    """Returns a package as the reference. One serves all tests: each use resets its session."""
    held = open_session(package, THREAD, Silent())
    golden = make(held, None, some_tokens(held), Silent())
    return Reference(golden, held, tracer(held, package))


def checked(package: Path, reference: Path | None, operators: str = "auto") -> CheckReport:
    with closing(open_session(package, THREAD, Silent(), choose=True)) as s:
        other = reference_of(reference) if reference else None
        show, tokens = tracer(s, package), some_tokens(s)
        return compare(s, show, other, tokens, operators, None, Silent())  # type: ignore[arg-type]


# ---- ONNX Runtime


def test_a_package_compared_with_itself_is_right(good: Path) -> None:
    report = checked(good, good)
    assert report.right
    assert report.logits
    assert report.logits.worst == 0


@pytest.mark.slow
def test_every_graph_of_a_package_compared_with_itself_is_right(good: Path) -> None:
    report = checked(good, good, "all")
    assert report.right
    assert report.logits
    assert report.logits.worst == 0
    graphs = [walk.graph for walk in report.walks]
    assert graphs == [
        "verify",
        "verify",
        "prefill",
        "accept",
        "observe_chunk",
        "propose",
        "observe",
        "accept_sampled",
        "sample_drafts",
        "sample_drafts_rejection",
        "accept_rejection",
    ]
    # Other graphs use these names for other values: only verify's are compared.
    assert [walk.graph for walk in report.walks if walk.furthest] == ["verify", "verify"]
    assert not [walk.graph for walk in report.walks if walk.parts]
    model = graph(good, "verify")
    assert report.walks[0].operators == len(model.graph.node)


@pytest.mark.slow
@pytest.mark.parametrize("kv", ["bf16", "fp8"])
def test_rounding_is_no_fault(kv: str) -> None:
    report = checked(directory(session(kv=kv, dialect="modelopt")), None)  # type: ignore[arg-type]
    assert report.right, [walk.wrong for walk in report.walks]
    other = checked(directory(session(kv=kv)), directory(session()), "all")  # type: ignore[arg-type]
    assert other.right, other


@pytest.mark.parametrize(
    ("step", "old", "new"),
    [
        ("layers.1.mlp.down_proj", "Add", "Sub"),
        pytest.param("layers.1.self_attn", "Mul", "Add", marks=pytest.mark.slow),
        pytest.param("layers.0.linear_attn", "Softplus", "Sigmoid", marks=pytest.mark.slow),
    ],
)
def test_a_wrong_operator_is_named(copy: Path, good: Path, step: str, old: str, new: str) -> None:
    spoil_body(copy, step, old, new)
    report = checked(copy, good)
    assert not report.right
    [only] = report.walks
    assert only.wrong
    assert only.wrong.step == step
    # Without a reference, the operator's definition is enough.
    alone = checked(copy, None)
    assert alone.walks[0].wrong
    assert alone.walks[0].wrong.step == step


@pytest.mark.parametrize(
    ("weight", "step"),
    [
        ("layers.0.mlp.down_proj.weight", "layers.0.mlp.down_proj"),
        ("layers.1.self_attn.q_norm.weight", "layers.1.self_attn"),
    ],
)
def test_a_damaged_weight_is_blamed_on_the_operator_that_reads_it(
    copy: Path, good: Path, weight: str, step: str
) -> None:
    spoil_weight(copy, weight)
    report = checked(copy, good)
    assert not report.right
    [only] = report.walks
    assert only.wrong is None  # the operator computes what it should, with the wrong weight
    assert only.parts
    assert only.parts.step == step
    assert only.parts.read < 1e-4 < only.parts.left


def test_a_fault_that_shows_late_is_looked_for_where_it_shows(copy: Path, good: Path) -> None:
    """A wrong record changes nothing until the second block folds it."""
    model = graph(copy, "verify")
    node = next(n for n in model.graph.node if n.name == "layers.0.linear_attn")
    body = next(f for f in model.functions if f.overload == node.overload)
    # next_record_d is left 1.5 times too large.
    last = next(n for n in body.node if "next_record_d" in n.output)
    name = "next_record_d"
    last.output[list(last.output).index(name)] = "spoiled"
    factor = onnx.helper.make_tensor("factor_value", onnx.TensorProto.FLOAT, [], [1.5])
    body.node.append(onnx.helper.make_node("Constant", [], ["spoil_factor"], value=factor))
    body.node.append(onnx.helper.make_node("Mul", ["spoiled", "spoil_factor"], [name]))
    (copy / "verify.onnx").write_bytes(model.SerializeToString())
    rehash(copy)
    report = checked(copy, good)
    assert report.logits
    assert report.logits.first == 16
    assert report.walks[0].block == 1
    assert report.walks[0].wrong
    assert (report.walks[0].wrong.step, report.walks[0].wrong.output) == (node.name, name)


# ---- files


@pytest.fixture(scope="module")
def golden_file(good: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("golden") / "g.npz"
    args = ["check", "-s", "engine.threads=1", "--package", str(good)]
    assert main.main([*args, "--make-golden", str(path)]) == 0
    return path


def test_the_report_as_text_and_as_json(
    golden_file: Path, copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ["check", "-s", "engine.threads=1", "--golden", str(golden_file), "--package", str(copy)]
    spoil_body(copy, "layers.1.mlp.down_proj", "Add", "Sub")
    capsys.readouterr()
    assert main.main(args) == 1
    text = capsys.readouterr().out
    assert "wrong  verify, block 0, operator" in text
    assert "layers.1.mlp.down_proj (linear): y0 at [" in text
    assert text.endswith("NOT the same\n")
    assert main.main([*args, "--json"]) == 1
    table = json.loads(capsys.readouterr().out)
    assert table["right"] is False
    assert table["walks"][0]["wrong"]["step"] == "layers.1.mlp.down_proj"


def test_what_does_not_belong_together_is_refused(
    good: Path, golden_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ["check", "-s", "engine.threads=1", "--package", str(good)]

    def refused(*more: str) -> str:
        assert main.main([*args, *more]) == 2
        return capsys.readouterr().err

    golden = read(golden_file)
    other = dataclasses.replace(golden, sources={"target": "0" * 64})
    np.savez(tmp_path / "other.npz", allow_pickle=False, **arrays(other))
    assert "got another config.json: 000000000000" in refused(
        "--golden", str(tmp_path / "other.npz")
    )
    (tmp_path / "junk.npz").write_bytes(b"junk")
    junk = refused("--golden", str(tmp_path / "junk.npz"))
    assert "must be a golden file (got: a file that numpy cannot read); make it again" in junk
    assert "must be a readable file" in refused("--golden", str(tmp_path / "no.npz"))
    assert "--make-golden must be a path ending in .npz" in refused("--make-golden", "x")
    assert "must be a package directory" in refused("--reference", str(tmp_path / "no"))


@pytest.mark.slow
def test_the_vision_tower_and_the_rows_of_images_are_checked(tmp_path: Path) -> None:
    s = session("seeing")
    copy = Path(shutil.copytree(directory(s), tmp_path / "package"))
    tower = encoder_name(s.manifest.image_patches[0])
    nodes = graph(copy, tower).graph.node
    step = next(node.name for node in nodes if node.op_type == "ThorImageAttention")
    spoil_body(copy, step, "Mul", "Add", tower)
    for package, wrong in ((directory(s), None), (copy, step)):
        with closing(open_session(package, THREAD, Silent())) as made:
            show, tokens = tracer(made, package), some_tokens(made)
            assert show
            read, seen = (
                walk(made, show, name, tokens, 0, {}, 1.0, Silent()).wrong
                for name in ("prefill", tower)
            )
        assert read is None
        assert (seen.step if seen else None) == wrong
    prepared = walks(s.model)
    assert {encoder_name(size) for size in s.manifest.image_patches} < set(prepared)
    ids = s.model.engine.read(prepared["prefill"](tokens, 0).inputs["tokens"])
    assert len(set(ids[ids < 0])) > 1  # each is another row of an image
    reference = Reference(make(s, None, tokens, Silent()))
    report = compare(s, show, reference, tokens, "none", None, Silent())
    assert report.right
    assert NO_TOWER in report.notes


# ---- programs, on an engine that needs no device


def built(root: Path, engine: str) -> Path:
    options = {"kv": "fp8", "activations": "bf16", "chunk": 64, "capacity": 512}
    config = BuildConfig(engine=engine, **options)  # type: ignore[arg-type]
    build(NANO / "target", NANO / "drafter", root / engine, config, Silent())
    return root / engine


@pytest.fixture(scope="module")
def cuda(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """planner-nano's package for CUDA."""
    return built(tmp_path_factory.mktemp("nano"), "cuda")


@pytest.fixture(scope="module")
def graphs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """planner-nano's package for ONNX Runtime, of the same types."""
    return built(tmp_path_factory.mktemp("nano"), "ort")


def opened(engine: Stepping) -> tuple[Session, tuple[int, ...]]:
    """Returns a session on an engine without a device, and tokens for it."""
    made = manifest.read(engine.package)
    tokens = prompt(20, vocab=made.vocab_limit)
    return Session(ModelRunner(engine, made, 512, made.block, (64,)), None), tokens


def stepped(graphs: Path, engine: Stepping) -> CheckReport:
    """Compare the CUDA package, on an engine without a device, with the one for ONNX Runtime."""
    session, tokens = opened(engine)
    with closing(open_session(graphs, THREAD, Silent())) as other:
        golden = make(other, None, tokens, Silent())
        reference = Reference(golden, other, tracer(other, graphs))
        return compare(session, CudaTracer(engine), reference, tokens, "auto", None, Silent())


@pytest.mark.slow
def test_programs_whose_steps_are_right_are_the_same_as_their_graphs(
    cuda: Path, graphs: Path
) -> None:
    engine = Stepping(cuda)
    session, tokens = opened(engine)
    alone = compare(session, CudaTracer(engine), None, tokens, "all", None, Silent())
    assert alone.right, alone
    masked = {"accept_masked", "accept_sampled_masked"}
    assert {walk.graph for walk in alone.walks} == set(engine.programs) - masked
    together = stepped(graphs, Stepping(cuda))
    assert together.right, together.logits


def spoiled(name: str, port: str) -> Spoil:
    def spoil(step: object, outputs: dict[str, Array]) -> None:
        if step.name == name and port in outputs:  # type: ignore[attr-defined]
            outputs[port] = (outputs[port].astype(np.float32) * 1.5).astype(outputs[port].dtype)

    return spoil


@pytest.mark.parametrize(
    ("step", "port"),
    [
        ("layers.1.mlp.gate_up", "y0"),
        pytest.param("layers.2.linear_attn", "next_record_d", marks=pytest.mark.slow),
        pytest.param("layers.3.self_attn", "o", marks=pytest.mark.slow),
    ],
)
def test_a_wrong_step_of_a_program_is_named(cuda: Path, step: str, port: str) -> None:
    engine = Stepping(cuda, spoiled(step, port))
    session, tokens = opened(engine)
    wrong = walk(session, CudaTracer(engine), "verify", tokens, 0, {}, 1.0, Silent()).wrong
    assert wrong
    assert (wrong.step, wrong.output) == (step, port)
    assert wrong.error == pytest.approx(0.5, abs=0.02) or np.isinf(wrong.error)
