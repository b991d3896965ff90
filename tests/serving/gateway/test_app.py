"""OpenAI's own client against the gateway over mock servers."""

from __future__ import annotations

import http.client
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from openai import APIStatusError, AuthenticationError, BadRequestError, NotFoundError, OpenAI
from support.http_gateway import CHAT, client, gateway, get
from support.waiting import until

from thor_dflash.serving.planner.mock_backend import PLAN, THINKING


def test_a_completion(house: Any) -> None:
    with gateway(house.mock().endpoints[0]) as address, client(address) as openai:
        answer = openai.chat.completions.create(model="mock", messages=CHAT)
        choice = answer.choices[0]
        assert choice.message.content == PLAN
        assert choice.message.reasoning_content.strip() == THINKING.strip()
        assert choice.finish_reason == "stop"
        assert answer.usage.completion_tokens_details.reasoning_tokens > 0
        assert answer.thor_dflash["plan_valid"] is True
        assert answer.thor_dflash["timings"]["e2e_ms"] > 0
        short = openai.chat.completions.create(model="mock", messages=CHAT, max_tokens=5)
        assert (short.choices[0].finish_reason, short.model) == ("length", "mock")
        off = openai.chat.completions.create(
            model="mock", messages=CHAT, reasoning_effort="none", extra_body={"session": "arm"}
        )
        assert off.usage.completion_tokens_details.reasoning_tokens == 0


def test_a_stream_keeps_thinking_and_answer_apart(house: Any) -> None:
    with gateway(house.mock().endpoints[0]) as address, client(address) as openai:
        pieces = list(
            openai.chat.completions.create(
                model="mock", messages=CHAT, stream=True, stream_options={"include_usage": True}
            )
        )
    deltas = [piece.choices[0].delta for piece in pieces if piece.choices]
    assert "".join(delta.content or "" for delta in deltas).rstrip() == PLAN
    thought = "".join((delta.model_extra or {}).get("reasoning_content") or "" for delta in deltas)
    assert thought.strip() == THINKING.strip()
    assert pieces[-2].choices[0].finish_reason == "stop"
    assert pieces[-1].usage.prompt_tokens > 0


def test_a_schema_and_what_is_refused(house: Any) -> None:
    with gateway(house.mock().endpoints[0]) as address, client(address) as openai:

        def ask(**fields: Any) -> Any:
            return openai.chat.completions.create(model="mock", messages=CHAT, **fields)

        schema = {"type": "object", "required": ["goal"]}
        wrapped = {"type": "json_schema", "json_schema": {"name": "plan", "schema": schema}}
        assert ask(response_format=wrapped).thor_dflash["plan_valid"] is True
        skills = {"format": "tdp.skills.v1", "skills": {"wait": {}}}
        tree = ask(extra_body={"skills": skills, "plan_format": "bt_cpp_xml"})
        assert tree.choices[0].message.content == tree.thor_dflash["plan"]["body"]
        assert "<Wait/>" in tree.thor_dflash["plan"]["body"]
        wrong = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "strin"}}}
        for fields, name in (
            ({"extra_body": {"prefix_id": "none"}}, "prefix_id"),
            ({"max_completion_tokens": 1 << 40}, "max_completion_tokens"),
            ({"response_format": wrong}, "response_format.json_schema.schema"),
            ({"extra_body": {"skills": {**skills, "ids": {"o": 1}}}}, "skills.ids.o"),
            ({"extra_body": {"plan_format": "bt_cpp_xml"}}, "plan_format"),
        ):
            with pytest.raises(BadRequestError) as caught:
                ask(**fields)
            assert caught.value.param == name, fields
        with pytest.raises(BadRequestError) as caught:
            openai.chat.completions.create(
                model="mock", messages=[{"role": "user", "content": "x " * 9000}]
            )
        assert (caught.value.code, caught.value.param) == ("prompt_too_long", "messages")


@pytest.mark.parametrize("kind", [None, "text/plain"])
def test_a_web_page_cannot_ask_for_plans(house: Any, kind: str | None) -> None:
    """Of these types a browser sends a body to any server, without asking it first."""
    server = house.mock()
    with gateway(server.endpoints[0]) as address:
        page = http.client.HTTPConnection(address.removeprefix("http://"), timeout=20)
        page.request(
            "POST", "/v1/chat/completions", msgspec.json.encode({"messages": CHAT}),
            {"Content-Type": kind} if kind else {},
        )  # fmt: skip
        reply = page.getresponse()
        error = msgspec.json.decode(reply.read())["error"]
        page.close()
    assert (reply.status, error["code"]) == (400, "bad_request")
    assert "plan" not in house.peer(server).ask(op="stats", id="s")["requests"]


