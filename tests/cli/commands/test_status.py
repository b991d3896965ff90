"""`thor-dflash status` against a mock: its exit status is the health check of a container."""

from __future__ import annotations

import json

import pytest
from support.serving_fixtures import House

from thor_dflash.cli.main import main


def test_a_server_that_takes_plans(house: House, capsys: pytest.CaptureFixture[str]) -> None:
    server = house.mock()
    command = ["status", "--server", server.endpoints[0]]
    assert main(command) == 0
    before = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert before["state"] == "ready"
    assert before["plans"] == "none yet"
    assert house.peer(server).ask(op="plan", prompt="x")["type"] == "result"
    assert main(command) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[-2:] for line in lines if line.startswith("plans")] == [["1", "stop"]]
    assert any(line.startswith("accept length  4.00") for line in lines)
    assert main([*command, "--quiet"]) == 0
    assert capsys.readouterr().out == ""
    assert main([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["stats"]["finished"] == {"stop": 1}


def test_a_server_that_loads_or_is_not_there(
    house: House, capsys: pytest.CaptureFixture[str]
) -> None:
    server, _, load = house.held_later()
    command = ["status", "--quiet", "--server", server.endpoints[0]]
    assert main(command) == 1
    load.set()
    assert main(["status", "--server", "tcp://127.0.0.1:1", "--wait", "0.2"]) == 4
    assert "must answer" in capsys.readouterr().err
    assert main(["status", "--server", "nowhere"]) == 2
