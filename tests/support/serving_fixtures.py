"""For the tests of serving: servers on free ports, raw clients, and a backend that takes no step
until a test lets it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import zmq
from support.waiting import PATIENCE_S, until

from thor_dflash.config.serving import ServeConfig
from thor_dflash.serving.planner.backend import Backend, PlanRun, Prepared, StopReason
from thor_dflash.serving.planner.mock_backend import MockBackend
from thor_dflash.serving.protocol import messages
from thor_dflash.serving.server.server import Server, serving

if TYPE_CHECKING:
    from thor_dflash.runtime.session import Session


@dataclass
class HeldRun:
    """A run of a mock of which every step waits for a permit."""

    run: PlanRun
    held: HeldBackend

    @property
    def done(self) -> bool:
        return self.run.done

    @property
    def phase(self) -> messages.Phase:
        return self.run.phase

    def step(self) -> Sequence[messages.Chunk]:
        self.held.waiting.set()
        assert self.held.permits.acquire(timeout=PATIENCE_S)
        self.held.waiting.clear()
        self.held.steps += 1
        return self.run.step()

    def result(self, stop: StopReason | None) -> messages.Result:
        self.held.ended.append(stop)
        return self.run.result(stop)

    def close(self) -> None:
        self.run.close()


class HeldBackend(MockBackend):
    """A mock backend whose runs take no step until a test permits it with `let`."""

    def __init__(self) -> None:
        super().__init__(ServeConfig())
        self.permits = threading.Semaphore(0)
        self.waiting = threading.Event()
        """Set while a run waits for a permit."""
        self.steps = 0
        self.ended: list[StopReason | None] = []
        self.started: list[str] = []
        """Ids of the plans in the order in which they were started."""

    def let(self, steps: int = 10_000) -> None:
        self.permits.release(steps)

    def start(self, prepared: Prepared, left_ms: float | None) -> PlanRun:
        self.started.append(prepared.ask.id)
        return HeldRun(super().start(prepared, left_ms), self)

    def close(self) -> None:
        self.permits.release(10_000)


class Peer:
    """A raw client: what a robot in another language would send, frame by frame."""

    def __init__(self, endpoint: str, kind: int = zmq.DEALER, **options: int) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self.context.socket(kind)
        self.socket.linger = 0
        for name, value in options.items():
            self.socket.setsockopt(zmq.SocketOption[name], value)
        self.socket.connect(endpoint)
        self.envelope = [] if kind == zmq.REQ else [b""]

    def send(self, body: bytes | None = None, **fields: object) -> None:
        self.socket.send_multipart(
            [*self.envelope, msgspec.json.encode(fields) if body is None else body]
        )

    def receive(self) -> dict[str, Any]:
        assert self.socket.poll(1e3 * PATIENCE_S), "no answer"
        reply: dict[str, Any] = msgspec.json.decode(self.socket.recv_multipart()[-1])
        return reply

    def ask(self, **fields: object) -> dict[str, Any]:
        self.send(**fields)
        return self.receive()

    def final(self, id: str) -> dict[str, Any]:
        """Skip the chunks of a request and return its final answer. An answer to another request
        fails the test.
        """
        while (reply := self.receive())["type"] == "chunk":
            assert reply["id"] == id
        assert reply["id"] == id, reply
        return reply

    def silent(self, ms: int = 50) -> bool:
        return not self.socket.poll(ms)

    def close(self) -> None:
        self.socket.close(0)
        self.context.term()


class House:
    """Starts servers and clients, and closes them all at the end of the test."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self.log: list[str] = []

    def serve(self, backend: Backend, **config: Any) -> Server:
        # The watchdog outlasts a test that gives up: it would end the process that runs the tests.
        usual = {"bind": ("tcp://127.0.0.1:*",), "drain_s": 10.0, "watchdog_s": 3 * PATIENCE_S}
        settings = ServeConfig(**{**usual, **config})
        ready = self.ready() + 1
        server = self.load(lambda: backend, settings)
        until(lambda: self.ready() == ready)
        return server

    def ready(self) -> int:
        """How many servers have become ready."""
        return sum(line.startswith("ready after") for line in self.log)

    def load(self, load: Callable[[], Backend], config: ServeConfig) -> Server:
        return self._stack.enter_context(serving(load, config, log=self.log.append))

    def mock(self, cycle_s: float = 0.0, **config: Any) -> Server:
        return self.serve(MockBackend(ServeConfig(), cycle_s), **config)

    def skipping(self, lost: int) -> Server:
        """A mock that drops the chunk of this number of every plan, as for a slow reader."""
        server = self.mock()
        send = server._handlers._send

        def skip(*message: Any, droppable: bool = False) -> bool:
            return (droppable and message[-1] == lost) or send(*message, droppable=droppable)

        server._handlers._send = skip  # type: ignore[method-assign]
        return server

    def held(self, **config: Any) -> tuple[Server, HeldBackend]:
        held = HeldBackend()
        server = self.serve(held, **config)
        self._stack.callback(held.close)
        return server, held

    def running(self, **plan: Any) -> tuple[HeldBackend, Peer]:
        """The backend of a held server that has begun this plan, and the plan's client."""
        server, held = self.held()
        peer = self.peer(server)
        peer.send(**plan)
        assert held.waiting.wait(PATIENCE_S)
        return held, peer

    def held_later(self) -> tuple[Server, HeldBackend, threading.Event]:
        """As `held`, but the server loads until the event is set."""
        held, load = HeldBackend(), threading.Event()

        def loaded() -> HeldBackend:
            assert load.wait(PATIENCE_S)
            return held

        server = self.load(loaded, ServeConfig(bind=("tcp://127.0.0.1:*",)))
        self._stack.callback(held.close)
        self._stack.callback(load.set)
        return server, held, load

    def peer(self, server: Server, kind: int = zmq.DEALER, **options: int) -> Peer:
        peer = Peer(server.endpoints[0], kind, **options)
        self._stack.callback(peer.close)
        return peer

    def close(self) -> None:
        self._stack.close()


@pytest.fixture
def house() -> Iterator[House]:
    it = House()
    yield it
    it.close()
    assert not [line for line in it.log if "Traceback" in line], it.log


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    """A session with random weights, shared by the tests of one file."""
    # Imported here: most tests of serving need no model.
    from support.constrained_model import package

    from thor_dflash.config.engine import EngineConfig
    from thor_dflash.core.progress import Silent
    from thor_dflash.runtime.session import open_session

    it = open_session(package(), EngineConfig(threads=1), Silent())
    yield it
    it.close()
