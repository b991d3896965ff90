"""Whose turns may share state, and what `stats` says of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import zmq
from support.serving_fixtures import Peer

from thor_dflash.config.serving import ServeConfig
from thor_dflash.serving.client import Options, RemotePlanner
from thor_dflash.serving.planner.backend import Prepared
from thor_dflash.serving.planner.mock_backend import MockBackend
from thor_dflash.serving.protocol import messages
from thor_dflash.serving.protocol.replies import ReuseCounts
from thor_dflash.serving.transport import curve


class Recorder(MockBackend):
    """A mock that keeps the client of each request, and claims to have reused something."""

    def __init__(self) -> None:
        super().__init__(ServeConfig())
        self.scopes: list[str] = []

    def prepare(
        self, ask: messages.PlanRequest, left_ms: float | None, scope: str = "", *images: Any
    ) -> Prepared:
        self.scopes.append(scope)
        return super().prepare(ask, left_ms, scope, *images)

    @property
    def reuse(self) -> ReuseCounts:
        return ReuseCounts(queries=100, hits=64, boundaries=3)

    def drop_session(self, request: messages.SessionDrop, scope: str = "") -> int:
        self.scopes.append(scope)
        return 7


def test_a_client_is_its_key_also_when_it_comes_again(house: Any, tmp_path: Path) -> None:
    for name in ("one", "other"):
        curve.keygen(tmp_path / name)
    (tmp_path / "other/server.public").write_bytes((tmp_path / "one/server.public").read_bytes())
    known = tmp_path / "one/clients/other.public"
    known.write_bytes((tmp_path / "other/client.public").read_bytes())
    known.chmod(0o600)
    backend = Recorder()
    server = house.serve(backend, curve=str(tmp_path / "one"))
    for name in ("one", "other", "one"):
        with RemotePlanner(server.endpoints[0], Options(keys=str(tmp_path / name))) as planner:
            planner.plan(messages.PlanRequest(prompt="x"))
            assert planner.drop_session("arm") == 7
    assert backend.scopes[::2] == backend.scopes[1::2], "a client drops its own conversations"
    one, other, again = backend.scopes[::2]
    assert one == again != other
    assert one == (tmp_path / "one/client.public").read_text().strip()


def test_without_encryption_all_are_one_client(house: Any) -> None:
    backend = Recorder()
    server = house.serve(backend)
    peers: list[Peer] = [house.peer(server), house.peer(server, zmq.REQ)]
    for peer in peers:
        peer.send(op="plan", id="a", prompt="x", max_tokens=4)
        peer.final("a")
    assert backend.scopes == ["", ""]
    found = peers[0].ask(op="stats", id="s")["reuse"]
    assert (found["queries"], found["hits"], found["boundaries"]) == (100, 64, 3)
