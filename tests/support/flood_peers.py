"""Clients that send as much as the connection takes, without waiting for answers.

    python tests/support/flood_peers.py ENDPOINT KIND CLIENTS SECONDS SIZE

A process of its own: it must not share the interpreter lock with what is measured.
"""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress

import msgspec
import zmq


def _json(begin: bytes, item: bytes, size: int, end: bytes) -> bytes:
    return begin + b",".join([item] * ((size - len(begin + end)) // (len(item) + 1))) + end


def _msgpack(fields: dict[str, object], name: str, item: bytes, size: int) -> bytes:
    """A map with one more field: an array of items."""
    count = size - 300
    head = msgspec.msgpack.encode({**fields, name: 0})[:-1]
    return head + b"\xdd" + count.to_bytes(4, "big") + item * count


def _keys(size: int) -> bytes:
    pairs = (b'"x_%x":0' % i for i in range((size - 50) // 12))
    return b'{"op":"ping","id":"f",' + b",".join(pairs) + b"}"


PLAN = b'{"op":"plan","id":"f","prompt":"x","session":"f",'
BODIES: dict[str, Callable[[int], bytes]] = {
    # Valid.
    "numbers": lambda n: _json(b'{"op":"ping","id":"f","x_":[', b"1e308", n, b"]}"),
    "lists": lambda n: _msgpack({"op": "ping", "id": "f"}, "x_", b"\x90", n),
    "keys": _keys,
    "prompt": lambda n: PLAN[:-1].replace(b'"x"', b'"' + b"y " * ((n - 60) // 2) + b'"') + b"}",
    "messages": lambda n: _json(
        b'{"op":"plan","id":"f","messages":[', b'{"role":"user","content":""}', n, b"]}"
    ),
    "pings": lambda n: b'{"op":"ping","id":"f","x_":"' + b"y" * 3900 + b'"}',
    # Refused.
    "metadata": lambda n: _json(PLAN + b'"metadata":{"a":[', b"1e308", n, b"]}}"),
    "schema": lambda n: _json(PLAN + b'"json_schema":{"a":[', b"1e-320", min(n, 1 << 17), b"]}}"),
    "short": lambda n: _json(PLAN + b'"metadata":{"a":[', b"1e308", 4000, b"]}}"),
    "prompts": lambda n: _json(b'{"op":"plan","id":"f","prompt":[', b"[]", n, b"]}"),
    "surrogates": lambda n: PLAN[:-1].replace(b'"x"', b'"' + b"\\ud800" * (n // 7) + b'"') + b"}",
    "cut": lambda n: b'{"op":"plan","id":"f","prompt":"' + b"y" * (n - 60),
    "bytes": lambda n: bytes(n),
}
FRAMES = "frames"
"""The kind of flood that sends endless messages of frames of one byte."""


def flood(endpoint: str, body: bytes, clients: int, seconds: float) -> int:
    """Send one body again and again over each of some connections; how often it was sent."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    sockets = [context.socket(zmq.DEALER) for _ in range(clients)]
    for one in sockets:
        one.linger, one.sndhwm, one.rcvhwm = 0, 2, 100
        one.connect(endpoint)
    sent, end = 0, time.monotonic() + seconds
    while time.monotonic() < end:
        idle = True
        for one in sockets:
            with suppress(zmq.Again):
                one.send(body, zmq.NOBLOCK)
                sent, idle = sent + 1, False
            with suppress(zmq.Again):
                while one.recv(zmq.NOBLOCK):
                    pass
        if idle:
            time.sleep(0.001)
    context.destroy(0)
    return sent


GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(16) + b"\x00" + bytes(31)
READY = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER\x08Identity\x00\x00\x00\x00"
HELLO = GREETING + b"\x04" + bytes([len(READY)]) + READY
"""The handshake of ZMTP 3.0 without encryption. Source: rfc.zeromq.org, 23/ZMTP."""


def flood_frames(endpoint: str, clients: int, seconds: float) -> int:
    """Send messages without end over each of some connections; the bytes that were sent."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    piece, sent, end = b"\x01\x01x" * 100_000, 0, time.monotonic() + seconds
    peers: list[socket.socket] = []
    while time.monotonic() < end:
        while len(peers) < clients:
            peers.append(socket.create_connection((host, int(port)), timeout=5))
            peers[-1].sendall(HELLO)
            peers[-1].setblocking(False)
        for peer in list(peers):
            try:
                sent += peer.send(piece)
            except BlockingIOError:
                continue
            except OSError:  # closed by the server
                peers.remove(peer)
                peer.close()
        time.sleep(0.0005)
    for peer in peers:
        peer.close()
    return sent


def main() -> None:
    """Flood, and print how much was sent."""
    endpoint, kind, clients, seconds, size = sys.argv[1:]
    if kind == FRAMES:
        print(flood_frames(endpoint, int(clients), float(seconds)))
    else:
        print(flood(endpoint, BODIES[kind](int(size)), int(clients), float(seconds)))


if __name__ == "__main__":
    main()
