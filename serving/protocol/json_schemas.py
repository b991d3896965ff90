"""JSON Schema of every message of TDP/1, made from the types. The files are in `schemas/`, and
`python -m thor_dflash.serving.protocol.json_schemas` writes them anew.

They state types, ranges and names. Rules between fields, sizes in bytes and what a model cannot do
are in docs/reference/protocol.md only.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from thor_dflash.serving.protocol import codec, messages, replies

Schema = dict[str, Any]

DIRECTORY = Path(__file__).parent / "schemas"
REPLIES: dict[str, type[msgspec.Struct]] = {
    "chunk": messages.Chunk,
    "result": messages.Result,
    "error": messages.ErrorReply,
    "ack": replies.AckReply,
    "hello": replies.HelloReply,
    "ping": replies.PingReply,
    "health": replies.HealthReply,
    "stats": replies.StatsReply,
    "validate": replies.ValidateReply,
    "prefix.put": replies.PrefixPutReply,
    "prefix.list": replies.PrefixListReply,
    "prefix.drop": replies.PrefixDropReply,
    "session.drop": replies.SessionDropReply,
}
"""Reply -> its type. `chunk`, `result` and `error` answer a plan, `error` everything else, too."""


def render() -> dict[str, Schema]:
    """Return the schema of every message: name of its file without `.json` -> schema."""
    requests = {f"request.{op}": _request(op, kind) for op, kind in codec.OPERATIONS.items()}
    return requests | {f"reply.{name}": _reply(name, kind) for name, kind in REPLIES.items()}


def text(schema: Schema) -> str:
    """Return the text of a file."""
    return json.dumps(schema, indent=1) + "\n"


def _request(op: str, kind: type[msgspec.Struct]) -> Schema:
    root, shared = _components(kind)
    root["properties"]["op"] = {"const": op}
    root["properties"]["v"] = {"const": messages.VERSION}
    root["required"] = ["op", *(name for name in root["required"] if name != "op")]
    root["patternProperties"] = {"^x_": {}}
    if op in ("plan", "validate"):
        root["oneOf"] = _prompts() if op == "plan" else [*_prompts(), _no_prompt()]
    return _document(f"request.{op}", root, shared)


def _prompts() -> list[Schema]:
    """A prompt or messages, and not both; null is a field that was left out."""
    return [
        {"required": [name], "properties": {name: {"type": kind}, other: {"type": "null"}}}
        for name, kind, other in (
            ("prompt", "string", "messages"),
            ("messages", "array", "prompt"),
        )
    ]


def _no_prompt() -> Schema:
    return {"properties": {"prompt": {"type": "null"}, "messages": {"type": "null"}}}


def _reply(name: str, kind: type[msgspec.Struct]) -> Schema:
    root, shared = _components(kind)
    # The types of a plan's replies have defaults for their writer; the envelope is always sent.
    root["required"] = list(dict.fromkeys(["v", "id", "type", "seq", *root.get("required", [])]))
    return _document(f"reply.{name}", root, shared)


def _components(kind: type[msgspec.Struct]) -> tuple[Schema, Schema]:
    """The schema of a type, and those that it refers to."""
    whole = msgspec.json.schema(kind)
    shared: Schema = whole["$defs"]
    return shared.pop(kind.__name__), shared


def _document(name: str, root: Schema, shared: Schema) -> Schema:
    head: Schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"tdp1:{name}",
        **root,
        "title": f"TDP/1 {name}",
    }
    return head | ({"$defs": shared} if shared else {})


def main() -> None:
    """Write the files."""
    for name, schema in render().items():
        (DIRECTORY / f"{name}.json").write_text(text(schema), encoding="utf-8")


if __name__ == "__main__":
    main()
