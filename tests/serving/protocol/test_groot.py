"""NVIDIA Isaac-GR00T's client, byte for byte.

The bodies are what `PolicyClient` of gr00t/policy/server_client.py sends, at the commits 38624dff
and ade260e6 of NVIDIA/Isaac-GR00T, with msgpack 1.1.0: recorded from it, over its plain REQ socket.
The client fails on any answer that is a map with a key `error`, and returns all others as they are.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import zmq

PING = b"\x81\xa8endpoint\xa4ping"
PING_TOKEN = b"\x82\xa8endpoint\xa4ping\xa9api_token\xa6secret"
PING_WRONG = b"\x82\xa8endpoint\xa4ping\xa9api_token\xa5wrong"
PLAN = b"\x82\xa8endpoint\xa4plan\xa4data\x81\xa6prompt\xaeBring the cup."
HEALTH = b"\x81\xa8endpoint\xa6health"
HEALTH_NO_DATA = b"\x82\xa8endpoint\xa6health\xa4data\xc0"
"""What `call_endpoint("health")` sends: the key `data` is there, but its value is None."""
HEALTH_LIST = b"\x82\xa8endpoint\xa6health\xa4data\x90"
KILL = b"\x81\xa8endpoint\xa4kill"
RESET = b"\x82\xa8endpoint\xa5reset\xa4data\x81\xa7options\xc0"
ARRAY = (
    b"\x82\xb1__ndarray_class__\xc3\xa6as_npy\xc4\x82\x93NUMPY\x01\x00v\x00"
    b"{'descr': '|u1', 'fortran_order': False, 'shape': (1, 2), }" + b" " * 58 + b"\n\x00\x00"
)
"""Its convention for numpy arrays: a map with the bytes of numpy.save."""
GET_ACTION = (
    b"\x82\xa8endpoint\xaaget_action\xa4data\x82\xabobservation\x81\xa5video" + ARRAY
    + b"\xa7options\xc0"
)  # fmt: skip
PLAN_ARRAY = b"\x82\xa8endpoint\xa4plan\xa4data\x82\xa6prompt\xa1x\xa8metadata\x81\xa1a" + ARRAY
NUMBER, LIST = b"\x81\xa8endpoint\x05", b"\x81\xa8endpoint\x90"
NO_JSON = b"\x81\xa8endpoint\x81\xc4\x01a\x01"
"""A map whose key is bytes, which JSON cannot hold."""
STREAM = b"\x82\xa8endpoint\xa4plan\xa4data\x82\xa6prompt\xa1x\xa6stream\xa5steps"


def call(peer: Any, body: bytes) -> dict[str, Any]:
    """As `call_endpoint`: send, take the one frame that comes, and raise on an error."""
    peer.socket.send(body)
    assert peer.socket.poll(20_000), "no answer"
    (frame,) = peer.socket.recv_multipart()
    answer: dict[str, Any] = msgspec.msgpack.decode(frame)
    if "error" in answer:
        raise RuntimeError(f"Server error: {answer['error']}")
    return answer


@pytest.fixture
def client(house: Any) -> Any:
    return house.peer(house.mock(), zmq.REQ)


def test_it_pings_and_plans(client: Any) -> None:
    for _ in range(2):
        pong = call(client, PING)
        assert (pong["status"], pong["message"]) == ("ok", "Server is running")
        assert call(client, PLAN)["plan"]["goal"] == "cup on table"


@pytest.mark.parametrize("body", [HEALTH, HEALTH_NO_DATA])
def test_a_healthy_server_is_no_error_to_it(client: Any, body: bytes) -> None:
    health = call(client, body)
    assert (health["state"], health["last_error"]) == ("ready", None)


def test_unknown_endpoints_and_bad_data_are_errors_and_the_server_stays(client: Any) -> None:
    for body, says in ((KILL, "got kill"), (RESET, "got reset"), (GET_ACTION, "got get_action"),
                       (NUMBER, "endpoint must be an operation .got 5"),
                       (LIST, r"endpoint must be an operation .got \[\]"),
                       (NO_JSON, "bad_request: endpoint must be .* .got a value of type dict"),
                       (PLAN_ARRAY, "metadata must be plain JSON values"),
                       (HEALTH_LIST, "data must be an object")):  # fmt: skip
        with pytest.raises(RuntimeError, match=says):
            call(client, body)
    assert call(client, PING)["status"] == "ok"


def test_it_gets_no_first_step_for_a_plan(client: Any) -> None:
    with pytest.raises(RuntimeError, match="stream must be false"):
        call(client, STREAM)


def test_its_token_is_asked_for(house: Any, tmp_path: Any) -> None:
    secret = tmp_path / "token"
    secret.touch(0o600)
    secret.write_text("secret\n")
    client = house.peer(house.mock(token_file=str(secret)), zmq.REQ)
    assert call(client, PING_TOKEN)["status"] == "ok"
    for body in (PING, PING_WRONG):
        with pytest.raises(RuntimeError, match="unauthorized: token must be"):
            call(client, body)
