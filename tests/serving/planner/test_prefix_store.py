"""Prefixes that outlive the server: each file is whole or left out, a restored prefix changes no
answer, and whatever could not be kept or restored is reported.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.constrained_model import package
from support.waiting import until

from thor_dflash.config.serving import ServeConfig
from thor_dflash.core.errors import ConfigError
from thor_dflash.runtime.session import Session
from thor_dflash.runtime.session.prefix_cache import PrefixCache
from thor_dflash.serving.client import Message, Options, PlanError, PlanRequest, RemotePlanner
from thor_dflash.serving.planner.prefix_store import PrefixStore
from thor_dflash.serving.planner.session_backend import SessionBackend
from thor_dflash.serving.server.server import serving

SYSTEM = "You plan for one arm. " + "It can pick, place and wait; nothing else at all. " * 6
CHAT = (Message(role="system", content=SYSTEM), Message(role="user", content="Pick the mug."))
ASK = PlanRequest(messages=CHAT, thinking="off", max_tokens=12, parts=("tokens",))
RUN = "import sys; from thor_dflash.cli.main import main; sys.exit(main())"


class Lent(SessionBackend):
    """A backend that leaves its session open when it closes. The session only forgets its prefixes,
    as it would at the end of the process.
    """

    def close(self) -> None:
        if self._store is not None:
            self._store.close()
        self.session.prefixes = PrefixCache(self.session.model)


Serve = Callable[..., RemotePlanner]


@pytest.fixture
def serve(session: Session, house: Any, tmp_path: Path) -> Iterator[Serve]:
    """Starts a server that keeps prefixes in tmp_path/kept, after it has stopped the one before;
    returns a client of it.
    """
    running: list[Any] = []
    planners: list[RemotePlanner] = []

    def begin(**settings: Any) -> RemotePlanner:
        while running:
            running.pop().__exit__(None, None, None)
        kept = str(tmp_path / "kept")
        config = ServeConfig(bind=("tcp://127.0.0.1:*",), prefix_dir=kept, **settings)
        log = house.log.append
        it = serving(lambda: Lent(session, config, log, PrefixStore(Path(kept))), config, log=log)
        before = house.ready()
        server = it.__enter__()
        running.append(it)
        # A client that is refused while the backend loads asks again only half a second later.
        until(lambda: house.ready() > before)
        planners.append(RemotePlanner(server.endpoints[0], Options(timeout_s=20.0)))
        return planners[-1]

    yield begin
    for planner in planners:
        planner.close()
    for it in running:
        it.__exit__(None, None, None)


def test_a_persisted_prefix_is_there_again_and_changes_nothing(serve: Serve) -> None:
    planner = serve()
    cold = planner.plan(ASK)
    assert "persist" in planner.hello()["features"]
    put = planner.put_prefix("arm/ü", SYSTEM, persist=True)
    assert put["persisted"] is True
    assert planner.put_prefix("short", SYSTEM + "Now.")["persisted"] is False
    assert {p["prefix_id"]: p["persisted"] for p in planner.prefixes()} == {
        "arm/ü": True, "short": False,
    }  # fmt: skip
    again = serve()
    (kept,) = again.prefixes()
    assert (kept["prefix_id"], kept["held"], kept["persisted"]) == ("arm/ü", put["held"], True)
    warm = again.plan(ASK)
    assert cold.usage.cached_tokens == 0
    assert warm.usage.cached_tokens == put["held"] > 0
    assert warm.tokens == cold.tokens


def test_what_is_dropped_or_put_again_without_does_not_come_back(serve: Serve) -> None:
    planner = serve()
    for name in ("a", "b", "c"):
        planner.put_prefix(name, SYSTEM, persist=True)
    assert planner.drop_prefix("a") is True
    assert planner.drop_prefix("a") is False
    planner.put_prefix("b", SYSTEM)
    assert [prefix["prefix_id"] for prefix in serve().prefixes()] == ["c"]


def test_a_damaged_file_is_reported_and_left_out(serve: Serve, house: Any, tmp_path: Path) -> None:
    planner = serve()
    planner.put_prefix("good", SYSTEM, persist=True)
    planner.put_prefix("bad", SYSTEM, persist=True)
    planner.put_prefix("cut", SYSTEM, persist=True)
    path_of = PrefixStore.path_of
    bad, cut = (path_of(tmp_path / "kept", name) for name in ("bad", "cut"))
    whole = bad.read_bytes()
    bad.write_bytes(whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:])
    cut.write_bytes(cut.read_bytes()[:-100])
    pipe = tmp_path / "kept" / "pipe.prefix"
    os.mkfifo(pipe)  # an opening that waits for a writer would never end
    (tmp_path / "kept" / "zero.prefix").symlink_to("/dev/zero")
    again = serve()
    assert [prefix["prefix_id"] for prefix in again.prefixes()] == ["good"]
    skipped = again.skipped()
    assert sorted(skipped) == sorted(
        [
            "pipe.prefix must be a file (got prw-r--r--)",
            "zero.prefix must be a file (got crw-rw-rw-)",
            *(
                f"{path.name} must be as it was written (got an altered file); put the prefix again"
                for path in (bad, cut)
            ),
        ]
    )
    pipe.unlink()
    assert all(any(line in written for written in house.log) for line in skipped)
    assert str(tmp_path) not in str(skipped), "where it is on this machine is nobody's business"
    again.put_prefix("bad", SYSTEM, persist=True)
    assert len(serve().prefixes()) == 2, "putting it again mends it"


def test_a_disk_that_is_full_is_reported_and_the_prefix_still_serves(
    serve: Serve, house: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    planner = serve()
    monkeypatch.setattr("os.replace", full)
    with pytest.raises(PlanError, match="the log of the server says why") as caught:
        planner.put_prefix("arm", SYSTEM, persist=True)
    assert caught.value.code == "internal"
    assert any("No space left on device" in line for line in house.log)
    monkeypatch.undo()
    assert [(p["prefix_id"], p["persisted"]) for p in planner.prefixes()] == [("arm", False)]
    assert serve().prefixes() == []


PUT = {"op": "prefix.put", "prefix_id": "a", "system": SYSTEM, "persist": True}


@pytest.fixture
def written(
    serve: Serve, house: Any, monkeypatch: pytest.MonkeyPatch
) -> tuple[RemotePlanner, Any, threading.Event]:
    """A client; a raw client whose request `first` pins a prefix that is just being written to the
    disk; and the event that lets the writing end.
    """
    writing, go = threading.Event(), threading.Event()

    def slow(*_: object) -> None:
        writing.set()
        assert go.wait(20)

    planner = serve()
    assert planner.prefixes() == []
    monkeypatch.setattr("os.fsync", slow)
    peer = house.peer(SimpleNamespace(endpoints=(planner.endpoint,)))
    peer.send(id="first", **PUT)
    assert writing.wait(20)
    return planner, peer, go


def test_plans_do_not_wait_for_the_disk_and_nothing_stops_it(written: Any) -> None:
    planner, peer, go = written
    assert planner.plan(ASK).usage.cached_tokens > 0, "it is pinned already"
    assert peer.ask(op="cancel", id="c", target="first")["cancelled"] is False
    assert peer.silent(), "it is answered when it is on the disk"
    go.set()
    assert peer.final("first")["persisted"] is True
    assert [prefix["persisted"] for prefix in planner.prefixes()] == [True]


@pytest.mark.parametrize("persist", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_prefix_that_is_dropped_before_its_answer_is_cancelled(
    serve: Serve, written: Any, persist: bool
) -> None:
    planner, peer, go = written
    peer.send(op="prefix.drop", id="drop", prefix_id="a")
    peer.send(id="second", **{**PUT, "persist": persist})
    # The plan waits for the engine until `second` is pinned; `second` waits for the disk until
    # `first` is written. So when the plan is answered, `second` is pinned and not yet answered.
    assert peer.ask(op="plan", id="plan", prompt="Pick the mug.", max_tokens=4)["type"] == "result"
    go.set()
    replies = {reply["id"]: reply for reply in (peer.receive() for _ in range(3))}
    assert replies["first"]["persisted"] is True
    assert replies["drop"]["dropped"] is True
    assert replies["second"]["code"] == "cancelled", replies["second"]
    assert planner.prefixes() == []
    assert serve().prefixes() == []


def test_a_directory_is_of_one_server(tmp_path: Path) -> None:
    first = PrefixStore(tmp_path / "kept")
    with pytest.raises(ConfigError, match="of one server alone"):
        PrefixStore(tmp_path / "kept")
    first.close()
    PrefixStore(tmp_path / "kept").close()
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="must be a directory that can be written"):
        PrefixStore(tmp_path / "file")
    with pytest.raises(ConfigError, match="must be a directory that can be written"):
        PrefixStore(Path("/proc/self"))  # as a read-only disk: also root cannot write there
    assert (tmp_path / "kept").stat().st_mode & 0o777 == 0o700


@pytest.mark.slow
def test_after_sigkill_persisted_prefixes_are_there_and_nothing_is_to_repair(
    tmp_path: Path,
) -> None:
    kept, bind = tmp_path / "kept", f"ipc://{tmp_path}/plan"
    command = [sys.executable, "-c", RUN, "serve", "--package", str(package()), "--bind", bind,
               "--set", f"serve.prefix_dir={kept}", "--set", "engine.threads=1"]  # fmt: skip
    seen: list[tuple[int, ...] | None] = []
    held: list[int] = []
    for _ in range(2):
        child = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        try:
            with RemotePlanner(bind, Options(timeout_s=60.0)) as planner:
                if not seen:
                    held.append(planner.put_prefix("arm", SYSTEM, persist=True)["held"])
                result = planner.plan(ASK)
                held.append(result.usage.cached_tokens)
                seen.append(result.tokens)
        finally:
            child.kill()
        assert child.wait(20) == -signal.SIGKILL
        # A kill in the middle of a write leaves such a file.
        (kept / ".half.prefix.x7").write_bytes(b"half a file")
    assert seen[0] == seen[1]
    assert held[0] == held[1] == held[2] > 0
    PrefixStore(kept).close()
    assert [path.suffix for path in kept.iterdir()] == [".prefix"]
