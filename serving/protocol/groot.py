"""The dialect of NVIDIA Isaac-GR00T's client: {"endpoint", "data", "api_token"}, plain answers.

Its `PolicyClient` can thus call `ping` and `plan` here unchanged. It treats any answer with a field
`error` as a failure, and the first message as the answer. Source: NVIDIA/Isaac-GR00T,
gr00t/policy/server_client.py.
"""

from __future__ import annotations

from typing import Any
from uuid import uuid4

import msgspec
from msgspec import Raw

from thor_dflash.core.bounds import LARGEST
from thor_dflash.core.message_text import visible
from thor_dflash.serving.protocol import codec, messages
from thor_dflash.serving.protocol.codec import Codec, Head
from thor_dflash.serving.protocol.errors import bad_request

RUNNING = {"status": "ok", "message": "Server is running"}
"""The answer that its `ping` expects."""


def is_groot(head: Head) -> bool:
    """Whether a body is in this dialect."""
    return head.op is None and head.endpoint is not None


def read(body_codec: Codec, body: bytes, head: Head, most: int = LARGEST) -> messages.Request:
    """Decode the request in a body.

    Raises:
        PlanError: as `codec.read`.
    """
    endpoint = head.endpoint
    kind = codec.OPERATIONS.get(endpoint) if isinstance(endpoint, str) else None
    if kind is None:
        got = visible(endpoint[:40]) if isinstance(endpoint, str) else codec.shown(endpoint)
        raise bad_request(f"endpoint must be an operation (got {got})")
    table = body_codec.split(body)
    if unknown := table.keys() - {"endpoint", "data", "api_token", "requires_input"}:
        name = min(unknown)[: codec.NAME]
        raise bad_request(
            f"{name} must be left out: a request has endpoint, data and api_token", name
        )
    fields = codec.ours(_data(body_codec, bytes(table.get("data", Raw()))))
    codec.check_version(codec.head_of(body_codec, body_codec.encode(fields)).v)
    if "op" in fields:
        raise bad_request("op must be left out: endpoint names the operation", "op")
    if "stream" in fields and codec.short(body_codec, fields["stream"]):
        text = "stream must be false: this dialect has one reply for each request"
        raise bad_request(text, "stream")
    given: dict[str, object] = {"id": uuid4().hex, **fields, "op": head.endpoint}
    if head.api_token is not None:
        given["token"] = head.api_token
    return codec.typed(body_codec, body_codec.encode(given), kind, most)


def _data(body_codec: Codec, data: bytes) -> dict[str, Raw]:
    if data in (b"", b"null", b"\xc0"):
        return {}
    if not codec.is_object(body_codec, data):
        got = codec.shown(codec.short(body_codec, Raw(data)))
        raise bad_request(f"data must be an object (got {got})", "data")
    return body_codec.split(data)


def answer(message: object) -> dict[str, Any]:
    """Convert a reply to this dialect: the fields alone, or one error string."""
    table: dict[str, Any] = msgspec.to_builtins(message)
    if table.get("type") == "error":
        return {"error": f"{table['code']}: {table['message']}"}
    if "error" in table:  # a field of `health`, which the client would take for a failure
        table["last_error"] = table.pop("error")
    return table
