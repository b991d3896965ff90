"""Forced answers over the wire: a recorded trace leaves the state that it leaves in process, and
only a server that allows it commits another's words.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from support.constrained_model import package
from support.http_gateway import gateway
from support.recorded_traces import TEMPLATE, rows, write

from thor_dflash.calib.replay.http_replay import HttpReplay
from thor_dflash.calib.replay.openai_client import OpenAIConnection
from thor_dflash.calib.replay.recorded_trace import RecordedTrace, read_trace
from thor_dflash.calib.replay.session_replay import SessionReplay
from thor_dflash.config.engine import EngineConfig
from thor_dflash.config.serving import ServeConfig
from thor_dflash.core.errors import PlanError
from thor_dflash.core.progress import Silent
from thor_dflash.runtime.session import Session, open_session
from thor_dflash.runtime.session.turn_cache import TurnCache
from thor_dflash.serving.client import Message, PlanRequest
from thor_dflash.serving.gateway import openai_api
from thor_dflash.serving.planner.mock_backend import MockBackend
from thor_dflash.serving.planner.session_backend import SessionBackend
from thor_dflash.serving.protocol.codec import convert
from thor_dflash.serving.server.server import serving

TURNS = 3
ALLOWED = ServeConfig(bind=("tcp://127.0.0.1:*",), allow_forced=True, thinking="off", max_tokens=32)
SAID = Message(role="assistant", content="Done.")


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    made = package(template=TEMPLATE)
    with closing(open_session(made, EngineConfig(threads=1), Silent(), reuse=8 << 20)) as opened:
        yield opened


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> RecordedTrace:
    return read_trace(write(tmp_path_factory.mktemp("trace") / "t.jsonl", rows(1, TURNS)))


def state(session: Session) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in session.model.state.snapshot().arrays.items()}


class KeptOpen(SessionBackend):
    """A backend that leaves its session to the next one, and needs no warming up."""

    def warm(self) -> None:
        self.session.turns = TurnCache(self.session.model)

    def close(self) -> None:
        pass


def test_a_trace_leaves_the_state_that_it_leaves_in_process(
    session: Session, trace: RecordedTrace
) -> None:
    local = list(SessionReplay(session, 4.5).run(trace))
    want, length = state(session), session.model.state.length
    with (
        serving(lambda: KeptOpen(session, ALLOWED), ALLOWED, log=lambda line: None) as server,
        gateway(*server.endpoints) as address,
        closing(OpenAIConnection(f"{address}/v1", {})) as connection,
    ):
        extra = {"max_completion_tokens": 32}
        replay = HttpReplay(connection, "", forced=4.5, extra=extra)
        found = list(replay.run(trace))
        refused = list(HttpReplay(connection, "", forced=99.0, extra=extra).run(trace))
    assert [turn.error for turn in found] == [""] * TURNS
    assert state(session) == want
    assert session.model.state.length == length
    for one, other in zip(found, local, strict=True):
        assert (one.finish, one.calls, one.overlap) == ("forced", 1, None)
        assert (one.cycles, one.prompt_tokens) == (other.cycles, other.prompt_tokens)
        assert one.cached_tokens == other.cached_tokens
    assert "forced_accept" in refused[0].error


@pytest.mark.parametrize(
    ("allowed", "fields", "at"),
    [
        (False, {"forced_answer": SAID}, "forced_answer"),
        (True, {"forced_accept": 2.0}, "forced_accept"),
        (True, {"forced_answer": Message(role="user", content="x")}, "forced_answer.role"),
        (True, {"forced_answer": SAID, "forced_accept": 17.0}, "forced_accept"),
        (True, {"forced_answer": Message(role="assistant", content="", tool_calls=(
            {"function": {"name": "bash", "arguments": "no"}},))},
         "forced_answer.tool_calls[0].function.arguments"),
    ],
)  # fmt: skip
def test_what_is_refused(session: Session, allowed: bool, fields: Any, at: str) -> None:
    backend = SessionBackend(session, ServeConfig(allow_forced=allowed, thinking="off"))
    with pytest.raises(PlanError) as error:
        backend.prepare(PlanRequest(prompt="x", **fields), None)
    assert error.value.code == "bad_request"
    assert error.value.message.startswith(at)


def test_a_mock_forces_nothing() -> None:
    with pytest.raises(PlanError) as error:
        MockBackend(ALLOWED).prepare(PlanRequest(prompt="x", forced_answer=SAID), None)
    assert error.value.field == "forced_answer"


def test_the_gateway_passes_it_on_by_name(trace: RecordedTrace) -> None:
    answer = trace.conversations[0].turns[0].answer
    fields = {"messages": [{"role": "user", "content": "x"}], "forced_accept": 2.5}
    plan = openai_api.plan_request(
        convert({**fields, "forced_answer": answer}, openai_api.ChatRequest)
    )
    assert plan.forced_accept == 2.5
    assert plan.forced_answer is not None
    assert plan.forced_answer.tool_calls is not None
    assert plan.forced_answer.reasoning_content == answer["reasoning_content"]
    for wrong in ({"role": "user"}, {"role": "assistant", "tool_call_id": "x"}):
        with pytest.raises(PlanError) as error:
            openai_api.plan_request(
                convert({**fields, "forced_answer": wrong}, openai_api.ChatRequest)
            )
        assert (error.value.field or "").startswith("forced_answer")
