"""Answers that cannot be encoded, since a model may write anything: each is answered by an error or
without a plan, and the server goes on.
"""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs

from thor_dflash.config.serving import ServeConfig
from thor_dflash.serving.client import Options, PlanRequest, RemotePlanner
from thor_dflash.serving.planner import mock_backend
from thor_dflash.serving.planner.mock_backend import MockBackend
from thor_dflash.serving.protocol import messages
from thor_dflash.serving.protocol.codec import JSON, MSGPACK, Codec

SMALL = {"op": "plan", "prompt": "x", "thinking": "off"}
HUGE = "123456789012345678901234567890"


@pytest.mark.parametrize("codec", [JSON, MSGPACK])
@pytest.mark.parametrize("value", [HUGE, '"\\ud800"', "NaN", "1e999"])
def test_an_answer_that_the_protocol_cannot_carry_is_no_plan(
    house: Any, monkeypatch: pytest.MonkeyPatch, codec: Codec, value: str
) -> None:
    text = f'{{"steps":[{{"id":1}},{{"id":{value}}}]}}'
    monkeypatch.setattr(mock_backend, "PLAN", text)
    with RemotePlanner(house.mock().endpoints[0], Options(codec=codec, retries=0)) as planner:
        ask = PlanRequest(prompt="x", thinking="off", stream="steps")
        *chunks, result = planner.stream(ask)
        assert [chunk.step for chunk in chunks] == [{"id": 1}]
        assert (result.plan, result.plan_valid, result.status) == (None, False, "ok")
        assert result.text == text, "as where the answer is no JSON at all"
        schema = {"type": "object"}
        result = planner.plan(structs.replace(ask, stream=False, json_schema=schema))
        assert (result.plan, result.plan_valid, result.status) == (None, False, "error")


class Unwritable(MockBackend):
    """A mock whose plan `bad` holds an object that no codec can encode, in every chunk or in the
    result.
    """

    def __init__(self, where: str) -> None:
        super().__init__(ServeConfig())
        self.where = where

    def start(self, prepared: Any, left_ms: float | None) -> Any:
        run: Any = super().start(prepared, left_ms)
        if prepared.ask.id != "bad":
            return run
        if self.where == "chunk":
            run._writer = Chunks()
        else:
            whole = run.result
            run.result = lambda stop: structs.replace(whole(stop), plan=object())
        return run


class Chunks:
    def prefill(self, tokens: int) -> list[messages.Chunk]:
        return []

    def cycle(self, pieces: Any, tokens: int) -> list[messages.Chunk]:
        return [messages.Chunk(kind="step", step=object(), index=0)]


@pytest.mark.parametrize("where", ["chunk", "result"])
def test_what_cannot_be_written_is_an_internal_error_and_ends_nothing(
    house: Any, where: str
) -> None:
    server = house.serve(Unwritable(where))
    peer, other = house.peer(server), house.peer(server)
    peer.send(**SMALL, id="bad", stream="steps")
    while (reply := peer.receive())["type"] == "chunk":
        assert where == "result"
    assert (reply["id"], reply["code"]) == ("bad", "internal")
    assert any("TypeError" in line for line in house.log), "it is reported in the log"
    house.log[:] = [line for line in house.log if "Traceback" not in line]
    assert peer.ask(**SMALL, id="good")["plan"], "and it was the one answer"
    assert other.ask(**SMALL, id="good")["plan"]
    stats = other.ask(op="stats", id="s")
    assert stats["refused"] == {"internal": 1}
