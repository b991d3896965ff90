"""A proxy between TCP clients and the ROUTER, for the two limits that libzmq lacks: the frames of a
message (see zmtp_limits.py) and the bytes that a connection sends per second. A client that sends
more waits, while others are served. Clients on ipc are this user's own processes and need neither.
"""

from __future__ import annotations

import fcntl
import heapq
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import count

from thor_dflash.core.bounds import IMAGES_BYTES
from thor_dflash.core.errors import ConfigError
from thor_dflash.serving.transport.keepalive import KEEPALIVE_EVERY_S, SILENT_S, UNREAD_MS
from thor_dflash.serving.transport.zmtp_limits import FrameLimits

MAX_CONNECTIONS = 256
"""Each takes three descriptors; most systems allow a process 1024."""
QUIET_S = 60.0
"""One more connection takes the place of the one on which nothing was sent or answered for the
longest time, if that is so long: who only connects must not keep others out for ever. Otherwise it
is closed at once. A client that lost its place connects again with its next request."""
PIECE = 1 << 16
"""Most bytes read at a time."""
TURN = 8
"""Most events handled before others are looked for: a client that sends little need not wait for
all those that send much."""
SPARE = 16
"""A connection may send max_message bytes a second, and a piece at once. All together may send so
many times that rate beyond their own."""
SPARE_S = 0.25
"""So many seconds' worth of this may be sent at once."""
LARGE = 16
"""Most connections of which libzmq holds a part of a message longer than max_message, as those with
images are. With one more, the one that began first is closed: who sends has soon sent."""
RETRY_S = 1.0
"""Pause of a listener that cannot accept: no descriptor is left."""
SIOCGIFADDR = 0x8915
"""Asks for an interface's IPv4 address. Source: netdevice(7)."""
CLOSING_S = 0.5
"""Longest time that closing gives to the last answers."""


class _Side:
    """One of the two sockets of a connection, and what is to be written to it. Bytes that are read
    from one side are written to its peer; while some are pending there, no more are read.
    """

    def __init__(self, stream: socket.socket, limits: FrameLimits | None, *, paced: bool) -> None:
        self.socket = stream
        self.paced = paced
        """Whether the rate at which it sends is limited."""
        self.limits = limits
        """What it may send; None: anything."""
        self.pending = memoryview(b"")
        """Read from the peer, and not yet written."""
        self.ended = False
        """It has sent everything."""
        self.paused = False
        """It has sent more than its rate, and is not read until a timer says so."""
        self.paid_until = 0.0
        """When it has sent no more than its rate, monotonic, s."""
        self.active = time.monotonic()
        """When it sent something, or was made."""
        self.mask = 0
        """The events it is registered for."""
        self.peer = self
        """The other side."""


