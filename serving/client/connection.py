"""The connection of a client: options and keys of its socket, and what became of it."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import zmq

from thor_dflash.core.errors import ConfigError, PlanError
from thor_dflash.serving.client.options import Options
from thor_dflash.serving.transport.endpoints import has_port
from thor_dflash.serving.transport.keepalive import KEEPALIVE

REFUSED = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
"""The server refused the connection. libzmq does not reconnect after these events."""
FAILED_HANDSHAKE = REFUSED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
"""These, or the server hung up: because the client has the wrong public key for it, or because it
ended."""
MONITORED = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_CLOSED  # connecting failed: nothing listens there
    | FAILED_HANDSHAKE
)
SOCKET_OPTIONS = {
    zmq.LINGER: 0,
    zmq.IMMEDIATE: 1,  # nothing is queued before there is a connection
    zmq.SNDHWM: 64,
    zmq.RCVHWM: 1024,
    **KEEPALIVE,
}

ConnectError = Callable[[str, int], PlanError]
"""Endpoint and last event of the connection -> the error for a connection that did not come about.
"""


class LostRequest(PlanError):
    """`unreachable` after the request was sent: the server may have begun it, or ended because of
    it."""


def unreachable(endpoint: str, seen: int, *, sent: bool = False) -> PlanError:
    """Return the error for a server that does not answer. `seen` is the last event of the
    connection, 0 for none; `sent`: whether the request was sent on it.
    """
    if seen & FAILED_HANDSHAKE:
        why = "it refused the connection: does it want CURVE keys, or other ones?"
    elif seen == zmq.EVENT_HANDSHAKE_SUCCEEDED:
        why = "it is connected, and silent"
    elif seen == zmq.EVENT_DISCONNECTED:
        why = "the connection was lost"
    else:
        why = "no connection was made in time: is a server running there?"
    # A refused client stays refused until the keys change: do not retry; a later request may work.
    retryable = not seen & FAILED_HANDSHAKE
    text = f"{endpoint} must answer (got none: {why})"
    kind = LostRequest if sent else PlanError
    return kind("unreachable", text, retryable=retryable)


def next_state(seen: int, event: int) -> int:
    """Return the known state of a connection after an event; `seen` is the state before it.

    A disconnection that follows a failed handshake is ignored: it adds nothing, as no request
    can have been lost.
    """
    never = event == zmq.EVENT_DISCONNECTED and seen != zmq.EVENT_HANDSHAKE_SUCCEEDED
    return seen if never else event


def event_of(frames: Sequence[bytes]) -> int:
    """Return the event of a monitor's message. zmq.utils.monitor does the same, and imports
    asyncio.
    """
    number: int = struct.unpack("=hi", frames[0])[0]
    return number & 0xFFFF


def client_closed(endpoint: str) -> PlanError:
    """Return the error for a request on a closed client."""
    return PlanError("unreachable", f"{endpoint} must answer (got none: the client was closed)")


def prepare(socket: zmq.Socket[Any], options: Options) -> None:
    """Set the options and keys that the sockets of both clients have in common.

    Raises:
        ConfigError: the keys cannot be read.
    """
    for option, value in SOCKET_OPTIONS.items():
        socket.setsockopt(option, value)
    if options.keys:
        # Imported here: a client without keys does not need this module.
        from thor_dflash.serving.transport import curve

        keys = Path(options.keys)
        socket.curve_secretkey = curve.secret_key(keys / "client.secret")
        socket.curve_publickey = curve.public_key(keys / "client.public")
        socket.curve_serverkey = curve.public_key(keys / "server.public")


def connect(socket: zmq.Socket[Any], endpoint: str, what: str = "endpoint") -> None:
    """Begin to connect. `what` names the option or argument that gave the endpoint.

    Raises:
        ConfigError: the endpoint is malformed, or its path is too long for a socket.
    """
    tcp = endpoint.startswith("tcp://") and has_port(endpoint)
    if not (tcp or endpoint.startswith("ipc://")):
        raise ConfigError(f"{what} must be tcp://host:port or ipc://path (got {endpoint})")
    socket.setsockopt(zmq.IPV6, int("[" in endpoint))
    try:
        socket.connect(endpoint)
    except (zmq.ZMQError, UnicodeError) as e:
        raise ConfigError(f"{what} must be an endpoint of ZeroMQ (got {endpoint}: {e})") from e


def reconnect(socket: zmq.Socket[Any], endpoint: str) -> None:
    """Connect again after libzmq gave up: the server may have restarted and accept our key now."""
    socket.disconnect(endpoint)  # otherwise libzmq ignores a connect to the same endpoint
    socket.connect(endpoint)


def check(endpoint: str, options: Options, what: str) -> None:
    """Check endpoint and keys before there is a client.

    Raises:
        ConfigError: as `prepare` and `connect`.
    """
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        prepare(socket, options)
        connect(socket, endpoint, what)
