"""Reads the request in a body: encoding, dialect, head, secret, and then the fields. The time this
takes is bounded by the length of the body, whatever it holds.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable
from dataclasses import dataclass

from thor_dflash.core.errors import PlanError
from thor_dflash.serving.protocol import codec, groot, messages
from thor_dflash.serving.protocol.codec import HEAD_BYTES, JSON, Codec, Head
from thor_dflash.serving.transport import access

_JSON_ID = re.compile(
    rb'\{\s*(?:"\w+"\s*:\s*(?:"[^"\\]*"|[\w.+-]+)\s*,\s*)*?"id"\s*:\s*"([^"\\]{1,256})"'
)
_MSGPACK_ID = re.compile(
    rb"(?:[\x80-\x8f]|\xde..)(?:\xa1v\x01|\xa2op[\xa4-\xab][a-z.]+)*\xa2id(?:([\xa1-\xbf])|\xd9(.))",
    re.DOTALL,
)
UNEXPECTED = "the server met an unexpected fault; its log says more"


@dataclass(frozen=True, slots=True)
class DecodedRequest:
    """The request in a body, or why there is none, and how to answer it."""

    codec: Codec
    groot: bool
    id: str | None
    """None if it has none that is valid."""
    outcome: messages.Request | PlanError


def read_request(
    body: bytes, token: str | None, most: int, log: Callable[[str], None]
) -> DecodedRequest:
    """Read a request, which must carry the secret `token` if that is not None. It may have `most`
    bytes beside its images. May be called from any thread.
    """
    found, head, dialect = JSON, Head(id=None), False
    outcome: messages.Request | PlanError
    try:
        found = codec.codec_of(body)
        head = codec.head_of(found, body)
        dialect = groot.is_groot(head)
        if not access.token_matches(token, head.api_token if dialect else head.token):
            text = "token must be the secret in the server's serve.token_file"
            raise PlanError("unauthorized", text, field="token")
        outcome = (groot.read if dialect else codec.read)(found, body, head, most)
    except PlanError as e:
        outcome = e
    except Exception:
        log(traceback.format_exc())
        outcome = PlanError("internal", UNEXPECTED)
    return DecodedRequest(found, dialect, codec.id_of(head), outcome)


def refuse_unread(body: bytes, error: PlanError) -> DecodedRequest:
    """Refuse a request without reading it: even to find its end takes milliseconds. Its id is known
    if it is among the first fields, of which each is a text, a number or a word.
    """
    begin = body[:HEAD_BYTES]
    try:
        found = codec.codec_of(begin)
    except PlanError as e:
        return DecodedRequest(JSON, False, None, e)
    return DecodedRequest(found, b"endpoint" in begin[:16], _first_id(found, begin), error)


def _first_id(found: Codec, begin: bytes) -> str | None:
    if found == JSON:
        match = _JSON_ID.match(begin)
        name = match[1] if match else b""
    else:
        match = _MSGPACK_ID.match(begin)
        size = 0 if match is None else match[2][0] if match[2] else match[1][0] & 0x1F
        name = begin[match.end() : match.end() + size] if match else b""
    try:
        return codec.id_of(Head(id=name.decode()))
    except UnicodeDecodeError:
        return None