class TcpProxy:
    """Listens, and runs on a thread of its own until it is closed."""

    def __init__(self, connect_to: str, max_message: int, *, sealed: bool) -> None:
        """`connect_to` is the ROUTER's abstract Unix socket, without its leading NUL. Frames of a
        `sealed` (encrypted) connection cannot be seen.
        """
        self._address = "\0" + connect_to
        self._max_message = max_message
        self._sealed = sealed
        self._epoll = select.epoll()
        self._listeners: dict[int, socket.socket] = {}
        self._sides: dict[int, _Side] = {}
        self._large: dict[_Side, None] = {}
        """Those that send such a message, the first one first."""
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        """A heap: when it is due, monotonic, s; order of setting; what to do."""
        self._order = count()
        self._closing = False
        self._spare_paid_until = 0.0
        """As `paid_until` of a side, for what connections send beyond their rates."""
        self._fault: BaseException | None = None
        self._wake_reader, self._wake_writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._epoll.register(self._wake_reader, select.EPOLLIN)
        self._thread = threading.Thread(target=self._run, name="tcp proxy", daemon=True)

    def listen(self, endpoint: str) -> str:
        """Listen on a tcp endpoint; return it with its actual port.

        Raises:
            ConfigError: the address is not one of this machine, or taken.
        """
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        six = "[" in host
        try:
            stream = _listener(host.strip("[]"), 0 if port == "*" else int(port), six=six)
        except (OSError, UnicodeError) as e:
            why = getattr(e, "strerror", None) or str(e)
            raise ConfigError(
                f"serve.bind must be a free address of this machine (got {endpoint}: {why})"
            ) from e
        self._listeners[stream.fileno()] = stream
        self._epoll.register(stream, select.EPOLLIN)
        host, port = stream.getsockname()[:2]
        return f"tcp://[{host}]:{port}" if six else f"tcp://{host}:{port}"

    def start(self) -> None:
        """Begin to serve."""
        self._thread.start()

    def close(self) -> None:
        """Pass on what the ROUTER has sent, then close every socket. Idempotent."""
        if self._wake_writer < 0:
            return
        self._closing = True
        os.close(self._wake_writer)  # the reader's end wakes the thread
        self._wake_writer = -1
        if self._thread.ident is None:
            self._end()
        else:
            self._thread.join()

    def check(self) -> None:
        """Raise what ended the thread, if anything did."""
        if self._fault is not None:
            raise RuntimeError("the proxy of the tcp endpoints has failed") from self._fault

    # --- the thread

    def _run(self) -> None:
        try:
            while not self._closing:
                self._poll()
            self._epoll.unregister(self._wake_reader)
            for fd in self._listeners:
                with suppress(FileNotFoundError):  # it is paused
                    self._epoll.unregister(fd)
            until = time.monotonic() + CLOSING_S
            while self._sides and time.monotonic() < until:
                self._poll()
        except BaseException as e:
            self._fault = e
        finally:
            self._end()

    def _end(self) -> None:
        """Close everything."""
        for side in list(self._sides.values()):
            side.socket.close()
        for listener in self._listeners.values():
            listener.close()
        self._epoll.close()
        os.close(self._wake_reader)

    def _poll(self) -> None:
        """Run the timers that are due, then wait for events and handle some of them."""
        now = time.monotonic()
        while self._timers and self._timers[0][0] <= now:
            heapq.heappop(self._timers)[2]()
        longest = CLOSING_S / 10 if self._closing else -1.0
        timeout = max(0.001, self._timers[0][0] - now) if self._timers else longest
        ready = self._epoll.poll(timeout)
        for fd, events in ready if len(ready) <= TURN else self._least_first(ready):
            if fd in self._listeners:
                self._accept(self._listeners[fd])
            elif fd in self._sides:  # not closed by an earlier event
                self._serve(self._sides[fd], events)

    def _least_first(self, ready: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """The events to handle before others are looked for: of answers first, and of those who
        sent least.
        """

        def sent(event: tuple[int, int]) -> float:
            side = self._sides.get(event[0])
            return side.paid_until if side else 0.0

        return heapq.nsmallest(TURN, ready, sent)

    def _call_later(self, seconds: float, work: Callable[[], None]) -> None:
        """Set a timer."""
        at = time.monotonic() + seconds
        heapq.heappush(self._timers, (at, next(self._order), work))

    def _accept(self, listener: socket.socket) -> None:
        """Accept a client and connect it to the ROUTER, or close it: see MAX_CONNECTIONS."""
        try:
            client = listener.accept()[0]
        except (BlockingIOError, ConnectionError):
            return  # it left already
        except OSError:
            self._epoll.unregister(listener)
            self._call_later(RETRY_S, lambda: self._epoll.register(listener, select.EPOLLIN))
            return
        if len(self._sides) >= 2 * MAX_CONNECTIONS and not self._drop_quiet():
            client.close()
            return
        try:
            server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        except OSError:
            client.close()
            return
        try:
            client.setblocking(False)
            _keep_alive(client)
            server.setblocking(False)
            server.connect(self._address)
        except OSError:  # the client has left, or the ROUTER is closing
            client.close()
            server.close()
            return
        limits = None if self._sealed else FrameLimits(self._max_message + IMAGES_BYTES)
        sides = _Side(client, limits, paced=True), _Side(server, None, paced=False)
        for side, other in zip(sides, reversed(sides), strict=True):
            side.peer = other
            self._sides[side.socket.fileno()] = side
            self._watch(side)

    def _drop_quiet(self) -> bool:
        """Close the connection that has been quiet for the longest, if that is long enough."""

        def active(side: _Side) -> float:
            return max(side.active, side.peer.active)

        quietest = min(self._sides.values(), key=active)
        if time.monotonic() - active(quietest) < QUIET_S:
            return False
        self._drop(quietest)
        return True

    def _serve(self, side: _Side, events: int) -> None:
        """Write what is pending and read what has come. Closes a connection that failed, or one of
        whose sides has sent everything, which is written.
        """
        try:
            if side.pending and events & ~select.EPOLLIN:
                side.pending = side.pending[side.socket.send(side.pending) :]
            if not side.ended and not side.peer.pending and events & ~select.EPOLLOUT:
                self._read(side)
        except BlockingIOError:
            pass
        except OSError:
            self._drop(side)
            return
        if side.socket.fileno() < 0:
            return
        for one in (side, side.peer):
            if one.ended and not one.peer.pending:
                self._drop(side)
                return
        self._watch(side)
        self._watch(side.peer)

    def _read(self, side: _Side) -> None:
        """Read a piece and pass it on.

        Raises:
            OSError: either socket failed; BlockingIOError if there was nothing to read.
        """
        data = side.socket.recv(PIECE)
        side.active = time.monotonic()
        if not data:
            side.ended = True
            return
        if side.limits is not None and not self._within_limits(side, side.limits, data):
            self._drop(side)
            return
        peer = side.peer
        try:
            sent = peer.socket.send(data)
        except BlockingIOError:
            sent = 0
        if sent < len(data):
            peer.pending = memoryview(data)[sent:]
        if side.paced:
            self._pace(side, len(data))

    def _within_limits(self, side: _Side, limits: FrameLimits, data: bytes) -> bool:
        """Whether a side may go on after it has sent this, too. May close another connection: see
        LARGE.
        """
        if not limits.allows(data):
            return False
        if limits.under_way <= self._max_message:
            self._large.pop(side, None)
        else:
            self._large.setdefault(side)
            if len(self._large) > LARGE:
                self._drop(next(iter(self._large)))
        return True

    def _pace(self, side: _Side, size: int) -> None:
        """Pause a side that has sent `size` bytes beyond its rate and the spare one of all."""
        now, seconds = time.monotonic(), size / self._max_message
        side.paid_until = max(side.paid_until, now - PIECE / self._max_message) + seconds
        if side.paid_until <= now:
            return
        self._spare_paid_until = max(self._spare_paid_until, now - SPARE_S) + seconds / SPARE
        if self._spare_paid_until <= now:
            side.paid_until = now
            return
        side.paused = True
        self._call_later(side.paid_until - now, lambda: self._unpause(side))

    def _unpause(self, side: _Side) -> None:
        side.paused = False
        if side.socket.fileno() >= 0:
            self._watch(side)

    def _watch(self, side: _Side) -> None:
        """Register a side for the events that it waits for now."""
        reads = not (side.ended or side.paused or side.peer.pending)
        mask = select.EPOLLIN * reads | select.EPOLLOUT * bool(side.pending)
        if mask == side.mask:
            return
        # Without any event it is not registered: the end of a connection is always reported.
        if not side.mask:
            self._epoll.register(side.socket, mask)
        elif mask:
            self._epoll.modify(side.socket, mask)
        else:
            self._epoll.unregister(side.socket)
        side.mask = mask

    def _drop(self, side: _Side) -> None:
        """Close a connection, by either of its sides."""
        for one in (side, side.peer):
            self._large.pop(one, None)
            self._sides.pop(one.socket.fileno(), None)
            one.socket.close()  # epoll forgets it


def _listener(name: str, port: int, *, six: bool) -> socket.socket:
    stream = socket.socket(socket.AF_INET6 if six else socket.AF_INET, socket.SOCK_STREAM)
    try:
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if six:
            stream.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        found = socket.getaddrinfo(
            _address(name), port, stream.family, socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        stream.bind(found[0][4])
        stream.listen(MAX_CONNECTIONS)
        stream.setblocking(False)
    except BaseException:
        stream.close()
        raise
    return stream


def _address(name: str) -> str | None:
    """The address of an interface, such as eth0; any other name as it is; None for `*`.

    Raises:
        OSError: the interface has no IPv4 address.
    """
    if name == "*":
        return None
    if name not in (interface for _, interface in socket.if_nameindex()):
        return name
    request = struct.pack("16s16x", name.encode())  # struct ifreq: a name, then a sockaddr_in
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        answer = fcntl.ioctl(any_socket, SIOCGIFADDR, request)
    return socket.inet_ntoa(answer[20:24])


def _keep_alive(client: socket.socket) -> None:
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_EVERY_S)
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_EVERY_S)
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, SILENT_S - 1)
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNREAD_MS)
