"""Shared by both clients: encoding requests, decoding replies, timeouts and retries."""

from __future__ import annotations

import errno
import time
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec
import zmq
from msgspec import Struct, structs

from thor_dflash.core.errors import Code, ConfigError, PlanError
from thor_dflash.core.message_text import cut, visible
from thor_dflash.serving.protocol import messages, validation
from thor_dflash.serving.protocol.codec import MSGPACK, Codec
from thor_dflash.serving.transport.endpoints import has_port
from thor_dflash.serving.transport.keepalive import KEEPALIVE

CODES = frozenset(typing.get_args(Code))
GRACE_S = 2.0
"""Wait beyond a plan's deadline before giving up, s: the answer may be in transit."""
FAREWELL_MS = 200
"""How long closing a stream waits for its `cancel` to be sent."""
PATH_BYTES = 107
"""Longest path of a unix socket. Source: unix(7)."""
REFUSED = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
"""The server refused the connection. libzmq does not reconnect after these events."""
FAILED_HANDSHAKE = REFUSED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
"""These, or the server hung up: because the client has the wrong public key for it, or because it
ended."""
WATCHED = (
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of a client.

    Raises:
        ConfigError: a number in it is none, or is too small; names the field.
    """

    timeout_s: float = 5.0
    """Longest wait for a control operation, and for a connection."""
    plan_timeout_s: float = 120.0
    """Longest wait for a plan without a deadline, for the next piece of its stream, or for a
    prefix."""
    retries: int = 3
    """How often a request is sent again after `busy` or a lost connection. With 0 the client does
    not wait for a server that is warming up, either."""
    session: str = field(default_factory=lambda: uuid4().hex)
    """Plans of one session replace each other, so a repeated request replaces the lost attempt."""
    token: str | None = None
    """The secret for requests that carry none."""
    keys: str = ""
    """Directory with client.secret, client.public and server.public; "" for no encryption."""
    codec: Codec = MSGPACK
    max_message: int = 1 << 20
    """Longest request, bytes: the server's `limits.max_message`. A longer one would close the
    connection, and thereby cancel every other plan on it."""

    def __post_init__(self) -> None:
        for name, value in (("timeout_s", self.timeout_s), ("plan_timeout_s", self.plan_timeout_s)):
            if not (_is(value, int, float) and value > 0):
                raise ConfigError(f"{name} must be a number of seconds > 0 (got {value!r})")
        for name, value, least in (
            ("retries", self.retries, 0), ("max_message", self.max_message, 1),
        ):  # fmt: skip
            if not (_is(value, int) and value >= least):
                raise ConfigError(f"{name} must be an integer >= {least} (got {value!r})")


def _is(value: object, *kinds: type) -> bool:
    # By the exact type: True is an int to isinstance.
    return type(value) in kinds


class Reply(Struct, frozen=True):
    """The fields of every reply that are read first."""

    type: str = ""
    id: str | None = None
    retry_after_ms: float | None = None


@dataclass(frozen=True, slots=True)
class Sent:
    """An encoded request and its id."""

    id: str
    body: bytes


def fill(request: messages.Request, options: Options) -> Sent:
    """Encode a request under a new unique id, so that no late reply can be taken for its answer.

    Raises:
        PlanError: bad_request, something in it cannot be sent: a text that is not UTF-8, a number
            of more than 64 bits, an object that is no value of JSON; too_large.
    """
    id = uuid4().hex
    given: dict[str, Any] = {"id": id}
    if request.token is None:
        given["token"] = options.token
    if isinstance(request, messages.PlanRequest) and request.session is None:
        given["session"] = options.session
    filled = structs.replace(request, **given)
    try:
        table = msgspec.to_builtins(filled)
        # Fields with default values are left out, but these three are required.
        table |= {"v": messages.VERSION, "op": request.op, "id": id}
        body = options.codec.encode(table)
    except (UnicodeEncodeError, OverflowError, TypeError):
        for known in structs.fields(filled):
            _check_value(known.encode_name, getattr(filled, known.name))
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
    except TypeError as e:
        text = f"{name} must be plain JSON values (got: {cut(str(e))})"
        raise PlanError("bad_request", text, field=name) from e


def rest(ask: messages.PlanRequest, began: float) -> messages.PlanRequest:
    """Return an ask begun at `began` (monotonic, s) with its deadline reduced to the time left.

    Raises:
        PlanError: no time is left.
    """
    if ask.deadline_ms is None:
        return ask
    left = ask.deadline_ms - int(1e3 * (time.monotonic() - began))
    if left < 1:
        raise PlanError("deadline", "the deadline passed before a server took the plan")
    return structs.replace(ask, deadline_ms=left)


def head(options: Options, body: bytes) -> Reply:
    """Decode the id and type of a reply."""
    return options.codec.decode(body, Reply)


def event(options: Options, body: bytes, reply: Reply) -> messages.Event:
    """Decode a chunk or a result.

    Raises:
        PlanError: the reply is an error.
    """
    if reply.type == "chunk":
        return options.codec.decode(body, messages.Chunk)
    if reply.type == "result":
        return options.codec.decode(body, messages.Result)
    raise error(options, body)


def table(options: Options, body: bytes, reply: Reply) -> dict[str, Any]:
    """Decode the answer to a control operation.

    Raises:
        PlanError: the reply is an error.
    """
    if reply.type == "error":
        raise error(options, body)
    return options.codec.decode(body, dict[str, Any])


def error(options: Options, body: bytes) -> PlanError:
    """Return an error reply as an exception; a code unknown to this client becomes `internal`."""
    told = options.codec.decode(body, dict[str, Any])
    code: Any = told.get("code")
    return PlanError(
        code if code in CODES else "internal",
        str(told.get("message", "")),
        field=told.get("field"),
        retry_after_ms=told.get("retry_after_ms"),
        min_ms=told.get("min_ms"),
    )


@dataclass(slots=True, eq=False)
class Tries:
    """The attempts of one request and their time limits.

    Raises:
        PlanError: bad_request, it has an id, or a wrong deadline or session.
    """

    options: Options
    request: messages.Request
    displaced: bool = False
    """Whether a later ask of its session was taken by a server."""
    left: int = field(init=False)
    began: float = field(default_factory=time.monotonic)
    since: float = field(init=False)
    """Start of the wait for the next message, monotonic, s. A stream sets it after each message."""

    def __post_init__(self) -> None:
        self.left = self.options.retries
        self.since = self.began
        if (id := self.request.id) != messages.NO_ID:
            text = f"id must be left out: the client gives each try its own (got {_text(id)})"
            raise PlanError("bad_request", text, field="id")
        if isinstance(self.request, messages.PlanRequest):
            validation.check_reckoned(self.request)

    @property
    def displaces(self) -> bool:
        """Whether it is a plan that takes the place of others of its session."""
        return isinstance(self.request, messages.PlanRequest) and self.request.preempt != "none"

    @property
    def until(self) -> float:
        """When to give up, monotonic, s."""
        return self._due + (GRACE_S if _deadline_ms(self.request) is not None else 0.0)

    @property
    def connect_by(self) -> float:
        """When to give up waiting for a connection, monotonic, s: after `timeout_s`, and no later
        than the deadline, after which nothing is sent.
        """
        return min(self._due, time.monotonic() + self.options.timeout_s)

    @property
    def _due(self) -> float:
        if (ms := _deadline_ms(self.request)) is not None:
            return self.began + 1e-3 * ms
        # `prefix.put` takes as long as a plan: it queues and is prefilled like a prompt.
        slow = isinstance(self.request, messages.PlanRequest | messages.PrefixPut)
        return self.since + (self.options.plan_timeout_s if slow else self.options.timeout_s)

    def send(self) -> Sent:
        """Encode the next attempt, with its deadline reduced to the time left.

        Raises:
            PlanError: the deadline passed while trying.
        """
        request = self.request
        if isinstance(request, messages.PlanRequest):
            request = rest(request, self.began)
        return fill(request, self.options)

    def late(self, endpoint: str, seen: int) -> PlanError:
        """Return the error for a reply that did not come in time; `seen` as for `unreachable`."""
        bounded = (
            not isinstance(self.request, messages.PlanRequest)
            or self.request.deadline_ms is not None
        )
        if bounded or seen != zmq.EVENT_HANDSHAKE_SUCCEEDED:
            return unreachable(endpoint, seen)
        # The server is connected: the plan is slow, and a retry would take as long again.
        rule = "be answered, or its stream go on, within plan_timeout_s"
        got = f"nothing for {self.options.plan_timeout_s:g} s"
        return PlanError("deadline", f"a plan without deadline_ms must {rule} (got {got})")

    def farewell(self, sent: Sent) -> bytes:
        """Encode the `cancel` of an attempt. It carries the request's own token."""
        cancel = messages.Cancel(target=sent.id, token=self.request.token)
        return fill(cancel, self.options).body

    def again(self, error: PlanError) -> float:
        """Return the seconds to wait before the next attempt.

        Raises:
            PlanError: `error`, if there is no next attempt.
        """
        wait = 1e-3 * (error.retry_after_ms or 100.0)
        late = time.monotonic() + wait >= self._due
        if not error.retryable or self.left <= 0 or late:
            raise error
        # Waiting for a server that warms up uses no retry, only the request's time.
        self.left -= error.code != "not_ready"
        return wait


def _text(id: object) -> str:
    return visible(cut(str(id)))


def _deadline_ms(request: messages.Request) -> int | None:
    return request.deadline_ms if isinstance(request, messages.PlanRequest) else None


def unreachable(endpoint: str, seen: int) -> PlanError:
    """Return the error for a server that does not answer. `seen` is the last event of the
    connection, 0 for none.
    """
    if seen & FAILED_HANDSHAKE:
        why = "it refused the connection: does it want CURVE keys, or other ones?"
    elif seen == zmq.EVENT_HANDSHAKE_SUCCEEDED:
        why = "it is connected, and silent"
    elif seen == zmq.EVENT_DISCONNECTED:
        why = "the connection was lost"
    else:
        why = "no connection could be made"
    # A refused client stays refused until the keys change: do not retry; a later request may work.
    retryable = not seen & FAILED_HANDSHAKE
    text = f"{endpoint} must answer (got none: {why})"
    return PlanError("unreachable", text, retryable=retryable)


def after(seen: int, event: int) -> int:
    """Return the known state of a connection after an event; `seen` is the state before it.

    A disconnection that follows a failed handshake is ignored: it says less, and nothing was sent
    that could have been lost.
    """
    never = event == zmq.EVENT_DISCONNECTED and seen != zmq.EVENT_HANDSHAKE_SUCCEEDED
    return seen if never else event


def closed(endpoint: str) -> PlanError:
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
    malformed = ConfigError(f"{what} must be tcp://host:port or ipc://path (got {endpoint})")
    if not (
        endpoint.startswith("ipc://") or (endpoint.startswith("tcp://") and has_port(endpoint))
    ):
        raise malformed
    socket.setsockopt(zmq.IPV6, int("[" in endpoint))
    try:
        socket.connect(endpoint)
    except (zmq.ZMQError, UnicodeError) as e:
        if isinstance(e, zmq.ZMQError) and e.errno == errno.ENAMETOOLONG:
            raise ConfigError(
                f"{what} must have a path of at most {PATH_BYTES} bytes (got {endpoint})"
            ) from e
        raise malformed from e


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