def test_models_health_and_metrics(house: Any) -> None:
    servers = [house.mock().endpoints[0], "ipc:///nowhere/plan"]
    with gateway(*servers) as address, client(address) as openai:
        openai.chat.completions.create(model="mock", messages=CHAT)
        end = time.monotonic() + 20
        while not (names := [model.id for model in openai.models.list()]):
            assert time.monotonic() < end
        assert names == ["mock"]
        health = msgspec.json.decode(get(f"{address}/health"))
        assert health["ready"] is True
        assert health["servers"][servers[1]] is None
        text = get(f"{address}/metrics")
    assert f'thor_dflash:up{{server="{servers[0]}"}} 1.0' in text
    assert f'thor_dflash:up{{server="{servers[1]}"}} 0.0' in text
    assert 'thor_dflash:request_success_total{finished_reason="stop"' in text
    for name in ("cache_queries_total", "cache_hits_total", "cache_bytes", "cache_boundaries"):
        assert f'thor_dflash:prefix_{name}{{server="{servers[0]}"}} 0.0' in text
    for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens"):
        assert f"thor_dflash:spec_decode_{name}_total" in text


def test_a_wrong_url_is_an_error_as_openai_has_it(house: Any) -> None:
    """The commonest mistake is a base_url without /v1."""
    with gateway(house.mock().endpoints[0]) as address, client(address) as openai:
        with pytest.raises(NotFoundError) as caught:
            openai.with_options(base_url=address).chat.completions.create(model="", messages=CHAT)
        assert caught.value.code == "unknown_url"
        assert "/v1/chat/completions" in caught.value.message
        with pytest.raises(APIStatusError) as refused:
            openai.get("/chat/completions", cast_to=object)
        assert (refused.value.status_code, refused.value.code) == (405, "method_not_supported")
        assert refused.value.response.headers["allow"] == "POST"
        assert refused.value.response.headers["x-should-retry"] == "false"


def test_without_a_server_it_says_so(house: Any) -> None:
    with gateway("ipc:///nowhere/plan") as address, client(address) as openai:
        with pytest.raises(APIStatusError) as caught:
            openai.chat.completions.create(model="", messages=CHAT, extra_body={"deadline_ms": 100})
        assert (caught.value.status_code, caught.value.code) in ((503, "unreachable"),)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_tries_again_does_not_displace_the_plan_that_displaced_its_own(
    house: Any, stream: bool
) -> None:
    server, held = house.held()
    peer = house.peer(server)
    answers: dict[str, Any] = {}

    def ask(name: str) -> None:
        # With its default options: it tries twice more unless the reply tells it not to.
        with OpenAI(base_url=f"{address}/v1", api_key="none") as openai:
            try:
                create = openai.chat.completions.create
                answer = create(
                    model="", messages=CHAT, stream=stream, extra_body={"session": "arm"}
                )
                answers[name] = list(answer) if stream else answer
            except APIStatusError as e:
                answers[name] = e.code

    with gateway(server.endpoints[0]) as address:
        threads = [threading.Thread(target=ask, args=(name,)) for name in ("old", "new")]
        threads[0].start()
        assert held.waiting.wait(20)
        threads[1].start()
        until(lambda: peer.ask(op="health", id="h")["waiting"] == 1)
        # Plans are checked before validations: after this answer the new plan is accepted.
        peer.ask(op="validate", id="v", prompt="x")
        held.let(1)
        threads[0].join(20)
        assert answers == {"old": "preempted"}
        held.let()
        threads[1].join(20)
        assert answers["new"] != "preempted"
        assert peer.ask(op="stats", id="s")["requests"]["plan"] == 2


def test_a_server_with_a_secret(house: Any, tmp_path: Path) -> None:
    secret = tmp_path / "token"
    secret.write_text("open sesame\n")
    secret.chmod(0o600)
    server = house.mock(token_file=str(secret)).endpoints[0]
    with gateway(server, token_file=str(secret)) as address, client(address) as openai:
        answer = openai.chat.completions.create(model="mock", messages=CHAT)
        assert answer.choices[0].message.content == PLAN
    with (
        gateway(server) as address,
        client(address) as openai,
        pytest.raises(AuthenticationError, match="token"),
    ):
        openai.chat.completions.create(model="mock", messages=CHAT)


def test_a_reader_that_leaves_cancels_its_plan(house: Any) -> None:
    server, held = house.held()
    held.let(2)
    with gateway(server.endpoints[0]) as address, client(address) as openai:
        stream = openai.chat.completions.create(model="mock", messages=CHAT, stream=True)
        next(iter(stream))
        assert held.waiting.wait(20)
        stream.close()
        peer = house.peer(server)
        while not peer.ask(op="stats", id="s")["requests"].get("cancel"):
            time.sleep(0.005)
        held.let()
        while not held.ended:
            time.sleep(0.005)
    assert held.ended == ["cancelled"]
