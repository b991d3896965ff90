"""`thor-dflash plan`: what it sends to a server, what it prints, and what it refuses."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import sys
import typing
from pathlib import Path
from typing import Any

import pytest

from thor_dflash.cli import exit_status, main, parser
from thor_dflash.cli.commands import plan
from thor_dflash.config.serving import ServeConfig
from thor_dflash.config.tree import Config
from thor_dflash.core.errors import Code, RequestError
from thor_dflash.core.plan_table import TableConsole, plan_panel
from thor_dflash.core.progress import Lines
from thor_dflash.runtime.session import Session
from thor_dflash.serving.client import PlanError, client
from thor_dflash.serving.planner.mock_backend import PLAN, MockBackend
from thor_dflash.serving.planner.planner import LocalPlanner
from thor_dflash.serving.planner.session_backend import SessionBackend
from thor_dflash.serving.protocol import validation
from thor_dflash.serving.protocol.messages import Chunk, PlanRequest, Result
from thor_dflash.serving.server.server import EXIT_HUNG


def run_plan(*args: str) -> int:
    return plan.run(parser.parser().parse_args(["plan", *args]), Config(), Lines(sys.stderr))


def test_every_option_of_a_plan_is_requested_and_no_other() -> None:
    expected = {
        "thinking": "off",
        "max_tokens": 3,
        "deadline_ms": 9,
        "session": "arm",
        "prefix_id": "p",
    }
    words = [str(w) for name, v in expected.items() for w in (f"--{name.replace('_', '-')}", v)]
    request = plan._request(parser.parse(["plan", "Bring it.", *words]))
    assert request == PlanRequest(prompt="Bring it.", stream="all", **expected)
    assert plan._request(parser.parse(["plan", "x"])) == PlanRequest(prompt="x", stream="all")


def test_images_of_a_chat_are_files_beside_it(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    files = {"a.png": b"\x89PNG\r\n\x1a\n1", "in/b.jpg": b"\xff\xd8\xff2"}
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    text = {"type": "text", "text": "See."}
    shown = [{"type": "image", "file": name} for name in files]
    chat = [
        {"role": "system", "content": "Plan."},
        {"role": "user", "content": [shown[1], text]},
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": [text, shown[0]]},
    ]
    path = tmp_path / "chat.json"
    path.write_text(json.dumps(chat))
    request = plan._request(parser.parse(["plan", "--messages", str(path)]))
    validation.check(request)
    assert [(i.format, i.data) for i in request.images] == [
        ("jpeg", files["in/b.jpg"]), ("png", files["a.png"]),
    ]  # fmt: skip
    assert validation.image_names(request) == [i.id for i in request.images]
    for part in (
        {"type": "image", "file": "no.png"},
        {"type": "image"},
        {"type": "image", "file": 3},
    ):
        path.write_text(json.dumps([{"role": "user", "content": [text, part]}]))
        with pytest.raises(RequestError, match="messages"):
            plan._request(parser.parse(["plan", "--messages", str(path)]))


@pytest.mark.parametrize(
    "options", ["--temperature 1 --top-p 2", "--top-k 3", "--max-tokens 0", "--session ''"]
)
def test_a_value_that_no_server_takes_is_refused_before_there_is_one(
    options: str, capsys: pytest.CaptureFixture[str]
) -> None:
    name = shlex.split(options)[-2].removeprefix("--").replace("-", "_")
    assert main.main(["plan", "x", *shlex.split(options)]) == 2
    assert capsys.readouterr().err.startswith(f"thor-dflash: {name} must")


CHAT = [{"role": "system", "content": "You plan for one arm."}, {"role": "user", "content": "x"}]


@pytest.mark.slow
def test_a_chat_may_begin_with_a_pinned_prefix(
    session: Session, house: Any, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.setattr(SessionBackend, "close", lambda self: None)  # the session is the fixture's
    server = house.serve(SessionBackend(session, ServeConfig(max_tokens=4))).endpoints[0]
    with client.RemotePlanner(server) as planner:
        planner.put_prefix("arm", CHAT[0]["content"])
    (chat := tmp_path / "chat.json").write_text(json.dumps(CHAT))
    rest = ("--server", server, "--prefix-id", "arm", "--thinking", "off", "--json")
    run_plan("--messages", str(chat), *rest)
    assert json.loads(capsys.readouterr().out)["prefix_id"] == "arm"
    with pytest.raises(PlanError, match="prefix_id must be a prefix that the prompt begins with"):
        run_plan("x", *rest)


def test_a_chat_is_read_before_it_is_sent(tmp_path: Path) -> None:
    (chat := tmp_path / "chat.json").write_text(json.dumps([*CHAT, {"role": "user"}]))
    with pytest.raises(RequestError, match=r"^messages\[2\]\.content must be present"):
        run_plan("--messages", str(chat), "--server", "ipc:///nowhere/plan")
    for words in ([], ["x", "--messages", str(chat)]):
        assert main.main(["plan", *words]) == 2


def mock_chunks() -> list[Chunk]:
    """The chunks of the mock's plan."""
    with LocalPlanner(MockBackend(ServeConfig())) as planner:
        events = planner.stream(PlanRequest(prompt="x", stream="all"))
        return [event for event in events if isinstance(event, Chunk)]


