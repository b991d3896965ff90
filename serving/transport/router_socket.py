"""The server's sockets: the ROUTER, a monitor of connections, CURVE admission (ZAP), and a pipe
by which other threads wake the I/O thread.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal
from uuid import uuid4

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from thor_dflash.config.serving import ServeConfig
from thor_dflash.core.bounds import IMAGES_BYTES
from thor_dflash.core.errors import ConfigError
from thor_dflash.serving.transport import access, curve, tcp_proxy
from thor_dflash.serving.transport.tcp_proxy import TcpProxy

ZAP = "inproc://zeromq.zap.01"
BURST = 64
"""Messages read before other work gets its turn: a flood must not starve the engine's results."""
BURST_S = 0.05
"""Time after which no more of them are read: some take long, as large malformed ones do."""
PATIENCE_S = 5.0
"""A peer that takes none of its results for this long is treated as gone."""
CURVE_OVERHEAD = 33
"""Bytes CURVE adds to a frame before libzmq checks its size: command name, nonce, flags and MAC."""
MAX_HELD = 256
"""Most messages kept for a peer whose socket is full."""
ROUTER_OPTIONS = {
    zmq.ROUTER_MANDATORY: 1,  # a send to a peer that left fails, instead of being dropped
    zmq.ROUTER_HANDOVER: 1,  # a client that reconnects with its routing id keeps that id
    zmq.LINGER: 0,
    zmq.SNDHWM: 512,  # chunks of one or two plans; a reader further behind loses text chunks
    # Each may have MAXMSGSIZE bytes, for each connection. With 1, CURVE clients get no answer.
    zmq.RCVHWM: 2,
    zmq.HANDSHAKE_IVL: 3000,
    zmq.IMMEDIATE: 1,
}

Sent = Literal["sent", "held", "dropped", "gone"]


@dataclass(frozen=True, slots=True)
class ReceivedMessage:
    """A message as received, and the file descriptor of its connection."""

    frames: tuple[bytes, ...]
    fd: int
    key: str = ""
    """The client's public CURVE key, in Z85; "" without encryption."""


@dataclass(frozen=True, slots=True)
class ConnectionClosed:
    """A connection was closed."""

    fd: int


@dataclass(slots=True)
class _HeldMessages:
    since: float
    messages: deque[list[bytes]] = field(default_factory=deque[list[bytes]])


