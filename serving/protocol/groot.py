"""The dialect of NVIDIA Isaac-GR00T's client: {"endpoint", "data", "api_token"}, plain answers.

Its `PolicyClient` can thus call `ping` and `plan` here unchanged. It treats any answer with a field
`error` as a failure, and the first message as the answer. Source: NVIDIA/Isaac-GR00T,
gr00t/policy/server_client.py.
"""

from __future__ import annotations

from typing import Any
from uuid import uuid4

import msgspec

from thor_dflash.core.message_text import visible
from thor_dflash.serving.protocol import codec, messages
from thor_dflash.serving.protocol.codec import Codec, Head
from thor_dflash.serving.protocol.errors import bad_request

RUNNING = {"status": "ok", "message": "Server is running"}
"""The answer that its `ping` expects."""


def is_groot(head: Head) -> bool:
    """Whether a body is in this dialect."""
    return head.op is None and head.endpoint is not None


def read(body_codec: Codec, body: bytes, head: Head) -> messages.Request:
    """Decode the request in a body.

    Raises:
        PlanError: bad_request or unsupported_version.
    """
    endpoint = head.endpoint
    kind = codec.OPERATIONS.get(endpoint) if isinstance(endpoint, str) else None
    if kind is None:
        got = visible(endpoint[:40]) if isinstance(endpoint, str) else codec.shown(endpoint)
        raise bad_request(f"endpoint must be an operation (got {got})")
    table = body_codec.decode(body, dict[str, Any])
    if unknown := table.keys() - {"endpoint", "data", "api_token", "requires_input"}:
        name = min(unknown)[: codec.NAME]
        raise bad_request(
            f"{name} must be left out: a request has endpoint, data and api_token", name
        )
    data: Any = {} if table.get("data") is None else table["data"]
    if not isinstance(data, dict):
        raise bad_request(f"data must be an object (got {codec.shown(data)})", "data")
    fields = codec.ours(data)  # pyright: ignore[reportUnknownArgumentType]
    codec.check_version(fields.get("v", messages.VERSION))
    if "op" in fields:
        raise bad_request("op must be left out: endpoint names the operation", "op")
    if fields.get("stream"):
        text = "stream must be false: this dialect has one reply for each request"
        raise bad_request(text, "stream")
    fields = {"id": uuid4().hex, **fields, "op": head.endpoint}
    if head.api_token is not None:
        fields["token"] = head.api_token
    return codec.convert(fields, kind)


def answer(message: object) -> dict[str, Any]:
    """Convert a reply to this dialect: the fields alone, or one error string."""
    table: dict[str, Any] = msgspec.to_builtins(message)
    if table.get("type") == "error":
        return {"error": f"{table['code']}: {table['message']}"}
    if "error" in table:  # a field of `health`, which the client would take for a failure
        table["last_error"] = table.pop("error")
    return table
