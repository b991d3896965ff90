"""The quality report of packages that run on the device."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from support.planner_nano import package

from thor_dflash.calib.quality import compare
from thor_dflash.calib.quality.quality_report import QualityReport
from thor_dflash.calib.quality.reference_logits import LiveReference, LogitsFile, store
from thor_dflash.config.engine import EngineConfig
from thor_dflash.config.quality import QualityConfig
from thor_dflash.core.progress import Silent
from thor_dflash.runtime.session import open_session

pytestmark = pytest.mark.gpu
CONFIG = QualityConfig(tasks=6, max_tokens=512)
Compare = Callable[[Path], QualityReport]


@pytest.fixture(scope="module")
def bf16(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return package(tmp_path_factory.mktemp("cuda") / "bf16", engine="cuda", kv="bf16")


def report(reference: Path, candidate: Path) -> QualityReport:
    """The report of two packages loaded beside each other."""
    with (
        closing(open_session(reference, EngineConfig(), Silent())) as one,
        closing(open_session(candidate, EngineConfig(), Silent())) as other,
    ):
        header = compare.reference_of(one, reference, [], CONFIG, Silent())
        live = LiveReference(one, header)
        return compare.compare(live, False, other, candidate, (), CONFIG, Silent())


def test_a_package_does_not_differ_from_itself(bf16: Path) -> None:
    found = report(bf16, bf16)
    assert found.whole.most == 0.0
    assert found.whole.top1.value == 1.0
    assert found.plans is not None
    assert found.plans.valid == found.plans.valid_reference > 0
    assert all(layer.error == 0.0 for layer in found.layers)
    assert found.layers


def test_an_fp8_cache_costs_less_than_its_gate(bf16: Path, tmp_path: Path) -> None:
    found = report(bf16, package(tmp_path / "fp8", engine="cuda", kv="fp8"))
    assert 0.0 < found.whole.kl.value <= CONFIG.gates.cache_kl[0]
    assert found.cache
    assert found.verdict == "pass"


def test_the_device_agrees_with_stored_logits_of_onnx_runtime(bf16: Path, tmp_path: Path) -> None:
    other, path = package(tmp_path / "ort", engine="ort", kv="bf16"), tmp_path / "reference.npz"
    with closing(open_session(other, EngineConfig(), Silent())) as session:
        header = compare.reference_of(session, other, [], CONFIG, Silent())
        with path.open("wb") as file:
            store(file, LiveReference(session, header), Silent())
    with (
        closing(LogitsFile(path)) as stored,
        closing(open_session(bf16, EngineConfig(), Silent())) as session,
    ):
        found = compare.compare(stored, True, session, bf16, (), CONFIG, Silent())
    assert found.whole.kl.value < 1e-3
    assert found.whole.top1.value > 0.99
