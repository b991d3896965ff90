"""The C++ client against a mock: cancel from another thread, deadlines, lost servers, keys."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema_rs
import numpy as np
import pytest
from support.cpp_clients import needs_cpp, program
from support.plan_formats import ROBOT
from support.server_process import RUN
from support.serving_fixtures import House
from support.waiting import until

from thor_dflash.runtime.vision.decoder import RawSize, read_picture
from thor_dflash.serving.planner.mock_images import LIMITS
from thor_dflash.serving.protocol import json_schemas
from thor_dflash.serving.transport import curve

pytestmark = [needs_cpp, pytest.mark.slow]
Run = Callable[..., list[str]]


@pytest.fixture(scope="module")
def checks(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = Path(__file__).with_name("tdp_checks.cpp")
    return program(source, pytestconfig, tmp_path_factory.mktemp("checks"))


@pytest.fixture
def run(checks: Path) -> Run:
    """Runs one mode of tdp_checks.cpp; the words of its last line."""

    def it(endpoint: str, mode: str, argument: str = "x", *keys: str) -> list[str]:
        command = [checks, endpoint, mode, argument, *keys]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        return done.stdout.splitlines()[-1].split(" ", 3)

    return it


def table(words: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(" ".join(words))
    return found


def test_plans_operations_and_errors(house: House, run: Run) -> None:
    endpoint = house.mock().endpoints[0]
    result = table(run(endpoint, "plan", '{"prompt": "x"}'))
    schemas = json_schemas.render()
    jsonschema_rs.validator_for(schemas["reply.result"]).validate(result)
    assert result["plan"]["goal"] == "cup on table"
    hello = table(run(endpoint, "call", "hello"))
    jsonschema_rs.validator_for(schemas["reply.hello"]).validate(hello)
    code, _, retryable, reply = run(endpoint, "plan", '{"prompt": ""}')
    assert (code, retryable, json.loads(reply)["field"]) == ("bad_request", "0", "prompt")
    code, _, retryable, reply = run(endpoint, "long")
    assert (code, retryable, reply) == ("too_large", "0", "null")
    assert run(endpoint, "threads") == ["4"]


def test_a_cancel_from_another_thread_ends_the_plan_within_a_cycle(house: House, run: Run) -> None:
    endpoint = house.mock(cycle_s=0.1).endpoints[0]
    for mode in ("cancel", "early"):
        code, ms = run(endpoint, mode)
        assert code == "cancelled"
        assert int(ms) < 400, mode
    code, ms = run(endpoint, "leave")
    assert (code, int(ms) < 400) == ("ok", True)


def test_a_deadline_counts_from_the_call(house: House, run: Run) -> None:
    endpoint = house.mock(cycle_s=0.02).endpoints[0]
    result = table(run(endpoint, "plan", '{"prompt": "x", "deadline_ms": 100}'))
    assert (result["finish_reason"], result["status"]) == ("deadline", "partial")
    # Without a server, connecting takes no longer than the deadline, or else the timeout (1.5 s).
    code, ms, retryable, _ = run("tcp://127.0.0.1:1", "plan", '{"prompt":"x","deadline_ms":200}')
    assert (code, retryable) == ("deadline", "0")
    assert 200 <= int(ms) < 1000
    code, ms, _, _ = run("tcp://127.0.0.1:1", "plan", '{"prompt": "x"}')
    assert code == "unreachable"
    assert int(ms) >= 1500


def test_a_server_that_dies_is_noticed_at_once(checks: Path, tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/plan"
    serve = [sys.executable, "-c", RUN, "serve", "--mock", "--mock-cycle-ms", "500"]
    with subprocess.Popen(
        [*serve, "--bind", endpoint], stderr=subprocess.PIPE, text=True
    ) as server:
        assert server.stderr
        assert any(" ready after " in line for line in server.stderr)
        with subprocess.Popen(
            [checks, endpoint, "lost", "x"], stdout=subprocess.PIPE, text=True
        ) as it:
            assert it.stdout
            assert it.stdout.readline() == "step\n"
            server.kill()
            code, ms = it.stdout.readline().split()
    assert code == "unreachable"
    assert int(ms) < 2000


def test_a_server_that_is_busy_or_starts_again_is_tried_again(
    house: House, run: Run, checks: Path, tmp_path: Path
) -> None:
    server = house.mock(cycle_s=0.05, max_queue=1)
    fields = json.dumps({"prompt": "x", "preempt": "none"})
    crowd = [subprocess.Popen([checks, server.endpoints[0], "plan", fields]) for _ in range(2)]
    until(lambda: run(server.endpoints[0], "call", "health")[0].count('"waiting":1') == 1)
    code, ms, retryable, _ = run(server.endpoints[0], "plan", fields)
    assert (code, retryable) == ("busy", "1")
    assert int(ms) < 300
    assert table(run(server.endpoints[0], "plan", fields, "20"))["status"] == "ok"
    assert [child.wait(10) for child in crowd] == [0, 0]
    endpoint = f"ipc://{tmp_path}/late"  # nobody listens there yet
    command = [checks, endpoint, "plan", '{"prompt": "x"}', "3"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as waiting:
        time.sleep(2.0)  # longer than one wait for a connection
        house.mock(bind=(endpoint,))
        assert waiting.stdout
        assert json.loads(waiting.stdout.read())["status"] == "ok"


def test_images_are_sent_as_bytes(house: House, run: Run) -> None:
    found = table(run(house.mock().endpoints[0], "image"))
    jsonschema_rs.validator_for(json_schemas.render()["reply.result"]).validate(found["result"])
    assert "1 image (cam0" in found["result"]["plan"]["goal"]
    pixels = np.full((48, 64, 3), 7, np.uint8).tobytes()
    want = read_picture(pixels, "rgb8", LIMITS, RawSize(width=64, height=48))
    assert [image["sha256"] for image in found["result"]["images"]] == [want.digest.hex()]
    assert found["field"] == "images[0].data"


def test_a_plan_in_another_format(house: House, run: Run) -> None:
    found = table(run(house.mock().endpoints[0], "format", json.dumps(ROBOT)))
    assert found["plan"]["steps"] == found["steps"]
    assert found["plan"]["body"].startswith("<root BTCPP_format")


def test_keys(house: House, run: Run, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    curve.keygen(keys)
    endpoint = house.mock(curve=str(keys)).endpoints[0]
    server = curve.public_key(keys / "server.public").decode()
    public = curve.public_key(keys / "client.public").decode()
    secret = curve.secret_key(keys / "client.secret").decode()
    assert table(run(endpoint, "call", "ping", server, public, secret))["status"] == "ok"
    code, *_ = run(endpoint, "call", "ping")
    assert code == "unreachable"
    stranger = tmp_path / "other"
    curve.keygen(stranger)
    public = curve.public_key(stranger / "client.public").decode()
    secret = curve.secret_key(stranger / "client.secret").decode()
    code, _, retryable, _ = run(endpoint, "call", "ping", server, public, secret)
    assert (code, retryable) == ("unreachable", "0")
