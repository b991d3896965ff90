"""Who may use the gateway: API keys, host names, other machines."""

from __future__ import annotations

import http.client
from pathlib import Path
from typing import Any

import msgspec
import pytest
from openai import AuthenticationError, OpenAI
from support.http_gateway import CHAT, gateway

from thor_dflash.config.serving import GatewayConfig
from thor_dflash.core.errors import ConfigError
from thor_dflash.serving.gateway.auth import listen_at
from thor_dflash.serving.gateway.http_server import http_server
from thor_dflash.serving.planner.mock_backend import PLAN

KEYS = ("k1-" + "a" * 40, "k2-" + "b" * 40)


@pytest.fixture
def key_file(tmp_path: Path) -> str:
    path = tmp_path / "keys"
    path.write_text("\n".join(KEYS) + "\n")
    path.chmod(0o600)
    return str(path)


def status(address: str, path: str, **headers: str) -> int:
    with_host = http.client.HTTPConnection(address.removeprefix("http://"), timeout=20)
    with_host.request("GET", path, headers=headers)
    found = with_host.getresponse().status
    with_host.close()
    return found


def test_only_a_key_lets_a_client_in(house: Any, key_file: str) -> None:
    server = house.mock()
    with gateway(server.endpoints[0], api_key_file=key_file) as address:

        def ask(key: str) -> Any:
            with OpenAI(base_url=f"{address}/v1", api_key=key) as openai:
                return openai.chat.completions.create(model="", messages=CHAT)

        for key in KEYS:
            assert ask(key).choices[0].message.content == PLAN
        wrong = (KEYS[0][:-1], KEYS[0] + "a", KEYS[0].upper(), " ".join(KEYS))
        for key in wrong:
            with pytest.raises(AuthenticationError) as caught:
                ask(key)
            assert caught.value.code == "invalid_api_key"
            assert caught.value.response.headers["x-should-retry"] == "false"
            assert KEYS[0][:-1] not in caught.value.message
        for path in ("/v1/models", "/v1/chat/completions", "/metrics", "/nothing", "//health"):
            assert status(address, path) == 401, path
            assert status(address, path, Authorization=f"Basic {KEYS[0]}") == 401, path
            assert status(address, path, Authorization="Bearer") == 401, path
            assert status(address, path, Authorization="Bearer \xff") == 401, path
        assert status(address, "/v1/models", Authorization=f"bearer {KEYS[1]}") == 200
        assert status(address, "/health") == 200
    assert house.peer(server).ask(op="stats", id="s")["requests"]["plan"] == len(KEYS)


def test_with_keys_other_machines_may_use_the_names_they_have_for_it(
    house: Any, key_file: str
) -> None:
    """A container reaches it as `gateway`, a second computer of the robot by name or address."""
    server = house.mock().endpoints[0]
    hosts = ("gateway", "Robot.local")
    with gateway(server, api_key_file=key_file, hosts=hosts) as address:
        for host in ("gateway:8000", "robot.local", "ROBOT.LOCAL:80", "10.0.0.7:8000", "localhost",
                     "[fe80::1]:8000"):  # fmt: skip
            assert status(address, "/health", Host=host) == 200, host
        for host in ("evil.example", "gateway.evil.example", "evil.example:gateway", "10.0.0.7.x"):
            assert status(address, "/health", Host=host) == 421, host
    with gateway(server, hosts=hosts) as address:  # behind a proxy of this machine
        assert status(address, "/health", Host="robot.local") == 200
        # Only keys allow addresses.
        assert status(address, "/health", Host="10.0.0.7:8000") == 421


def test_what_other_machines_could_misuse_is_refused_at_the_start(
    key_file: str, tmp_path: Path
) -> None:
    def start(**fields: Any) -> None:
        http_server(GatewayConfig(**fields), 0)

    def mistake(**fields: Any) -> str:
        with pytest.raises(ConfigError) as caught:
            start(**fields)
        return str(caught.value)

    start(api_key_file=key_file)
    Path(key_file).chmod(0o640)
    assert mistake(api_key_file=key_file).startswith(key_file)
    empty = tmp_path / "empty"
    empty.touch(0o600)
    assert mistake(api_key_file=str(empty)).startswith(str(empty))
    assert mistake(api_key_file=str(tmp_path / "none")).startswith(str(tmp_path / "none"))
    assert "chmod" not in mistake(api_key_file="/dev/null")  # root would obey
    for name in ("robot:8000", "http://robot", "*", ""):
        assert mistake(hosts=(name,)).startswith("gateway.hosts must be ")
    for listen in ("0.0.0.0:8000", "[::]:8000", "10.0.0.7:8000", "robot.local:8000"):
        with pytest.raises(ConfigError, match="gateway.listen"):
            listen_at(GatewayConfig(listen=listen))
        for fields in ({"api_key_file": key_file}, {"insecure": True}):
            assert listen_at(GatewayConfig(listen=listen, **fields))[1] == 8000


def test_an_error_of_authorization_is_in_the_form_of_openai(house: Any, key_file: str) -> None:
    with gateway(house.mock().endpoints[0], api_key_file=key_file) as address:
        asker = http.client.HTTPConnection(address.removeprefix("http://"), timeout=20)
        asker.request("GET", "/v1/models")
        reply = asker.getresponse()
        assert reply.getheader("www-authenticate") == "Bearer"
        assert msgspec.json.decode(reply.read())["error"]["type"] == "invalid_request_error"
        asker.close()
