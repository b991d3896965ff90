"""OpenAI's own client against a gateway with several servers."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from msgspec import structs
from openai import APIStatusError, NotFoundError
from support.http_gateway import CHAT, client, gateway, get
from support.waiting import until

from thor_dflash.config.serving import ServeConfig
from thor_dflash.serving.planner.mock_backend import MockBackend
from thor_dflash.serving.protocol.replies import ModelReply


def ask(address: str, **fields: Any) -> Any:
    """The completion of a chat, or the code of its refusal."""
    with client(address) as openai:
        try:
            return openai.chat.completions.create(model="", messages=CHAT, extra_body=fields)
        except APIStatusError as e:
            return e.code


def test_the_newest_plan_of_a_session_displaces_the_one_that_runs(house: Any) -> None:
    pairs = [house.held() for _ in range(2)]
    answers: dict[str, Any] = {}
    with gateway(*(server.endpoints[0] for server, _ in pairs)) as address:

        def begin(name: str) -> threading.Thread:
            def run() -> None:
                answers[name] = ask(address, session="arm")

            thread = threading.Thread(target=run)
            thread.start()
            return thread

        until(lambda: get(f"{address}/health").count('"state":"ready"') == 2)
        old = begin("old")
        until(lambda: any(held.waiting.is_set() for _, held in pairs))
        new = begin("new")
        until(lambda: get(f"{address}/health").count('"waiting":1') == 1)
        for server, held in pairs:
            # Plans are checked before validations: after this answer the new plan is accepted.
            house.peer(server).ask(op="validate", id="v", prompt="x")
            held.let()
        old.join(20)
        new.join(20)
    assert answers["old"] == "preempted"
    assert answers["new"].choices[0].finish_reason == "stop"


class Other(MockBackend):
    """A mock with another name."""

    @property
    def about(self) -> ModelReply:
        return structs.replace(super().about, model="other")


@pytest.mark.parametrize("stream", [False, True])
def test_the_model_that_is_asked_for_answers_and_is_named(house: Any, stream: bool) -> None:
    other = house.serve(Other(ServeConfig()))
    servers = {"mock": house.mock(), "other": other}
    with (
        gateway(*(server.endpoints[0] for server in servers.values())) as address,
        client(address) as openai,
    ):

        def named(model: str) -> set[str]:
            answer = openai.chat.completions.create(model=model, messages=CHAT, stream=stream)
            return {piece.model for piece in answer} if stream else {answer.model}

        def asked(model: str) -> int:
            stats = house.peer(servers[model]).ask(op="stats", id="s")
            return int(stats["requests"].get("plan", 0))

        for count in (1, 2):
            for model in servers:
                assert named(model) == {model}
                assert asked(model) == count
        (model,) = named("")
        assert asked(model) == 3
        with pytest.raises(NotFoundError, match="got othr; did you mean other?") as caught:
            named("othr")
        error = caught.value
        assert (error.code, error.param) == ("model_not_found", "model")
        assert error.type == "invalid_request_error"
        assert error.response.headers["x-should-retry"] == "false"
