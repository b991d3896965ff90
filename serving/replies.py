"""What both clients share: requests to bytes, bytes to replies, and when to try again."""

from __future__ import annotations

import time
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec
import zmq
from msgspec import Struct, structs

from thor_dflash.errors import Code, ConfigError, PlanError
from thor_dflash.serving import fields, wire
from thor_dflash.serving.alive import KEEPALIVE
from thor_dflash.serving.codec import MSGPACK, Codec

CODES = frozenset(typing.get_args(Code))
GRACE_S = 2.0
"""Beyond a plan's deadline, until its server is given up: the answer may be on its way."""
FAREWELL_MS = 200
"""How long a closing stream waits for its `cancel` to be on the way."""
REFUSED = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
"""The server said no. libzmq does not try again after these."""
FAILED_HANDSHAKE = REFUSED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
"""Or it hung up: that may be its no, to a wrong public key of its own, or its end."""
WATCHED = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_CLOSED  # nothing listens there
    | FAILED_HANDSHAKE
)
SOCKET_OPTIONS = {
    zmq.LINGER: 0,
    zmq.IMMEDIATE: 1,  # nothing is queued for a server that is not there
    zmq.SNDHWM: 64,
    zmq.RCVHWM: 1024,
    **KEEPALIVE,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How a client behaves."""

    timeout_s: float = 5.0
    """Longest wait for a control operation, and for a connection."""
    plan_timeout_s: float = 120.0
    """Longest wait for a plan without a deadline, or for the next piece of its stream, or for a
    prefix."""
    retries: int = 3
    """Times a request is sent again after `busy` or a lost connection. 0: nor is a server that
    warms up waited for."""
    session: str = field(default_factory=lambda: uuid4().hex)
    """Plans of one session replace each other. A repeated request so replaces its lost self."""
    token: str | None = None
    """Of requests that name none."""
    keys: str = ""
    """Directory with client.secret, client.public and server.public; "" for no encryption."""
    codec: Codec = MSGPACK
    max_message: int = 1 << 20
    """Longest request, bytes: the server's `limits.max_message`. A longer one would end the
    connection, and with it every other plan that came by it."""


class Reply(Struct, frozen=True):
    """What is read of every reply first."""

    type: str = ""
    id: str | None = None
    retry_after_ms: float | None = None


@dataclass(frozen=True, slots=True)
class Sent:
    """A request as it went out."""

    id: str
    body: bytes


def fill(request: wire.Request, options: Options) -> Sent:
    """A request with an id that was never used before, so that no late reply can be its.

    Raises:
        PlanError: bad_request, a text in it is not UTF-8 or a number too large; too_large.
    """
    id = uuid4().hex
    given: dict[str, Any] = {"id": id}
    if request.token is None:
        given["token"] = options.token
    if isinstance(request, wire.Ask) and request.session is None:
        given["session"] = options.session
    filled = structs.replace(request, **given)
    table = msgspec.to_builtins(filled)
    # Defaults are left out; these three must be said.
    table |= {"v": wire.VERSION, "op": request.op, "id": id}
    try:
        body = options.codec.encode(table)
    except (UnicodeEncodeError, OverflowError):
        for name, value in table.items():
            _check_value(name, value)
        raise
    if len(body) > options.max_message:
        rule = f"be <= {options.max_message} bytes, as it is sent to the server"
        raise PlanError("too_large", f"a request must {rule} (got {len(body)})")
    return Sent(id, body)


def _check_value(name: str, value: object) -> None:
    try:
        MSGPACK.encode(value)
    except UnicodeEncodeError as e:
        text = f"{name} must be UTF-8 (got: {e.reason} at {e.start})"
        raise PlanError("bad_request", text, field=name) from e
    except OverflowError as e:
        text = f"{name} must have numbers of 64 bits (got one out of range)"
        raise PlanError("bad_request", text, field=name) from e


def rest(ask: wire.Ask, began: float) -> wire.Ask:
    """An ask of `began` (monotonic, s) as it is now: its deadline is what is left of it.

    Raises:
        PlanError: nothing is.
    """
    if ask.deadline_ms is None:
        return ask
    left = ask.deadline_ms - int(1e3 * (time.monotonic() - began))
    if left < 1:
        raise PlanError("deadline", "the deadline passed before a server took the plan")
    return structs.replace(ask, deadline_ms=left)


def head(options: Options, body: bytes) -> Reply:
    """Whose reply it is, and of what kind."""
    return options.codec.decode(body, Reply)


def event(options: Options, body: bytes, reply: Reply) -> wire.Event:
    """A chunk or a result.

    Raises:
        PlanError: it is an error.
    """
    if reply.type == "chunk":
        return options.codec.decode(body, wire.Chunk)
    if reply.type == "result":
        return options.codec.decode(body, wire.Result)
    raise error(options, body)


def table(options: Options, body: bytes, reply: Reply) -> dict[str, Any]:
    """A control operation's answer.

    Raises:
        PlanError: it is an error.
    """
    if reply.type == "error":
        raise error(options, body)
    return options.codec.decode(body, dict[str, Any])


def error(options: Options, body: bytes) -> PlanError:
    """An error reply as the exception it is; a code this client does not know is `internal`."""
    told = options.codec.decode(body, dict[str, Any])
    code: Any = told.get("code")
    return PlanError(
        code if code in CODES else "internal",
        str(told.get("message", "")),
        field=told.get("field"),
        retry_after_ms=told.get("retry_after_ms"),
        min_ms=told.get("min_ms"),
    )


@dataclass(slots=True)
class Tries:
    """One request's time and attempts.

    Raises:
        PlanError: bad_request, it has a deadline that is none.
    """

    options: Options
    request: wire.Request
    left: int = field(init=False)
    began: float = field(default_factory=time.monotonic)
    since: float = field(init=False)
    """When it began to be waited for a message, monotonic s: whoever streams says so after each."""

    def __post_init__(self) -> None:
        self.left = self.options.retries
        self.since = self.began
        if isinstance(self.request, wire.Ask):
            fields.check_deadline(self.request)

    @property
    def until(self) -> float:
        """When to give up, monotonic s."""
        return self._due + (GRACE_S if _deadline_ms(self.request) is not None else 0.0)

    @property
    def connect_by(self) -> float:
        """When to give up waiting for a connection, monotonic s: long before a plan's own time,
        and before its deadline, after which nothing is asked.
        """
        return min(self._due, time.monotonic() + self.options.timeout_s)

    @property
    def _due(self) -> float:
        if (ms := _deadline_ms(self.request)) is not None:
            return self.began + 1e-3 * ms
        # A prefix is read like a prompt, in its turn.
        slow = isinstance(self.request, wire.Ask | wire.PrefixPut)
        return self.since + (self.options.plan_timeout_s if slow else self.options.timeout_s)

    def send(self) -> Sent:
        """The next attempt. A deadline is what is left of it.

        Raises:
            PlanError: the deadline passed while trying.
        """
        request = self.request
        if isinstance(request, wire.Ask):
            request = rest(request, self.began)
        return fill(request, self.options)

    def late(self, endpoint: str, seen: int) -> PlanError:
        """What is said when nothing came `until` now; `seen` as for `unreachable`."""
        bounded = not isinstance(self.request, wire.Ask) or self.request.deadline_ms is not None
        if bounded or seen != zmq.EVENT_HANDSHAKE_SUCCEEDED:
            return unreachable(endpoint, seen)
        # Its server is there: the plan only takes long, and would take as long again elsewhere.
        rule = "be answered, or its stream go on, within plan_timeout_s"
        got = f"nothing for {self.options.plan_timeout_s:g} s"
        return PlanError("deadline", f"a plan without deadline_ms must {rule} (got {got})")

    def farewell(self, sent: Sent) -> bytes:
        """What cancels an attempt: whoever may ask may."""
        cancel = wire.Cancel(target=sent.id, token=self.request.token)
        return fill(cancel, self.options).body

    def again(self, error: PlanError) -> float:
        """Seconds to wait before the next attempt.

        Raises:
            PlanError: `error`, where there is none.
        """
        wait = 1e-3 * (error.retry_after_ms or 100.0)
        late = time.monotonic() + wait >= self.until
        if not error.retryable or self.left <= 0 or late:
            raise error
        # A server that warms up is waited for, as long as the request has time.
        self.left -= error.code != "not_ready"
        return wait


def _deadline_ms(request: wire.Request) -> int | None:
    return request.deadline_ms if isinstance(request, wire.Ask) else None


def unreachable(endpoint: str, seen: int) -> PlanError:
    """A server that does not answer; `seen` is the last event of the connection, 0 for none."""
    if seen & FAILED_HANDSHAKE:
        why = "it refused the connection: does it want CURVE keys, or other ones?"
    elif seen == zmq.EVENT_HANDSHAKE_SUCCEEDED:
        why = "it is connected, and silent"
    elif seen == zmq.EVENT_DISCONNECTED:
        why = "the connection was lost"
    else:
        why = "nothing is connected there"
    # Who was refused will be, until somebody changes the keys: a later request may try again.
    retryable = not seen & FAILED_HANDSHAKE
    text = f"{endpoint} must answer (got none: {why})"
    return PlanError("unreachable", text, retryable=retryable)


def after(seen: int, event: int) -> int:
    """What is known of a connection after an event of it, `seen` being what was known before.

    A handshake that failed is followed by a disconnection, which says less: nothing was sent that
    could be lost.
    """
    never = event == zmq.EVENT_DISCONNECTED and seen != zmq.EVENT_HANDSHAKE_SUCCEEDED
    return seen if never else event


def closed(endpoint: str) -> PlanError:
    """A server that is asked by a client that was closed."""
    return PlanError("unreachable", f"{endpoint} must answer (got none: the client was closed)")


def prepare(socket: zmq.Socket[Any], options: Options) -> None:
    """Set what both clients' sockets have in common.

    Raises:
        ConfigError: the keys cannot be read.
    """
    for option, value in SOCKET_OPTIONS.items():
        socket.setsockopt(option, value)
    if options.keys:
        # Imported here: a client without keys needs nothing of the server's security.
        from thor_dflash.serving import security

        keys = Path(options.keys)
        socket.curve_secretkey = security.secret_key(keys / "client.secret")
        socket.curve_publickey = security.public_key(keys / "client.public")
        socket.curve_serverkey = security.public_key(keys / "server.public")


def connect(socket: zmq.Socket[Any], endpoint: str, what: str = "endpoint") -> None:
    """Begin to connect. `what` is the name by which the endpoint was given.

    Raises:
        ConfigError: the endpoint is malformed.
    """
    socket.setsockopt(zmq.IPV6, int("[" in endpoint))
    try:
        socket.connect(endpoint)
    except (zmq.ZMQError, UnicodeError) as e:
        raise ConfigError(f"{what} must be tcp://host:port or ipc://path (got {endpoint})") from e


def reconnect(socket: zmq.Socket[Any], endpoint: str) -> None:
    """Begin anew where libzmq has given up: who refused may have come back with our key."""
    socket.disconnect(endpoint)  # it would take the same endpoint for one that it has
    socket.connect(endpoint)


def check(endpoint: str, options: Options, what: str) -> None:
    """Refuse what no connection can be begun with, before there is a client.

    Raises:
        ConfigError: as `prepare` and `connect`.
    """
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        prepare(socket, options)
        connect(socket, endpoint, what)