def test_the_plan_alone_goes_to_stdout(house: Any, capsys: Any) -> None:
    assert run_plan("Bring it.", "--server", house.mock().endpoints[0]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out) == json.loads(PLAN)
    assert out.count("\n") == 1
    thinking = "".join(c.text or "" for c in mock_chunks() if c.kind == "thinking")
    assert thinking.strip() in err
    assert "plan valid" in err.splitlines()[-1]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_on_a_terminal_the_plan_is_a_table(house: Any, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(sys, "stdout", screen := Terminal())
    assert run_plan("Bring it.", "--server", house.mock().endpoints[0]) == 0
    lines = screen.getvalue().splitlines()
    assert "plan" in lines[0]
    assert any("goal: cup on table" in line for line in lines)
    assert not any(PLAN[:20] in line for line in lines)


@pytest.mark.parametrize("kind", ["thinking", "text"])
def test_thinking_that_is_missing_is_marked_and_the_plan_is_whole(
    kind: str, house: Any, capsys: Any
) -> None:
    chunks = [chunk.kind for chunk in mock_chunks()]
    lost = len(chunks) - 1 - chunks[::-1].index(kind)
    first = chunks.index("thinking")
    assert run_plan("Bring it.", "--server", house.skipping(lost).endpoints[0]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out) == json.loads(PLAN)
    assert err.count(plan.GAP) == (kind == "thinking" and lost > first)


def test_a_terminal_does_not_obey_a_plan() -> None:
    """A model may write any character, with JSON's escapes too."""
    step = {"id": "\x1b[1m", "skill": "\x07", "args": {"\x9b": "\u202e"}, "on_fail": "\r"}
    shown: dict[str, Any] = {"goal": "\x1b[2J", "steps": [step], "needs_clarification": "\b"}
    for contents in (shown, {"other": "\x1b[2J"}):
        TableConsole(screen := io.StringIO()).print(
            plan_panel(contents, str(contents), "valid", "green")
        )
        assert all(c.isprintable() or c == "\n" for c in screen.getvalue())


WHOLE: dict[str, Any] = {"goal": "x", "steps": [], "needs_clarification": None}


@pytest.mark.parametrize("words", [(), ("--json",)], ids=["plan", "json"])
@pytest.mark.parametrize(
    ("result", "status", "word"),
    [
        (Result(finish_reason="stop", plan=WHOLE, plan_valid=True), 0, "plan valid"),
        (Result(finish_reason="stop", plan=WHOLE, plan_valid=True, seed=7), 0, "seed 7"),
        (
            Result(finish_reason="deadline", status="partial", plan=WHOLE, plan_valid=True),
            3,
            "plan cut short",
        ),
        (Result(finish_reason="stop", status="error", plan=WHOLE), 1, "plan not valid"),
        (Result(finish_reason="grammar_dead_end", status="error", plan=WHOLE, plan_valid=True), 1,
         "plan not valid"),
        (Result(finish_reason="stop", text="Hello."), 1, "no plan: the answer is a text"),
        (Result(finish_reason="length", status="partial", text='{"goal'), 1, "no plan"),
    ],
    ids=["ok", "drawn", "partial", "invalid", "dead end", "text", "fragment"],
)  # fmt: skip
def test_the_exit_status_says_whether_there_is_a_plan_to_act_on(
    words: tuple[str, ...], result: Result, status: int, word: str, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.setattr(client.RemotePlanner, "stream", lambda *_: iter([result]))
    assert main.main(["plan", "x", *words]) == status
    out, err = capsys.readouterr()
    assert word in err.splitlines()[-1]
    if words:
        assert json.loads(out)["status"] == result.status
    else:
        assert out == ("" if status == 1 else json.dumps(WHOLE) + "\n")
        assert (result.text or "") in err


BLAMED = {
    "bad_request", "unsupported_version", "unauthorized", "too_large", "prompt_too_long",
    "schema_invalid", "schema_unsupported",
}  # fmt: skip


@pytest.mark.parametrize("code", typing.get_args(Code))
def test_every_error_of_a_server_has_an_exit_status(
    code: Code, monkeypatch: Any, capsys: Any
) -> None:
    def refuse(*_: object) -> None:
        raise PlanError(code, "no plan")

    monkeypatch.setattr(client.RemotePlanner, "stream", refuse)
    assert main.main(["plan", "x"]) == {"unreachable": 4}.get(code, 2 if code in BLAMED else 5)
    assert capsys.readouterr().out == ""


class Full(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(28, "No space left on device")


def test_a_full_disk_under_stderr_takes_no_plan_away(
    house: Any, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.setattr(sys, "stderr", Full())
    assert run_plan("Bring it.", "--server", house.mock().endpoints[0]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(PLAN)


def test_the_page_on_exit_status_has_every_one() -> None:
    page = Path(__file__).parents[3] / "docs/reference/exit-status.md"
    rows = re.findall(r"^\| (\d+) \| (.*?) \| (.*) \|$", page.read_text(), re.M)
    known = {value for value in vars(exit_status).values() if isinstance(value, int)}
    assert {int(row[0]) for row in rows} == known | {EXIT_HUNG}
    codes = {int(row[0]): {*re.findall(r"`(\w+)`", row[2])} for row in rows if "`plan`" in row[1]}
    every: set[Code] = {*typing.get_args(Code)}
    for status in (exit_status.UNREACHABLE, exit_status.NOT_NOW):
        given = {code for code in every if exit_status.of_error(PlanError(code, "")) == status}
        assert codes[status] == given


def test_a_prompt_comes_from_a_file_or_from_standard_input(tmp_path: Path) -> None:
    (task := tmp_path / "task.txt").write_text("Bring \u00e4 cup.\n\n", encoding="utf-8")

    def prompt(text: str) -> str | None:
        return plan._request(parser.parse(["plan", text])).prompt

    assert prompt(f"@{task}") == "Bring \u00e4 cup."
    for text in ("-", "@-"):
        kept = os.dup(0)
        try:
            with task.open() as file:
                os.dup2(file.fileno(), 0)
            assert prompt(text) == "Bring \u00e4 cup."
            os.fstat(0)  # still open
        finally:
            os.dup2(kept, 0)
            os.close(kept)
    task.write_bytes(b"\xff")
    for wrong in (f"@{task}", f"@{tmp_path}/none", f"@{tmp_path}", "@", "", " \n"):
        with pytest.raises(RequestError, match="^TEXT "):
            prompt(wrong)


def test_a_server_with_a_secret(house: Any, tmp_path: Path, capsys: Any) -> None:
    secret, empty = tmp_path / "token", tmp_path / "empty"
    secret.write_text("open sesame\n")
    empty.write_text("")
    empty.chmod(0o600)
    secret.chmod(0o600)
    server = house.mock(token_file=str(secret)).endpoints[0]
    command = ["plan", "Bring it.", "--json", "--server", server]
    assert main.main([*command, "--token-file", str(secret)]) == 0
    assert '"plan_valid": true' in capsys.readouterr().out
    assert main.main(command) == 2
    assert "token must be" in capsys.readouterr().err
    assert main.main([*command, "--token-file", str(empty)]) == 2
    assert "must hold a secret" in capsys.readouterr().err
    secret.chmod(0o644)
    assert main.main([*command, "--token-file", str(secret)]) == 2
    assert "chmod 600" in capsys.readouterr().err
