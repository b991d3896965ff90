"""The self-test of a server before it takes plans, over a real session with random weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from constrained import package

from thor_dflash.config import EngineConfig
from thor_dflash.errors import ConfigError, ModelFault
from thor_dflash.progress import Silent
from thor_dflash.runtime.session import Request, Session, open_session
from thor_dflash.serve_config import ServeConfig
from thor_dflash.serving.live import SELF_TOKENS, LiveBackend

CONFIG = ServeConfig(thinking_budget=24, max_tokens=40)


@pytest.fixture
def backend(session: Session) -> LiveBackend:
    return LiveBackend(session, CONFIG)


def test_the_self_test_measures_and_signs(backend: LiveBackend) -> None:
    backend.warm()
    first = backend.about.golden_sha256
    assert first
    assert backend.rates.cycle_ms > 0
    assert all(backend.rates.step_ms[rows] > 0 for rows in backend.session.model.step_sizes)
    assert backend.rates.bound_ms() >= backend.rates.cycle_ms
    backend.warm()
    assert backend.about.golden_sha256 == first


def test_the_self_test_fits_a_context_that_is_shorter_than_it() -> None:
    config = EngineConfig(threads=1, capacity=80)
    short = LiveBackend(open_session(package(), config, Silent()), CONFIG)
    prompt = short._self_test()
    assert len(prompt) < short.session.model.limit < len(prompt) + SELF_TOKENS
    short.warm()
    assert short.about.golden_sha256
    short.close()


def test_the_self_test_notices_a_drafter_that_changes_the_answer(
    backend: LiveBackend, monkeypatch: pytest.MonkeyPatch
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
def test_a_context_without_room_for_the_self_test_is_named(
    backend: LiveBackend, monkeypatch: pytest.MonkeyPatch, capacity: int
) -> None:
    monkeypatch.setattr(backend.session.model, "capacity", capacity)
    with pytest.raises(ConfigError, match=rf"engine.capacity must be .*\(got {capacity}\)") as e:
        backend.warm()
    least = int(str(e.value).split()[5])
    monkeypatch.setattr(backend.session.model, "capacity", least - 1)
    with pytest.raises(ConfigError, match=f"at least {least} to serve"):
        backend.warm()
    monkeypatch.setattr(backend.session.model, "capacity", least)
    backend.warm()
