"""The times of a cycle's parts, measured on a device with planner-nano."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
from support.loop_models import answer
from support.planner_nano import package, request

from thor_dflash.config.engine import EngineConfig
from thor_dflash.core.progress import Silent
from thor_dflash.runtime.decoding.proposers import DflashDrafter
from thor_dflash.runtime.engines.cuda.engine import CudaEngine
from thor_dflash.runtime.measure.cycle_breakdown import take_apart
from thor_dflash.runtime.session import open_session

pytestmark = pytest.mark.gpu

CYCLE = ("propose", "verify", "accept", "observe")


def test_parts_make_the_cycle_and_leave_the_session_as_it_was(tmp_path: Path) -> None:
    made = package(tmp_path / "nano", engine="cuda")
    config = EngineConfig()
    with closing(open_session(made, config, Silent())) as session:
        asked = request(session, 0)
        before = answer(session, asked, DflashDrafter())
        engine = session.model.engine
        assert isinstance(engine, CudaEngine)
        cubins, length = config.cubins_directory, session.model.state.length
        found = take_apart(engine, session.model, CYCLE, cubins, Silent())
        assert answer(session, asked, DflashDrafter()) == before
    graphs = {part.graph: part.ms for part in found.parts if not part.name}
    assert tuple(graphs) == CYCLE
    assert found.context == length
    assert 0.6 < sum(graphs.values()) / found.cycle_ms < 1.6
    for part in found.parts:
        assert 0 < part.ms < 1.2 * graphs[part.graph] + 0.01, part
