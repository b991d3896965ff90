"""Forced answers: what a gateway passes on. What a session does with them: calib/replay."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.recorded_traces import rows, write

from thor_dflash.calib.replay.recorded_trace import read_trace
from thor_dflash.config.serving import ServeConfig
from thor_dflash.core.errors import PlanError
from thor_dflash.serving.client import Message, PlanRequest
from thor_dflash.serving.gateway import openai_api
from thor_dflash.serving.planner.mock_backend import MockBackend
from thor_dflash.serving.protocol.codec import convert


def test_a_mock_forces_nothing() -> None:
    with pytest.raises(PlanError) as error:
        MockBackend(ServeConfig(allow_forced=True)).prepare(
            PlanRequest(prompt="x", forced_answer=Message(role="assistant", content="Done.")), None
        )
    assert error.value.field == "forced_answer"


def test_the_gateway_passes_it_on_by_name(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path / "t.jsonl", rows(1, 1)))
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
