"""The options of both clients."""

from __future__ import annotations

from dataclasses import dataclass

from thor_dflash.serving.protocol.codec import MSGPACK, Codec


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of a client."""

    timeout_s: float = 5.0
    """Longest wait for a control operation, and for a connection."""
    plan_timeout_s: float = 120.0
    """Longest wait for a plan without a deadline, for the next piece of its stream, or for a
    prefix."""
    retries: int = 3
    """How often a request is sent again after `busy` or a lost connection. With 0 the client does
    not wait for a server that is warming up, either."""
    session: str | None = None
    """The session of requests that name none: the newer plan of a session displaces the older. None
    gives each call a session of its own, so that plans do not displace each other."""
    token: str | None = None
    """The secret for requests that carry none."""
    keys: str = ""
    """Directory with client.secret, client.public and server.public; "" for no encryption."""
    codec: Codec = MSGPACK
    max_message: int = 1 << 20
    """Longest request, bytes: the server's `limits.max_message`. A longer one would close the
    connection, and thereby cancel every other plan on it."""
