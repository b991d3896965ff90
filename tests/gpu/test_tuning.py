"""Tuning on a device: found again, and lossless."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from support.loop_models import DEAD, answer, erring
from support.planner_nano import package, request

from thor_dflash.config.engine import EngineConfig
from thor_dflash.core.errors import PackageError
from thor_dflash.core.progress import Silent
from thor_dflash.runtime.decoding.proposers import DflashDrafter, NoDrafter
from thor_dflash.runtime.engines.cuda.engine import CudaEngine
from thor_dflash.runtime.measure.tune import Tuning, needed, tune_package
from thor_dflash.runtime.session import Session, open_session
from thor_dflash.runtime.session.prefix_file import StoredPrefix, read_prefix, write_prefix

pytestmark = pytest.mark.gpu
EQUAL = 1.02
"""Chains that differ by less are equally fast."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return package(tmp_path_factory.mktemp("tuning") / "nano", engine="cuda")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    return EngineConfig(tunings=str(tmp_path_factory.mktemp("tunings")))


@pytest.fixture(scope="module")
def tuned(made: Path, config: EngineConfig) -> Tuning:
    found = tune_package(made, config, Silent())
    assert found.measured
    assert not found.left
    return found


def hold(session: Session) -> None:
    """Law 1."""
    for index in range(0, 120, 24):
        asked = request(session, index)
        truth = answer(session, asked, NoDrafter())
        for proposer in (DEAD, erring(truth, 0.2, index), DflashDrafter()):
            assert answer(session, asked, proposer) == truth


def test_a_tuned_package_is_lossless_and_ready(
    made: Path, config: EngineConfig, tuned: Tuning
) -> None:
    assert not needed(made, config)
    with closing(open_session(made, replace(config, tune="required"), Silent())) as session:
        assert ("tuned" in session.model.engine.device) == bool(tuned.record.choices())
        hold(session)


def test_tuning_finds_the_same_again(made: Path, config: EngineConfig, tuned: Tuning) -> None:
    second = tune_package(made, config, Silent(), again=True).record
    alike = 0
    for key, one in tuned.record.launches.items():
        other = second.launches[key]
        first = one.candidates[one.chosen].choice
        was = next(c for c in other.candidates if c.choice == first)
        alike += sum(was.us) <= EQUAL * sum(other.candidates[other.chosen].us)
    print(f"{alike} of {len(second.launches)}")
    assert alike >= 0.9 * len(second.launches)


@pytest.fixture
def every_other(tmp_path: Path, config: EngineConfig, tuned: Tuning, made: Path) -> EngineConfig:
    """The configuration with a record of other choices than the rules' wherever there are any."""
    others = {
        key: replace(one, chosen=len(one.candidates) - 1)
        for key, one in tuned.record.launches.items()
    }
    other = replace(config, tunings=str(tmp_path))
    with closing(CudaEngine(made, other, Silent())) as engine:
        engine.tunings.write(replace(tuned.record, launches=others))
    return other


@pytest.fixture
def session(made: Path, every_other: EngineConfig) -> Iterator[Session]:
    with closing(open_session(made, every_other, Silent())) as opened:
        yield opened


def test_other_choices_are_lossless_and_have_another_name(
    made: Path, session: Session, tmp_path: Path
) -> None:
    assert "tuned" in session.model.engine.device
    hold(session)
    session.model.state.reset()
    path, stored = tmp_path / "prefix", StoredPrefix("p", (1, 2, 3), False, 0)
    write_prefix(path, session.model, stored, session.model.state.snapshot())
    off = EngineConfig(tune="off")
    with (
        closing(open_session(made, off, Silent())) as rules,
        pytest.raises(PackageError, match="device"),
    ):
        read_prefix(path, rules.model, 1 << 30)
