"""One request of a client: its encoding, its replies, its time limits and retries."""

from __future__ import annotations

import time
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

import msgspec
import zmq
from msgspec import Struct, structs

from thor_dflash.core.bounds import IMAGES_BYTES
from thor_dflash.core.errors import Code, PlanError
from thor_dflash.core.message_text import cut, show
from thor_dflash.serving.client.connection import unreachable
from thor_dflash.serving.client.options import Options
from thor_dflash.serving.protocol import messages
from thor_dflash.serving.protocol.codec import MSGPACK, Codec, check_fields
from thor_dflash.serving.protocol.errors import bad_request

ONCE = ("drain", "shutdown")
"""Operations that are not sent again after a lost connection: the server that answers next may be
another one, started meanwhile."""
CODES = frozenset(typing.get_args(Code))
GRACE_S = 2.0
"""Wait beyond a plan's deadline before giving up, s: the answer may be in transit."""
CANCEL_MS = 200
"""How long closing a stream waits for its `cancel` to be sent."""


class _Head(Struct, frozen=True):
    """The fields of every reply that are read first."""

    type: str = ""
    id: str | None = None


@dataclass(frozen=True, slots=True)
class Reply:
    """A reply, of which only the head is decoded yet."""

    type: str
    id: str | None
    body: bytes
    codec: Codec

    @classmethod
    def read(cls, codec: Codec, body: bytes) -> Reply:
        """Read the head.

        Raises:
            PlanError: it is no message of TDP/1.
        """
        head = codec.decode(body, _Head)
        return cls(head.type, head.id, body, codec)

    def event(self) -> messages.Event:
        """Decode a chunk or a result.

        Raises:
            PlanError: the reply is an error.
        """
        if self.type == "chunk":
            return self.codec.decode(self.body, messages.Chunk)
        if self.type == "result":
            return self.codec.decode(self.body, messages.Result)
        raise self.error()

    def table(self) -> dict[str, Any]:
        """Decode the answer to a control operation.

        Raises:
            PlanError: the reply is an error.
        """
        if self.type == "error":
            raise self.error()
        return self.codec.decode(self.body, dict[str, Any])

    def error(self) -> PlanError:
        """Decode an error; a code unknown to this client becomes `internal`."""
        table = self.codec.decode(self.body, dict[str, Any])
        code: Any = table.get("code")
        return PlanError(
            code if code in CODES else "internal",
            str(table.get("message", "")),
            **{name: table.get(name) for name in ("field", "retry_after_ms", "min_ms")},
        )


@dataclass(frozen=True, slots=True)
class EncodedRequest:
    """An encoded request and its id."""

    id: str
    body: bytes


def encode(request: messages.Request, options: Options) -> EncodedRequest:
    """Encode a request under a new unique id, so that no late reply can be taken for its answer.

    Raises:
        PlanError: bad_request, something in it cannot be sent: a text that is not UTF-8, a number
            of more than 64 bits, an object that is no value of JSON; too_large.
    """
    id = uuid4().hex
    given: dict[str, Any] = {"id": id}
    if request.token is None:
        given["token"] = options.token
    filled = structs.replace(request, **given)
    try:
        # Fields with default values are left out, but these three are required. They are first: a
        # busy server reads no more of a long request.
        head = {"v": messages.VERSION, "op": request.op, "id": id}
        table = head | msgspec.to_builtins(filled, builtin_types=(bytes,))
        body = options.codec.encode(table)
    except (UnicodeEncodeError, OverflowError, TypeError):
        for known in structs.fields(filled):
            _check_value(known.encode_name, getattr(filled, known.name))
        raise
    _check_size(len(body), table.get("images", ()), options)
    return EncodedRequest(id, body)


