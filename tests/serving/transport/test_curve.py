"""What protects a server and a gateway: addresses, keys, secrets, and limits of schemas."""

from __future__ import annotations

import socket
import stat
import time
from pathlib import Path
from typing import Any

import pytest

from thor_dflash.cli import main
from thor_dflash.config.serving import GatewayConfig, ServeConfig
from thor_dflash.core.errors import ConfigError
from thor_dflash.runtime.grammar.schema import read
from thor_dflash.serving.client import Options, PlanError, RemotePlanner
from thor_dflash.serving.gateway.auth import listen_at
from thor_dflash.serving.planner.schema_validator import SchemaValidator, read_schema
from thor_dflash.serving.transport import access, curve
from thor_dflash.serving.transport.router_socket import RouterSocket


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"bind": ("tcp://0.0.0.0:5571",)}, "loopback"),
        ({"bind": ("tcp://127.0.0.1:1", "tcp://[::]:1")}, "loopback"),
        ({"bind": ("ipc://@plan",), "curve": "keys"}, "must be an ipc path"),
        ({"bind": ("tcp://127.0.0.1:65536",)}, "must end in a port"),
        ({"allow_admin": True}, "allow_admin"),
        ({"bind": ("tcp://1.2.3.4:1",), "insecure": True, "token_file": "t"}, "token_file"),
    ],
    ids=str,
)
def test_unsafe_and_malformed_settings_are_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        access.check_bind(ServeConfig(**config))


@pytest.mark.parametrize(
    "config",
    [
        {"bind": ("tcp://127.0.0.1:5571", "tcp://[::1]:5571", "tcp://localhost:1", "ipc://x")},
        {"bind": ("tcp://0.0.0.0:5571",), "insecure": True},
        {"bind": ("tcp://0.0.0.0:5571",), "curve": "keys", "allow_admin": True},
        {"bind": ("ipc://x",), "allow_admin": True},
    ],
    ids=str,
)
def test_settings_that_are_safe_or_insecure_on_purpose_are_accepted(config: dict[str, Any]) -> None:
    access.check_bind(ServeConfig(**config))


def test_keys_are_for_their_owner(tmp_path: Path, capsys: Any) -> None:
    keys = tmp_path / "keys"
    assert main.main(["keygen", str(keys)]) == 0
    assert "--curve" in capsys.readouterr().out
    for path in keys.rglob("*"):
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600), path
    assert main.main(["keygen", str(keys)]) == 2, "never over keys that are in use"
    for mode in (0o644, 0o640, 0o604, 0o620):
        (keys / "server.secret").chmod(mode)
        with pytest.raises(ConfigError, match=f"got mode {mode:04o}.; chmod 600"):
            curve.secret_key(keys / "server.secret")


@pytest.mark.parametrize("name", [".", "clients", "clients/client.public", "server.public"])
@pytest.mark.parametrize("mode", [0o770, 0o702])
def test_keys_that_others_may_replace_are_refused(tmp_path: Path, name: str, mode: int) -> None:
    """Who can add a client's key can command the robot."""
    keys = tmp_path / "keys"
    curve.keygen(keys)
    RouterSocket(config := ServeConfig(bind=("tcp://127.0.0.1:*",), curve=str(keys))).close()
    (keys / name).chmod(mode)
    with pytest.raises(
        ConfigError, match=rf"by its owner alone \(got mode {mode:04o}\); chmod go-w"
    ):
        RouterSocket(config)


@pytest.mark.parametrize(
    ("name", "key"),
    [("server.secret", "`" * 40), ("clients/client.public", "#" * 40), ("client.public", "a" * 39)],
)
def test_a_malformed_key_is_refused_by_the_name_of_its_file(
    tmp_path: Path, name: str, key: str
) -> None:
    curve.keygen(tmp_path)
    (tmp_path / name).write_text(key + "\n")
    config = ServeConfig(bind=("tcp://127.0.0.1:*",), curve=str(tmp_path))
    with pytest.raises(ConfigError, match=rf"{name} must hold a key (in Z85|of 40)") as caught:
        if name.startswith("client."):
            RemotePlanner("tcp://127.0.0.1:5999", Options(keys=str(tmp_path))).ping()
        else:
            RouterSocket(config).close()
    assert key[:5] not in str(caught.value)


