"""On a device: finalisers in the middle of a capture, captures that fail, and what a closed driver
frees in a context that others keep.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from support.loop_models import answer
from support.planner_nano import package, request

from thor_dflash.config.engine import EngineConfig
from thor_dflash.core.progress import Silent
from thor_dflash.runtime.decoding.proposers import DflashDrafter, NoDrafter
from thor_dflash.runtime.engines.cuda import engine as cuda_engine
from thor_dflash.runtime.session import Session, open_session

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return package(tmp_path_factory.mktemp("lifetimes") / "nano", engine="cuda")


@pytest.fixture
def session(made: Path) -> Iterator[Session]:
    with closing(open_session(made, EngineConfig(), Silent())) as opened:
        yield opened


def abandoned(s: Session) -> Any:
    """A request that was left after its first cycle, whose step may still be going on."""
    chunks = s.run(request(s, 0, 64), DflashDrafter())
    next(chunk for chunk in chunks if chunk.tokens)
    return chunks


def in_a_capture(monkeypatch: pytest.MonkeyPatch, do: Callable[[], object]) -> list[bool]:
    """Do something once, before the next capture's first kernel; the list then has an entry."""
    real, done = cuda_engine.enqueue, list[bool]()

    def enqueue(*arguments: Any, **options: Any) -> None:
        if not done:
            done.append(True)
            do()
        real(*arguments, **options)

    monkeypatch.setattr(cuda_engine, "enqueue", enqueue)
    return done


def test_a_finaliser_in_a_capture_of_its_own_engine_does_not_disturb_it(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    left, engine = abandoned(session), session.model.engine
    done = in_a_capture(monkeypatch, left.close)
    assert engine.replay.times.left  # type: ignore[attr-defined]
    engine.run([session.model.call("verify")])  # never run alone before
    assert done
    plain = answer(session, request(session, 1), NoDrafter())
    assert plain == answer(session, request(session, 1), DflashDrafter())
