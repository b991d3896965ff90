"""The clients and a server that ends the handshake, because it refuses them or because it ends."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
from support.waiting import PATIENCE_S

from thor_dflash.config.serving import ServeConfig
from thor_dflash.core.errors import PlanError
from thor_dflash.serving.client import AsyncPlanner, Options, PlanRequest, RemotePlanner
from thor_dflash.serving.planner.mock_backend import MockBackend
from thor_dflash.serving.server.server import serving
from thor_dflash.serving.transport import curve


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    """The keys of a server (`ours`), and of a client that has the server's public key but is not
    let in (`theirs`).
    """
    for name in ("ours", "theirs"):
        curve.keygen(tmp_path / name)
    (tmp_path / "theirs/server.public").write_bytes((tmp_path / "ours/server.public").read_bytes())
    return tmp_path


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as it:
        yield it


def server(endpoint: str, curve: str) -> Any:
    config = ServeConfig(bind=(endpoint,), curve=curve)
    return serving(lambda: MockBackend(config), config, log=lambda line: None)


class Asyncio:
    """The client for asyncio, with the methods of the other one."""

    def __init__(self, endpoint: str, options: Options) -> None:
        self._runner = asyncio.Runner()
        self._planner = self._run(self._made(endpoint, options))

    @staticmethod
    async def _made(endpoint: str, options: Options) -> AsyncPlanner:
        return AsyncPlanner(endpoint, options)

    def _run(self, work: Any) -> Any:
        return self._runner.run(work)

    def ping(self) -> Any:
        return self._run(self._planner.simple("ping"))

    def plan(self, ask: PlanRequest) -> Any:
        return self._run(self._planner.plan(ask))

    def close(self) -> None:
        self._run(self._planner.close())
        self._runner.close()


either = pytest.mark.parametrize("kind", [RemotePlanner, Asyncio])


def refused(work: Callable[[], object]) -> None:
    """Check that `work` fails because the connection is refused, and before its time is up."""
    began = time.monotonic()
    with pytest.raises(PlanError, match="refused the connection: does it want CURVE") as caught:
        work()
    assert time.monotonic() < began + PATIENCE_S
    assert (caught.value.code, caught.value.retryable) == ("unreachable", False)


@either
@pytest.mark.parametrize("own", [True, False], ids=["wrong key", "no keys there"])
def test_a_refused_client_gets_its_error_at_once(kind: Any, own: bool, keys: Path) -> None:
    endpoint = f"ipc://{keys}/plan"
    options = Options(keys=str(keys / "theirs"), timeout_s=PATIENCE_S)
    curve = str(keys / "ours") if own else ""
    with server(endpoint, curve), closing(kind(endpoint, options)) as client:
        refused(client.ping)
        refused(lambda: client.plan(PlanRequest(prompt="x")))
        if kind is RemotePlanner:
            refused(lambda: list(client.stream(PlanRequest(prompt="x"))))


@either
@pytest.mark.parametrize("scheme", ["ipc", "tcp"])
def test_who_was_refused_may_be_let_in_later(
    kind: Any, scheme: str, keys: Path, stack: ExitStack
) -> None:
    """A server that is started again lets in a client whose key it knows by now, whether the client
    was refused or let in before.
    """
    known, ours = keys / "ours/clients/theirs.public", str(keys / "ours")
    endpoint = f"ipc://{keys}/plan" if scheme == "ipc" else "tcp://127.0.0.1:*"

    def let_in() -> None:
        known.write_bytes((keys / "theirs/client.public").read_bytes())
        known.chmod(0o600)

    options = Options(keys=str(keys / "theirs"), timeout_s=PATIENCE_S)
    with server(endpoint, ours) as first:
        endpoint = first.endpoints[0]
        client = kind(endpoint, options)
        stack.callback(client.close)
        refused(client.ping)
    for _ in range(2):
        let_in()
        with server(endpoint, ours):
            assert client.ping()["status"] == "ok"
            assert client.plan(PlanRequest(prompt="x")).status == "ok"
        known.unlink()
        with server(endpoint, ours):
            refused(client.ping)