class RouterSocket:
    """The sockets. Only `wake` may be called from other threads than the I/O thread."""

    def __init__(self, config: ServeConfig) -> None:
        """Bind.

        Raises:
            ConfigError: an endpoint is unsafe, malformed or taken, or the keys cannot be used.
        """
        access.check_bind(config)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._held: dict[bytes, _HeldMessages] = {}
        self.last_sent = -math.inf
        """Time of the last send, monotonic, s."""
        self.idle = threading.Event()
        """Set while `wait` waits."""
        self._wake_reader, self._wake_writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._wake_lock = threading.RLock()
        """Guards the pipe. Reentrant: a signal handler may call `wake` while it is held."""
        self._closed_fds: set[int] = set()
        """Descriptors of closed connections that no new connection has reused yet."""
        self._closed = False
        self._zap: zmq.Socket[bytes] | None = None
        self._client_keys: frozenset[bytes] = frozenset()
        internal = f"thor-dflash-{os.getpid()}-{uuid4().hex}"
        self._proxy = TcpProxy(internal, config.max_message, sealed=bool(config.curve))
        try:
            self._router = self._open(config, internal)
            self._proxy.start()
        except BaseException:
            self._proxy.close()
            self._context.destroy(0)
            os.close(self._wake_reader)
            os.close(self._wake_writer)
            raise
        self._poller = zmq.Poller()
        for source in (self._router, self._monitor, self._zap, self._wake_reader):
            if source is not None:
                self._poller.register(source, zmq.POLLIN)

    def _open(self, config: ServeConfig, internal: str) -> zmq.Socket[bytes]:
        router = self._context.socket(zmq.ROUTER)
        for option, value in ROUTER_OPTIONS.items():
            router.setsockopt(option, value)
        sealed = CURVE_OVERHEAD if config.curve else 0
        router.setsockopt(zmq.MAXMSGSIZE, config.max_message + IMAGES_BYTES + sealed)
        if config.curve:
            self._enable_curve(router, Path(config.curve))
        self._monitor = router.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        self.endpoints = tuple(
            _bind(router, e) if e.startswith("ipc://") else self._proxy.listen(e)
            for e in config.bind
        )
        # Set only now: it applies to what is bound later. Others can see the name of this socket,
        # but only this process may connect.
        router.setsockopt(zmq.IPC_FILTER_PID, os.getpid())
        router.backlog = tcp_proxy.MAX_CONNECTIONS
        router.bind(f"ipc://@{internal}")
        self._files = tuple(map(_identity, self.endpoints))
        return router

    def _enable_curve(self, router: zmq.Socket[bytes], keys: Path) -> None:
        self._client_keys = curve.client_keys(keys)
        router.curve_secretkey = curve.secret_key(keys / "server.secret")
        router.curve_publickey = curve.public_key(keys / "server.public")
        router.curve_server = True
        router.zap_domain = b"plan"
        self._zap = self._context.socket(zmq.REP)
        self._zap.linger = 0
        self._zap.bind(ZAP)

    def wake(self) -> None:
        """Wake the I/O thread. May be called from any thread."""
        with self._wake_lock, suppress(BlockingIOError):  # the pipe is full: it will wake anyway
            if self._wake_writer >= 0:
                os.write(self._wake_writer, b"\0")

    def wait(self, seconds: float) -> Iterator[ReceivedMessage | ConnectionClosed]:
        """Wait for an event, then yield what arrived, oldest first: at most BURST messages, and
        none once the caller has spent BURST_S seconds on those before.
        """
        self._proxy.check()
        self.idle.set()
        self._poller.poll(max(0, round(1e3 * min(seconds, 0.02 if self._held else seconds))))
        self.idle.clear()
        self._clear_wakeups()
        self._answer_zap()
        until = time.monotonic() + BURST_S
        for _ in range(BURST):
            # Before each message: descriptors are reused, so the closing of a connection must be
            # reported before any message from a new connection with the same descriptor.
            yield from self._closed_connections()
            message = self._receive()
            if message is None:
                return
            yield message
            if message.fd in self._closed_fds:
                yield ConnectionClosed(message.fd)  # it closed before its last message was read
            if time.monotonic() >= until:
                return

    def _clear_wakeups(self) -> None:
        try:
            while os.read(self._wake_reader, 4096):
                pass
        except BlockingIOError:
            pass

    def _answer_zap(self) -> None:
        while self._zap is not None and self._zap.poll(0):
            version, request, _, _, _, mechanism, *credentials = self._zap.recv_multipart()
            known = mechanism == b"CURVE" and z85.encode(credentials[0]) in self._client_keys
            verdict = [b"200", b"OK"] if known else [b"400", b"unknown key"]
            user = z85.encode(credentials[0]) if known else b""
            self._zap.send_multipart([version, request, *verdict, user, b""])

    def _closed_connections(self) -> Iterator[ConnectionClosed]:
        while self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)
            fd = int(event["value"])
            if event["event"] == zmq.EVENT_ACCEPTED:
                self._closed_fds.discard(fd)
            else:
                self._closed_fds.add(fd)
                yield ConnectionClosed(fd)

    def _receive(self) -> ReceivedMessage | None:
        try:
            frames = self._router.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return None
        last = frames[-1]
        key = str(last.get("User-Id")) if self._zap else ""
        return ReceivedMessage(tuple(frame.bytes for frame in frames), _descriptor(last), key)

    def send(self, envelope: tuple[bytes, ...], body: bytes, *, droppable: bool = False) -> Sent:
        """Send a message. For a slow peer, drop it if it is droppable and hold it otherwise."""
        message = [*envelope, body]
        held = self._held.get(envelope[0])
        if held is not None:
            return self._hold(held, message, droppable)
        sent = self._send(message)
        if sent == "held":
            if droppable:
                return "dropped"
            self._held[envelope[0]] = _HeldMessages(time.monotonic(), deque([message]))
        return sent

    @staticmethod
    def _hold(held: _HeldMessages, message: list[bytes], droppable: bool) -> Sent:
        if droppable:
            return "dropped"
        if len(held.messages) >= MAX_HELD:
            return "gone"
        held.messages.append(message)
        return "held"

    def _send(self, message: list[bytes]) -> Sent:
        self.last_sent = time.monotonic()
        try:
            self._router.send_multipart(message, zmq.NOBLOCK)
        except zmq.Again:
            return "held"
        except zmq.ZMQError as e:
            if e.errno == zmq.EHOSTUNREACH:
                return "gone"
            raise
        return "sent"

    def retry(self, now: float) -> list[bytes]:
        """Try to send the held messages. Returns the routing ids of peers that are gone or took
        nothing for PATIENCE_S.
        """
        gone: list[bytes] = []
        for routing, held in list(self._held.items()):
            while held.messages and (sent := self._send(held.messages[0])) != "held":
                if sent == "gone":
                    held.messages.clear()
                    gone.append(routing)
                    break
                held.messages.popleft()
                held.since = now
            if now - held.since > PATIENCE_S:
                held.messages.clear()
                gone.append(routing)
            if not held.messages:
                del self._held[routing]
        return gone

    @property
    def holding(self) -> bool:
        """Whether messages are held for slow peers."""
        return bool(self._held)

    def close(self) -> None:
        """Close every socket. Idempotent."""
        if self._closed:
            return
        self._closed = True
        for endpoint, file in zip(self.endpoints, self._files, strict=True):
            # libzmq leaves it. Another server may have put its own there since.
            if file is not None and _identity(endpoint) == file:
                with suppress(OSError):
                    os.unlink(endpoint.removeprefix("ipc://"))
        # Linger, ms: the last answers of a drained server may still be in libzmq's queues.
        self._router.linger = 200
        self._router.disable_monitor()
        for source in (self._router, self._monitor, self._zap):
            if source is not None:
                source.close()
        self._context.term()
        self._proxy.close()
        with self._wake_lock:
            # Cleared before closing: a later `wake` must not write to a file that has reused the
            # descriptor.
            writer, self._wake_writer = self._wake_writer, -1
            os.close(writer)
        os.close(self._wake_reader)


def _descriptor(frame: zmq.Frame) -> int:
    try:
        return int(frame.get(zmq.SRCFD))
    except zmq.ZMQError:
        return -1  # the connection closed after its message was read


def _identity(endpoint: str) -> tuple[int, int] | None:
    """What identifies the file of an ipc endpoint; None if there is none."""
    if not endpoint.startswith("ipc://"):
        return None
    try:
        found = os.lstat(endpoint.removeprefix("ipc://"))
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _bind(router: zmq.Socket[bytes], endpoint: str) -> str:
    access.check_free(endpoint)
    # The umask decides the permissions of an ipc socket: only its owner may connect.
    before = os.umask(0o077)
    try:
        router.bind(endpoint)
    except zmq.ZMQError as e:
        why = zmq.strerror(e.errno or 0)
        raise ConfigError(
            f"serve.bind must be a free address of this machine (got {endpoint}: {why})"
        ) from e
    finally:
        os.umask(before)
    return router.getsockopt_string(zmq.LAST_ENDPOINT)
