"""A recorded trace over HTTP: the benchmark's fields, what is measured of a stream, and servers
that fail.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from support.recorded_traces import rows, write

from thor_dflash.calib.replay import bfcl
from thor_dflash.calib.replay.http_replay import HttpReplay
from thor_dflash.calib.replay.openai_client import OpenAIConnection
from thor_dflash.calib.replay.recorded_trace import RecordedTrace, read_trace
from thor_dflash.core.errors import PlanError, RequestError

Answer = Callable[[dict[str, Any]], list[object] | int]
"""Body -> the chunks of a stream, or a status."""
CALL = [
    {"choices": [{"delta": {"role": "assistant"}}]},
    {"choices": [{"delta": {"tool_calls": [
        {"index": 0, "id": "a", "function": {"name": "bash", "arguments": ""}}]}}]},
    {"choices": [{"delta": {"tool_calls": [
        {"index": 0, "function": {"arguments": '{"command": '}}]}}]},
    {"choices": [{"delta": {"tool_calls": [{"index": 0, "function": {"arguments": '"ls"}'}},
                                           {"index": 1, "function": {"name": "bash"}}]},
                  "finish_reason": "tool_calls"}]},
    {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 7,
                              "prompt_tokens_details": {"cached_tokens": 4}}},
]  # fmt: skip


class Stand(ThreadingHTTPServer):
    """An OpenAI server whose answers a test chooses."""

    daemon_threads = True

    def __init__(self, answer: Answer) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answer = answer
        self.got: list[tuple[dict[str, Any], dict[str, str]]] = []
        self.connections = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Stand

    def setup(self) -> None:
        super().setup()
        self.server.connections += 1

    def do_GET(self) -> None:
        self.reply(200, json.dumps({"data": [{"id": "stand"}]}).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.got.append((body, dict(self.headers)))
        found = self.server.answer(body)
        if isinstance(found, int):
            error = {"error": {"message": "temperature must be 0 (got 1)"}}
            self.reply(found, json.dumps(error).encode())
            return
        ends = [] if None in found else ["data: [DONE]\n\n"]
        events = [f"data: {json.dumps(one)}\n\n" for one in found if one is not None]
        self.reply(200, "".join([": hello\n\n", *events, *ends]).encode())

    def reply(self, status: int, data: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def serving(answer: Answer) -> Iterator[tuple[Stand, OpenAIConnection]]:
    with Stand(answer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with closing(OpenAIConnection(server.url, {}, timeout_s=5)) as connection:
            yield server, connection
        server.shutdown()


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> RecordedTrace:
    return read_trace(write(tmp_path_factory.mktemp("trace") / "t.jsonl", rows(2, 3)))


def test_turns_are_sent_as_the_benchmark_sends_them(trace: RecordedTrace) -> None:
    with serving(lambda body: [*CALL]) as (server, connection):
        replay = HttpReplay(connection, connection.model(), plain=True)
        found = list(replay.run(trace))
        assert server.connections == 1
        assert [(t.conversation, t.turn) for t in found] == [
            (f"c{i}", turn) for i in range(2) for turn in (1, 2, 3)
        ]
        for (body, headers), turn in zip(server.got, found, strict=True):
            assert headers["X-Session-ID"] == turn.conversation
            rest = {k: v for k, v in body.items() if k not in ("messages", "tools")}
            assert rest == {"model": "stand", "temperature": 0.0, "seed": 42,
                            "max_completion_tokens": 1024, "stream": True}  # fmt: skip
            roles = [message["role"] for message in body["messages"]]
            assert roles == ["system", "user", *["assistant", "tool"] * (turn.turn - 1)]
        answer = server.got[1][0]["messages"][2]
        assert set(answer) == {"role", "reasoning_content", "tool_calls"}, "no content, as recorded"
        assert isinstance(answer["tool_calls"][0]["function"]["arguments"], str)


def test_what_is_measured(trace: RecordedTrace) -> None:
    with serving(lambda body: [*CALL]) as (server, connection):
        extra = {"x": 1}
        [turn] = HttpReplay(connection, "m", extra=extra).run(trace.first(1, 1))
    body = server.got[0][0]
    assert (body["stream_options"], body["x"]) == ({"include_usage": True}, 1)
    assert (turn.prompt_tokens, turn.cached_tokens, turn.answer_tokens) == (9, 4, 7)
    assert (turn.finish, turn.calls, turn.overlap) == ("tool_calls", 2, 1.0)
    assert turn.ttft_ms is not None
    assert turn.decode_ms is not None
    assert 0 < turn.ttft_ms < 5000


def test_a_server_that_does_not_force_the_answer_ends_the_replay(trace: RecordedTrace) -> None:
    """Others ignore fields that they do not know, and would be measured with their own answers."""
    last = {"choices": [], "thor_dflash": {"finish_reason": "forced"}}
    with serving(lambda body: [*CALL, *([last] if "x" in body else [])]) as (server, connection):
        for extra in ({}, {"x": 1}):
            replay = HttpReplay(connection, "m", forced=3.0, extra=extra)
            [turn] = replay.run(trace.first(1, 1))
            assert bool(turn.error) == (not extra)
    assert (turn.finish, turn.overlap) == ("forced", None)
    assert server.got[0][0]["forced_accept"] == 3.0
    assert server.got[0][0]["forced_answer"] == trace.conversations[0].turns[0].answer


@pytest.mark.parametrize(
    "answer", [400, [CALL[0], None], [{"error": {"message": "no"}}]], ids=["400", "cut", "error"]
)
def test_an_error_ends_a_conversation_and_the_next_one_is_answered(
    trace: RecordedTrace, answer: list[object] | int
) -> None:
    def second(body: dict[str, Any]) -> list[object] | int:
        roles = [message["role"] for message in body["messages"]]
        return answer if len(server.got) == 2 and roles[-1] == "tool" else [*CALL]

    with serving(second) as (server, connection):
        found = list(HttpReplay(connection, "m").run(trace))
    assert [bool(turn.error) for turn in found] == [False, True, False, False, False]


def test_a_server_that_is_not_there() -> None:
    with serving(lambda body: []) as (server, _):
        url = server.url
    with pytest.raises(PlanError) as error:
        OpenAIConnection(url, {}, timeout_s=1).model()
    assert error.value.code == "unreachable"
    for wrong in ("127.0.0.1:8000", "ftp://x/v1", "http://x:abc/v1"):
        with pytest.raises(RequestError):
            OpenAIConnection(wrong, {})


# ---- bfcl ----------------------------------------------------------------------------------------
def sample(subset: str, category: str, name: str = "bash") -> dict[str, Any]:
    tool = {"type": "function", "function": {"name": name}}
    return {"sample_id": f"{subset}_0", "subset": subset, "category": category,
            "messages": [{"role": "user", "content": subset}], "tools": [tool],
            "functions": [{"name": name}], "ground_truth": []}  # fmt: skip


def test_bfcl_without_its_checker_judges_the_form(tmp_path: Path) -> None:
    lines = [
        sample("simple_python", "non_live"),
        sample("simple_java", "non_live", "other"),
        sample("multiple", "non_live"),
        sample("irrelevance", "hallucination"),
        sample("live_irrelevance", "hallucination"),
    ]
    samples = bfcl.read_samples(write(tmp_path / "s.jsonl", lines))

    def answer(body: dict[str, Any]) -> list[object]:
        assert body["tool_choice"] == "auto"
        text = body["messages"][0]["content"]
        answer = {"choices": [{"delta": {"content": "no"}, "finish_reason": "stop"}]}
        return [answer] if text == "irrelevance" else [*CALL[:3], CALL[3] | {"usage": None}]

    # The second call of CALL has no arguments, which means an empty object.
    with serving(answer) as (_, connection):
        found = bfcl.report(list(bfcl.run(connection, "m", samples, None)), scored=False)
    assert [v.right for v in found.verdicts] == [True, False, True, True, False]
    assert found.categories == {"non_live": 75.0, "hallucination": 50.0}
    assert (found.overall, found.normalised, found.failed) == (60.0, 62.5, 0)


def test_bfcl_means() -> None:
    def verdicts(subset: str, category: str, *rights: bool) -> list[bfcl.BfclVerdict]:
        return [bfcl.BfclVerdict("", subset, category, right=right) for right in rights]

    found = bfcl.report(
        [
            *verdicts("simple_python", "non_live", True, True),
            *verdicts("simple_java", "non_live", False),
            *verdicts("parallel", "non_live", True),
            *verdicts("live_simple", "live", True, True, True),
            *verdicts("live_multiple", "live", False),
        ],
        scored=True,
    )
    assert found.categories == {"non_live": 75.0, "live": 75.0}
    assert found.overall == 100 * 6 / 8


@pytest.mark.parametrize("text", ["", "[]", "{", '{"sample_id": "a"}', '{"a": 1}\n'])
def test_files_that_hold_no_samples_and_no_conversations(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(text)
    with pytest.raises(RequestError):
        bfcl.read_samples(path)
    with pytest.raises(RequestError):
        read_trace(path)


@pytest.mark.parametrize(
    "row",
    [
        {"conversation_id": 1, "role": "user"},
        {"conversation_id": "a", "role": "tool", "tool_results": []},
        {"conversation_id": "a", "role": "system"},
    ],
)
def test_rows_that_are_no_messages(tmp_path: Path, row: dict[str, Any]) -> None:
    with pytest.raises(RequestError):
        read_trace(write(tmp_path / "t.jsonl", [row]))
