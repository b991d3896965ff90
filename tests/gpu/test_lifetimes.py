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
from thor_dflash.plugins.cuda.driver import Driver
from thor_dflash.runtime.decoding.proposers import DflashDrafter, NoDrafter
from thor_dflash.runtime.engines.cuda import graph_capture as capturing
from thor_dflash.runtime.engines.cuda.graph_capture import capture
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
    real, done = capturing.enqueue, list[bool]()

    def enqueue(*arguments: Any, **options: Any) -> None:
        if not done:
            done.append(True)
            do()
        real(*arguments, **options)

    monkeypatch.setattr(capturing, "enqueue", enqueue)
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


def test_a_finaliser_of_another_engine_in_a_capture_does_not_disturb_it(
    made: Path, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(open_session(made, EngineConfig(), Silent())) as other:
        left = abandoned(other)
        done = in_a_capture(monkeypatch, left.close)
        assert other.model.engine.replay.times.left  # type: ignore[attr-defined]
        found = answer(session, request(session, 1), DflashDrafter())
        assert done
        assert other.report().finish == "cancelled"
        assert other.report().phases_ms["propose+verify+accept+observe"] > 0
        assert found == answer(other, request(other, 1), DflashDrafter())


def test_a_capture_that_fails_leaves_a_stream_that_can_be_used() -> None:
    with closing(Driver()) as driver:
        memory = driver.allocate(1 << 20)

        def fill() -> None:
            driver("cuMemsetD8Async", memory, 7, 1 << 20, driver.stream)

        def fail() -> None:
            driver.make("cuEventCreate", 0)
            raise ZeroDivisionError

        before = [*driver._made]
        with pytest.raises(ZeroDivisionError):
            capture("fails", driver, [fill, fail], graph=True)
        assert driver._made == before
        driver.synchronize()
        capture("works", driver, [fill, fill], graph=True).run()
        driver.synchronize()


def test_a_context_that_others_keep_keeps_nothing_of_a_closed_driver() -> None:
    with closing(Driver(shared=True)) as other:
        other.synchronize()
        before = other.free_memory()
        for _ in range(3):
            with closing(Driver(shared=True)) as driver:
                memory = driver.allocate(1 << 30)
                driver.pinned(1 << 24)

                def fill(driver: Driver = driver, memory: int = memory) -> None:
                    driver("cuMemsetD8Async", memory, 7, 1 << 30, driver.stream)

                capture("fill", driver, [fill] * 9, graph=True).run()
        other.enter()
        other.synchronize()
        assert other.free_memory() > before - (1 << 28)
