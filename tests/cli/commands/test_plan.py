"""`thor-dflash plan`: what it sends to a server, what it prints, and what it refuses."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from thor_dflash.cli import main, parser
from thor_dflash.cli.commands import plan
from thor_dflash.config.serving import ServeConfig
from thor_dflash.config.tree import Config
from thor_dflash.core.errors import RequestError
from thor_dflash.core.progress import Lines
from thor_dflash.runtime.session import Session
from thor_dflash.serving.client import PlanError, client
from thor_dflash.serving.planner.mock_backend import PLAN, MockBackend
from thor_dflash.serving.planner.planner import LocalPlanner
from thor_dflash.serving.planner.session_backend import SessionBackend
from thor_dflash.serving.protocol.messages import PlanRequest


def run_plan(*args: str) -> None:
    """Run the command as on a terminal, where it reports its progress even with --json."""
    plan.run(parser.parser().parse_args(["plan", *args]), Config(), Lines(sys.stderr))


def test_every_option_of_a_plan_is_requested_and_no_other() -> None:
    expected = {
        "thinking": "off",
        "max_tokens": 0,
        "deadline_ms": 9,
        "session": "",
        "prefix_id": "p",
    }
    words = [str(w) for name, v in expected.items() for w in (f"--{name.replace('_', '-')}", v)]
    request = plan._request(parser.parse(["plan", "Bring it.", *words]))
    assert request == PlanRequest(prompt="Bring it.", stream="text", **expected)
    assert plan._request(parser.parse(["plan", "x"])) == PlanRequest(prompt="x", stream="text")


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


def mock_pieces() -> list[str]:
    """The texts of the mock's pieces."""
    with LocalPlanner(MockBackend(ServeConfig())) as planner:
        return [e.text or "" for e in planner.stream(PlanRequest(prompt="x", stream="text"))][:-1]


@pytest.mark.parametrize("lost", [3, len(mock_pieces()) - 1])
def test_pieces_that_are_missing_are_reported_and_the_answer_is_whole(
    lost: int, house: Any, capsys: Any
) -> None:
    run_plan("Bring it.", "--server", house.skipping(lost).endpoints[0])
    out, err = capsys.readouterr()
    assert out == "".join(mock_pieces()[:lost]) + "\n" * bool(lost) + PLAN + "\n"
    assert err.splitlines()[1] == f"{plan.GAP}; the whole answer follows"


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
