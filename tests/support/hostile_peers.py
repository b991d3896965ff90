"""Messages that no well-meaning client would send, and peers that break the transport protocol."""

from __future__ import annotations

import random
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress

import msgspec
import zmq

GOOD: tuple[dict[str, object], ...] = (
    {"v": 1, "op": "ping", "id": "g1"},
    {"v": 1, "op": "plan", "id": "g2", "prompt": "Bring the cup.", "stream": "all", "session": "s"},
    {"v": 1, "op": "plan", "id": "g3", "messages": [{"role": "user", "content": "x"}]},
    {"v": 1, "op": "plan", "id": "g4", "prompt": "x", "json_schema": {"type": "object"}},
    {"v": 1, "op": "plan", "id": "g5", "prompt": "x", "deadline_ms": 5, "metadata": {"a": [1]}},
    {"v": 1, "op": "cancel", "id": "g6", "target": "g2", "session": "s"},
    {"v": 1, "op": "validate", "id": "g7", "prompt": "x", "json_schema": {"type": "string"}},
    {"v": 1, "op": "prefix.put", "id": "g8", "prefix_id": "p", "system": "You plan."},
    {"v": 1, "op": "prefix.put", "id": "g8", "prefix_id": "p", "system": "x", "persist": True},
    {"v": 1, "op": "prefix.drop", "id": "g9", "prefix_id": "p"},
    {"v": 1, "op": "stats", "id": "g10"},
    {"endpoint": "plan", "data": {"prompt": "x"}, "api_token": "t"},
)
"""Valid messages, from which the invalid ones are made. A change may leave a message valid: then it
is answered, if need be with a plan."""
WRONG: tuple[object, ...] = (
    None, True, -1, 1 << 63, 1 << 80, 1e308, "", "x" * 300, "\u202e\x00", [], [[]], {}, {"a": {}},
    "\U0001f9be", ["x"] * 50, {"x" * 70: 1},
)  # fmt: skip


def frames(rng: random.Random) -> Iterator[list[bytes]]:
    """Yields messages without end, each as its frames after the routing id."""
    while True:
        body = _body(rng)
        shape = rng.random()
        if shape < 0.85:
            yield [b"", body]
        elif shape < 0.9:
            yield [body]
        elif shape < 0.94:
            yield [b"", body, rng.randbytes(3)]
        elif shape < 0.97:
            yield [rng.randbytes(4), rng.randbytes(9), b"", body]
        else:
            yield [b"", b"", body] if rng.random() < 0.5 else [b""] * rng.randint(1, 12)


def _body(rng: random.Random) -> bytes:
    return rng.choice((_mutated, _mutated, _wrong, _wrong, _unknown, _deep, _large))(rng)


def _encoded(rng: random.Random, fields: dict[str, object]) -> bytes:
    try:
        return (msgspec.json if rng.random() < 0.5 else msgspec.msgpack).encode(fields)
    except OverflowError:  # an integer msgpack cannot hold
        return msgspec.json.encode(fields)


def _mutated(rng: random.Random) -> bytes:
    body = bytearray(_encoded(rng, dict(rng.choice(GOOD))))
    for _ in range(rng.randint(1, 4)):
        body[rng.randrange(len(body))] = rng.randrange(256)
    return bytes(body)


def _wrong(rng: random.Random) -> bytes:
    fields = dict(rng.choice(GOOD))
    fields[rng.choice(list(fields))] = rng.choice(WRONG)
    return _encoded(rng, fields)


def _unknown(rng: random.Random) -> bytes:
    fields = dict(rng.choice(GOOD))
    fields[rng.choice(("promt", "temprature", "n", "__class__", "x" * 500))] = rng.choice(WRONG)
    return _encoded(rng, fields)


def _deep(rng: random.Random) -> bytes:
    depth = rng.choice((70, 900, 5000))
    if rng.random() < 0.5:
        return b'{"op":"plan","id":"d","prompt":"x","metadata":' + b'{"a":' * depth
    nested = b"[" * depth + b"]" * depth
    return b'{"op":"plan","id":"d","prompt":"x","json_schema":{"a":' + nested + b"}}"


def _large(rng: random.Random) -> bytes:
    size = rng.choice((2_000, 20_000)) if rng.random() < 0.98 else 200_000
    key = rng.choice((b"prompt", b"token", b"prefix_id", b"x_own"))
    return b'{"op":"plan","id":"l","prompt":"x","' + key + b'":"' + b"y" * size + b'"}'


def misbehave(port: int, rng: random.Random) -> None:
    """Open a connection that breaks ZMTP (ZeroMQ's protocol) or stops in the middle of it."""
    with socket.create_connection(("127.0.0.1", port), timeout=5) as raw:
        greeting = b"\xff" + bytes(8) + b"\x7f\x03\x01NULL" + bytes(16) + b"\x00" + bytes(31)
        how = rng.randrange(5)
        if how == 0:
            return  # says nothing
        if how == 1:
            raw.sendall(rng.randbytes(80))
        elif how == 2:
            raw.sendall(greeting[: rng.randrange(len(greeting))])
        else:
            ready = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER\x08Identity\x00\x00\x00\x00"
            raw.sendall(greeting + b"\x04" + bytes([len(ready)]) + ready)
            if how == 3:
                # Announces a frame beyond every limit.
                raw.sendall(b"\x02" + (1 << 40).to_bytes(8, "big"))
            else:
                raw.sendall(b"\x01\x00\x00\x7f" + b"{" * rng.randrange(100))


def _catch_up(one: zmq.Socket[bytes]) -> None:
    """Wait until the server has read what was sent: frames that are only queued test nothing."""
    with suppress(zmq.Again):
        one.send_multipart([b"", b'{"op":"ping","id":"caught-up"}'])
    while one.poll(1000):
        if b"caught-up" in one.recv_multipart()[-1]:
            return


def attack(endpoint: str, count: int, seed: int, watch: Callable[[int], object]) -> None:
    """Send `count` messages over three connections. After every 100th, add a peer that misbehaves,
    wait until all is read, and call `watch` with the message's index.
    """
    rng, messages = random.Random(seed), frames(random.Random(seed))
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    sockets = [context.socket(zmq.DEALER) for _ in range(3)]
    for one in sockets:
        one.linger, one.sndtimeo = 0, 1000
        one.connect(endpoint)
    for i in range(count):
        # Again: the server cut the connection, for a frame beyond the limit; ZeroMQ reconnects.
        with suppress(zmq.Again):
            rng.choice(sockets).send_multipart(next(messages))
        if i % 100 == 0:
            misbehave(int(endpoint.rpartition(":")[2]), rng)
            for one in sockets:
                _catch_up(one)
            watch(i)
    for one in sockets:
        one.close()
    context.term()
