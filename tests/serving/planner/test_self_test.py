"""The self-test of a server before it takes plans, over a real session with random weights."""

from __future__ import annotations

import io
from dataclasses import replace
from itertools import count
from typing import Any

import pytest

from thor_dflash.config.serving import ServeConfig
from thor_dflash.core.errors import ConfigError, ModelFault
from thor_dflash.core.progress import Lines
from thor_dflash.runtime.session import Request, Session
from thor_dflash.serving.planner import self_test, session_backend
from thor_dflash.serving.planner.session_backend import SessionBackend

CONFIG = ServeConfig(thinking_budget=24, max_tokens=40)
SHORT = ServeConfig(thinking="off", max_tokens=8)
"""Fits every context that the self-test fits."""


@pytest.fixture
def backend(session: Session) -> SessionBackend:
    return SessionBackend(session, CONFIG)


def test_the_self_test_measures_and_signs(session: Session) -> None:
    out = io.StringIO()
    backend = SessionBackend(session, CONFIG, progress=Lines(out, count().__next__))
    backend.warm()
    assert f"self-test done: {4 * self_test.TOKENS} tokens" in out.getvalue()
    first = backend.about.golden_sha256
    assert first
    assert backend.rates.cycle_ms > 0
    assert all(backend.rates.step_ms[rows] > 0 for rows in backend.session.model.step_sizes)
    assert backend.rates.bound_ms() >= backend.rates.cycle_ms
    backend.warm()
    assert backend.about.golden_sha256 == first


def test_the_self_test_notices_a_drafter_that_changes_the_answer(
    backend: SessionBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    generate = backend.session.generate

    def lossy(request: Request) -> Any:
        for chunk in generate(request):
            wrong = request.drafter == "dflash" and chunk.tokens
            yield replace(chunk, tokens=chunk.tokens[:-1]) if wrong else chunk

    monkeypatch.setattr(backend.session, "generate", lossy)
    with pytest.raises(ModelFault, match="self-test"):
        backend.warm()


@pytest.mark.parametrize("capacity", [18, 40])
def test_a_context_without_space_for_the_self_test_is_named(
    session: Session, monkeypatch: pytest.MonkeyPatch, capacity: int
) -> None:
    backend = SessionBackend(session, SHORT)
    monkeypatch.setattr(backend.session.model, "capacity", capacity)
    with pytest.raises(ConfigError, match=rf"engine.capacity must be .*\(got {capacity}\)") as e:
        backend.warm()
    least = int(str(e.value).split()[5])
    monkeypatch.setattr(backend.session.model, "capacity", least - 1)
    with pytest.raises(ConfigError, match=f"at least {least} to serve"):
        backend.warm()
    monkeypatch.setattr(backend.session.model, "capacity", least)
    backend.warm()


def test_a_watchdog_that_a_step_would_trip_is_refused(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_backend, "choose_chunk", lambda *_, idle_ms: 300.0 + idle_ms)
    idle = replace(CONFIG, yield_us=200_000)
    message = r"^serve.watchdog_s must be above 0.5 s, which a prefill step .* \(got 0.5\)$"
    with pytest.raises(ConfigError, match=message):
        SessionBackend(session, replace(idle, watchdog_s=0.5)).warm()
    SessionBackend(session, replace(idle, watchdog_s=0.51)).warm()
