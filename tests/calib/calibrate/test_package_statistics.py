"""Activations on a package's own engine: those of the checkpoint it was built from."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from stand_ins.numpy_engine import Stepping
from support.checkpoints import GEOMETRIES, write_target

from thor_dflash.builders.build import build
from thor_dflash.builders.checkpoint.target import read_target
from thor_dflash.calib.calibrate.calibrate import calibrate
from thor_dflash.calib.calibrate.observed_steps import ObservedStep, ProgramObserver
from thor_dflash.calib.calibrate.package_statistics import ROWS, observer, package_statistics
from thor_dflash.calib.quantize.statistics import Statistics, read_statistics
from thor_dflash.config.build import BuildConfig
from thor_dflash.config.calibrate import CalibrateConfig
from thor_dflash.config.engine import EngineConfig
from thor_dflash.core.progress import Silent
from thor_dflash.core.tensors import Array
from thor_dflash.package import manifest
from thor_dflash.plugins import HEAD
from thor_dflash.runtime.decoding.model_runner import ModelRunner
from thor_dflash.runtime.engines.protocol import Call
from thor_dflash.runtime.session import Session, open_session

SMALL = replace(GEOMETRIES["heads27b"], layers=2, interval=2, key_heads=2, value_heads=4)
"""Layer 1 is attention; kernels take its heads."""
DOCUMENTS = [tuple(range(20)), (5,), tuple(range(100, 200)), tuple(range(30, 62))]
"""Shorter and longer than a block, and whole blocks."""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("source") / "bf16", SMALL, 3)


@pytest.fixture(scope="module")
def layers(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Statistics:
    """Made layer by layer from the checkpoint."""
    out = tmp_path_factory.mktemp("statistics") / "s.safetensors"
    calibrate(source, DOCUMENTS, out, CalibrateConfig(threads=1), Silent())
    return read_statistics(out)


def built(source: Path, out: Path, **options: Any) -> Path:
    config = BuildConfig(chunk=32, capacity=256, **options)
    build(source, None, out, config, Silent())
    return out


@pytest.fixture(scope="module")
def package(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In float32 throughout."""
    return built(source, tmp_path_factory.mktemp("f32") / "p", widths=(8,), kv="f32")


def measured(
    path: Path,
    out: Path,
    block: int = 0,
    documents: Sequence[tuple[int, ...]] = DOCUMENTS,
    threads: int = 1,
) -> Statistics:
    with closing(open_session(path, EngineConfig(threads=1, block=block), Silent())) as session:
        show = observer(path, session.model.engine)
        out.write_bytes(package_statistics(session, show, documents, threads, Silent()))
    return read_statistics(out)


def close(have: Statistics, want: Statistics, each: float, whole: float) -> None:
    """Compare all numbers: channels within `each` of their own, sums and maxima within `whole`."""
    assert list(have.inputs) == list(want.inputs)
    for name, one in want.inputs.items():
        found = have.inputs[name]
        np.testing.assert_allclose(found.energy, one.energy, rtol=each, err_msg=name)
        assert found.energy.sum() == pytest.approx(one.energy.sum(), rel=whole), name
        assert found.amax == pytest.approx(one.amax, rel=whole), name
    assert list(have.cache) == list(want.cache)
    for layer, cache in want.cache.items():
        np.testing.assert_allclose(have.cache[layer].k_amax, cache.k_amax, rtol=whole)
        np.testing.assert_allclose(have.cache[layer].v_amax, cache.v_amax, rtol=whole)
        assert have.cache[layer].v_rms == pytest.approx(cache.v_rms, rel=whole)


@pytest.fixture(scope="module")
def statistics(package: Path, tmp_path_factory: pytest.TempPathFactory) -> Statistics:
    return measured(package, tmp_path_factory.mktemp("statistics") / "p.safetensors")


def test_a_package_has_the_statistics_of_its_checkpoint(
    source: Path, layers: Statistics, statistics: Statistics
) -> None:
    close(statistics, layers, 2e-5, 1e-5)
    statistics.check(read_target(source), {"lm_head": SMALL.hidden})
    same = ("model", "tokens", "documents", "corpus", "source", "producer", "weights")
    assert [statistics.metadata[n] for n in same] == [layers.metadata[n] for n in same]
    assert statistics.metadata["weights"] == "bf16"
    assert "ort, verify blocks of 16 rows, activations f32, cache f32" in str(statistics.metadata)


def test_the_width_of_a_block_and_the_order_of_documents_change_nothing(
    package: Path, statistics: Statistics, tmp_path: Path
) -> None:
    other = measured(package, tmp_path / "s.safetensors", 8, DOCUMENTS[::-1])
    close(other, statistics, 2e-5, 1e-5)


def test_rows_held_do_not_grow_with_short_documents(package: Path) -> None:
    """Each document is a block of padding but one row."""
    alive: list[weakref.ref[Array]] = []
    most = 0
    with closing(open_session(package, EngineConfig(threads=1), Silent())) as session:
        show = observer(package, session.model.engine)
        whole = show.run

        def run(call: Call) -> Iterator[ObservedStep]:
            nonlocal most
            for step in whole(call):
                if step.op is HEAD:
                    alive.append(weakref.ref(step.rows["x"]))
                    most = max(most, sum(16 for rows in alive if rows() is not None))
                yield step

        show.run = run  # type: ignore[method-assign]
        package_statistics(session, show, [(i,) for i in range(24)], 1, Silent())
    assert len(alive) == 24
    assert most <= 2 * ROWS + 16


@pytest.mark.slow
def test_any_number_of_threads_gives_the_same_bytes(
    package: Path, statistics: Statistics, tmp_path: Path
) -> None:
    measured(package, tmp_path / "s.safetensors", threads=4)
    assert (tmp_path / "s.safetensors").read_bytes() == statistics.path.read_bytes()


@pytest.fixture(scope="module")
def program(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For CUDA."""
    out = tmp_path_factory.mktemp("cuda") / "p"
    return built(source, out, engine="cuda", kv="fp8", activations="bf16")


def stepping(program: Path) -> Session:
    """A session of the package for CUDA on an engine without a device."""
    made = manifest.read(program)
    return Session(ModelRunner(Stepping(program), made, 256, made.block, (32,)), None)


def test_programs_have_them_within_their_precision(
    program: Path, layers: Statistics, tmp_path: Path
) -> None:
    session = stepping(program)
    show, out = ProgramObserver(session.model.engine), tmp_path / "s.safetensors"  # type: ignore[arg-type]
    out.write_bytes(package_statistics(session, show, DOCUMENTS, 1, Silent()))
    close(read_statistics(out), layers, 0.1, 0.02)


def test_an_observed_program_leaves_the_state_of_a_run(program: Path) -> None:
    seen, plain = stepping(program).model, stepping(program).model
    show = ProgramObserver(seen.engine)  # type: ignore[arg-type]
    for begin in range(0, 64, 16):
        part = DOCUMENTS[2][begin : begin + 16]
        for model in (seen, plain):
            model.write_tokens(part)
        seen.verify(lambda call: [None for _ in show.run(call)])
        plain.verify()
        np.testing.assert_array_equal(seen.read("logits"), plain.read("logits"))
        for model in (seen, plain):
            model.state.commit(16)