def _check_size(body: int, images: Sequence[Mapping[str, Any]], options: Options) -> None:
    """Refuse a body that would close the connection."""
    sizes = [len(image["data"]) for image in images if "data" in image]
    sent = sum(sizes if options.codec == MSGPACK else (-(-size // 3) * 4 for size in sizes))
    for size, most, what in (
        (body - sent, options.max_message, "a request without its images, Options.max_message,"),
        (sent, IMAGES_BYTES, "the images of a request"),
    ):
        if size > most:
            raise PlanError("too_large", f"{what} must be <= {most} bytes as sent (got {size})")


def _check_value(name: str, value: object) -> None:
    try:
        MSGPACK.encode(value)
    except UnicodeEncodeError as e:
        text = f"{name} must be UTF-8 (got: {e.reason} at {e.start})"
        raise bad_request(text, name) from e
    except (OverflowError, TypeError) as e:
        text = f"{name} must be plain JSON values (got: {cut(str(e))})"
        raise bad_request(text, name) from e


def with_time_left(ask: messages.PlanRequest, began: float) -> messages.PlanRequest:
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


@dataclass(slots=True, eq=False)
class Attempts:
    """The attempts of one request and their time limits.

    Raises:
        PlanError: bad_request, it has an id, or a wrong deadline or session.
    """

    options: Options
    request: messages.Request
    displaced: bool = False
    """Whether a later plan of its session was taken by a server."""
    session: str | None = field(init=False)
    """The session of a plan. All attempts have it, so that each replaces the one before."""
    left: int = field(init=False)
    began: float = field(default_factory=time.monotonic)
    since: float = field(init=False)
    """Start of the wait for the next message, monotonic, s. A stream sets it after each message."""

    def __post_init__(self) -> None:
        self.left = self.options.retries
        self.since = self.began
        if (id := self.request.id) != messages.NO_ID:
            text = f"id must be left out: the client gives each try its own (got {show(id)})"
            raise bad_request(text, "id")
        self.session = None
        if isinstance(self.request, messages.PlanRequest):
            check_fields(self.request, "deadline_ms", "session")
            named = self.options.session if self.request.session is None else self.request.session
            self.session = uuid4().hex if named is None else named

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

    def send(self) -> EncodedRequest:
        """Encode the next attempt, with its deadline reduced to the time left.

        Raises:
            PlanError: the deadline passed while trying.
        """
        request = self.request
        if isinstance(request, messages.PlanRequest):
            request = with_time_left(structs.replace(request, session=self.session), self.began)
        return encode(request, self.options)

    def connect_error(self, endpoint: str, seen: int) -> PlanError:
        """Return the error for a connection that did not come about by `connect_by`; `seen` as for
        `unreachable`. A deadline may be too short to find out whether a server is there.
        """
        if seen or _deadline_ms(self.request) is None or time.monotonic() < self._due:
            return unreachable(endpoint, seen)
        text = f"the deadline passed before there was a connection to {endpoint}"
        return PlanError("deadline", text)

    def timeout_error(self, endpoint: str, seen: int) -> PlanError:
        """Return the error for a reply that did not come in time; `seen` as for `unreachable`."""
        planned = isinstance(self.request, messages.PlanRequest)
        bounded = not planned or _deadline_ms(self.request) is not None
        if bounded or seen != zmq.EVENT_HANDSHAKE_SUCCEEDED:
            return unreachable(endpoint, seen, sent=True)
        # The server is connected: the plan is slow, and a retry would take as long again.
        rule = "be answered, or its stream go on, within plan_timeout_s"
        got = f"nothing for {self.options.plan_timeout_s:g} s"
        return PlanError("deadline", f"a plan without deadline_ms must {rule} (got {got})")

    def cancel_of(self, sent: EncodedRequest) -> bytes:
        """Encode the `cancel` of an attempt. It carries the request's own token."""
        cancel = messages.Cancel(target=sent.id, token=self.request.token)
        return encode(cancel, self.options).body

    def retry_delay(self, error: PlanError) -> float:
        """Return the seconds to wait before the next attempt.

        Raises:
            PlanError: `error`, if there is no next attempt.
        """
        wait = 1e-3 * (error.retry_after_ms or 100.0)
        late = time.monotonic() + wait >= self._due
        once = error.code == "unreachable" and self.request.op in ONCE
        if not error.retryable or self.left <= 0 or late or once:
            raise error
        # Waiting for a server that warms up uses no retry, only the request's time.
        self.left -= error.code != "not_ready"
        return wait


def _deadline_ms(request: messages.Request) -> int | None:
    return request.deadline_ms if isinstance(request, messages.PlanRequest) else None