def test_curve_lets_in_who_is_known(house: Any, tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    for keys in (ours, theirs):
        curve.keygen(keys)
    (theirs / "server.public").write_bytes((ours / "server.public").read_bytes())
    server = house.mock(curve=str(ours))
    with RemotePlanner(server.endpoints[0], Options(keys=str(ours))) as planner:
        assert planner.ping()["status"] == "ok"
    for stranger in (Options(keys=str(theirs), timeout_s=0.4), Options(timeout_s=0.4)):
        with RemotePlanner(server.endpoints[0], stranger) as planner:
            with pytest.raises(PlanError) as caught:
                planner.ping()
            assert caught.value.code == "unreachable"
    with RemotePlanner(server.endpoints[0], Options(keys=str(ours))) as planner:
        assert planner.ping()["status"] == "ok", "and goes on"


def test_a_secret_is_asked_of_everybody(house: Any, tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("open sesame\n")
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        access.read_token(str(path))
    path.chmod(0o600)
    peer = house.peer(house.mock(token_file=str(path)))
    for token in ({}, {"token": "open"}, {"token": 5}, {"token": ""}):
        assert peer.ask(op="hello", id="x", **token)["code"] == "unauthorized"
    assert peer.ask(op="ping", id="x", token="open sesame")["status"] == "ok"
    assert "error" in peer.ask(endpoint="ping", api_token="wrong")
    assert peer.ask(endpoint="ping", api_token="open sesame")["status"] == "ok"
    path.write_text("\n")
    with pytest.raises(ConfigError, match="secret"):
        access.read_token(str(path))


def test_an_ipc_socket_is_its_owners_and_not_taken_over(house: Any, tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/plan"
    house.mock(bind=(endpoint,))
    assert stat.S_IMODE((tmp_path / "plan").stat().st_mode) & 0o077 == 0
    with pytest.raises(ConfigError, match="must be free"):
        house.mock(bind=(endpoint,))


def test_no_server_takes_the_place_of_a_file(house: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("plans of last year")
    (tmp_path / "link").symlink_to("nowhere")
    (tmp_path / "folder").mkdir()
    for name in ("file", "link", "folder"):
        message = rf"serve.bind must be a path where there is no other file \(got ipc://.*/{name}\)"
        with pytest.raises(ConfigError, match=message):
            house.mock(bind=(f"ipc://{tmp_path / name}",))
    assert (tmp_path / "file").read_text() == "plans of last year"
    assert (tmp_path / "link").is_symlink()
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(tmp_path / "dead"))
    house.mock(bind=(f"ipc://{tmp_path / 'dead'}",))


def test_a_schema_reaches_no_network() -> None:
    with socket.create_server(("127.0.0.1", 0)) as trap:
        trap.settimeout(0.2)
        url = f"http://127.0.0.1:{trap.getsockname()[1]}/schema.json"
        with pytest.raises(PlanError, match="schema inside this one"):
            read_schema({"$ref": url})
        with pytest.raises(TimeoutError):
            trap.accept()


def with_patterns(count: int, pattern: str = "^[a-z]{1,20}%d$") -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {f"p{i}": {"type": "string", "pattern": pattern % i} for i in range(count)},
    }


def test_a_schema_of_patterns_does_not_hold_up_the_interpreter() -> None:
    """Compiling a pattern blocks the whole interpreter. The limits on their number and size make
    that a moment instead of half a minute.
    """
    started = time.perf_counter()
    with pytest.raises(PlanError, match=r"at most 64 patterns \(got 1400\)"):
        SchemaValidator(read(with_patterns(1400, "^.{3000}%d$")))
    for schema in (
        with_patterns(64, "^.{3000}%d$"),
        {"allOf": [with_patterns(1, "(a{999}){999}%d")]},
    ):
        with pytest.raises(PlanError, match='not a "regex" that compiles to at most 1048576 bytes'):
            SchemaValidator(read(schema))
    assert time.perf_counter() - started < 1.0
    assert SchemaValidator(read(with_patterns(64))).valid({"p0": "abc0"})
    assert not SchemaValidator(read(with_patterns(64, "^.{800}%d$"))).valid({"p0": "abc0"})


def test_http_is_for_this_machine() -> None:
    assert listen_at(GatewayConfig(listen="[::1]:65535")) == ("::1", 65535)
    assert listen_at(GatewayConfig(listen="0.0.0.0:80", insecure=True)) == ("0.0.0.0", 80)
    for listen in ("0.0.0.0:80", "robot:80", "127.0.0.1", "127.0.0.1:x", ":80", "127.0.0.1:65536"):
        with pytest.raises(ConfigError, match="gateway.listen"):
            listen_at(GatewayConfig(listen=listen))
