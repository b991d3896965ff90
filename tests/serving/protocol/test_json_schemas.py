"""The JSON Schema files of TDP/1 against the codec and a server: what they accept is what the codec
accepts, and what a server sends. Checked by jsonschema_rs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema_rs
import msgspec
import pytest
from support.serving_fixtures import House, Peer

from thor_dflash.core.errors import PlanError
from thor_dflash.serving.protocol import codec
from thor_dflash.serving.protocol import json_schemas as schemas

SCHEMAS = schemas.render()
LEAST: dict[str, dict[str, Any]] = {
    "plan": {"prompt": "x"},
    "cancel": {"target": "x"},
    "prefix.put": {"prefix_id": "p", "system": "s"},
    "prefix.drop": {"prefix_id": "p"},
    "session.drop": {"session": "s"},
}
"""Operation -> its fields without a default."""
VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, 9, 10, -1, 1 << 31, (1 << 31) + 1, 86_400_001, 0.5, "", "x", "on",
    "auto", "off", "plan", "steps", "tools", "y" * 64, "y" * 65, [], ["x"], ["plan"], [1], {},
    {"a": 1}, [{}], [{"role": "user", "content": "x"}], [{"role": "king", "content": "x"}],
    [{"role": "user", "content": "x", "more": 1}],
    {"type": "json_schema", "json_schema": {"schema": {}}}, {"type": "text"},
)  # fmt: skip


def test_the_files_are_those_of_the_types() -> None:
    """If this fails: python -m thor_dflash.serving.protocol.json_schemas."""
    files = {path.stem: path.read_text() for path in schemas.DIRECTORY.glob("*.json")}
    assert files == {name: schemas.text(schema) for name, schema in SCHEMAS.items()}


def accepted(op: str, body: dict[str, Any]) -> bool:
    data, kind = json.dumps(body).encode(), codec.OPERATIONS[op]
    try:
        if any(name.startswith("x_") for name in body):
            codec.typed(codec.JSON, data, kind)
        else:  # the same decision, without its message, which takes 4 ms
            msgspec.json.decode(data, type=kind)
    except (PlanError, msgspec.ValidationError):
        return False
    return True


@pytest.mark.parametrize("op", codec.OPERATIONS)
def test_a_schema_accepts_the_fields_and_values_that_the_codec_accepts(op: str) -> None:
    checker = jsonschema_rs.validator_for(SCHEMAS[f"request.{op}"])
    least = {"op": op, **LEAST.get(op, {})}
    fields = set(SCHEMAS[f"request.{op}"]["properties"]) | {"x_mine", "colour"}
    verdicts = set()
    for field in fields - {"op", "v"}:
        for value in VALUES:
            body = {**least, field: value}
            if field == "messages":
                body.pop("prompt", None)
            if op == "plan" and value is None and field in ("prompt", "messages"):
                continue  # then there is neither: a rule of validation.py
            verdict = checker.is_valid(body)
            assert verdict == accepted(op, body), (field, value)
            verdicts.add(verdict)
    assert verdicts == {True, False}
    for required in LEAST.get(op, {}):
        assert not checker.is_valid({k: v for k, v in least.items() if k != required})


@pytest.mark.parametrize("op", ["plan", "validate"])
def test_a_schema_wants_a_prompt_or_messages(op: str) -> None:
    checker = jsonschema_rs.validator_for(SCHEMAS[f"request.{op}"])
    chat = [{"role": "user", "content": "x"}]
    assert checker.is_valid({"op": op, "prompt": None, "messages": chat})
    assert not checker.is_valid({"op": op, "prompt": "x", "messages": chat})
    assert checker.is_valid({"op": op}) == (op == "validate")


def closed(schema: Any) -> Any:
    """A schema that refuses what it does not name."""
    if isinstance(schema, list):
        return [closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    copy = {key: closed(value) for key, value in schema.items()}
    return {"additionalProperties": False, **copy} if "properties" in schema else copy


ASKED: dict[str, list[dict[str, Any]]] = {
    "hello": [{"op": "hello"}],
    "ping": [{"op": "ping"}],
    "health": [{"op": "health"}],
    "validate": [{"op": "validate"}, {"op": "validate", "prompt": "x", "json_schema": {}}],
    "prefix.put": [{"op": "prefix.put", "prefix_id": "p", "system": "s"}],
    "prefix.list": [{"op": "prefix.list"}],
    "prefix.drop": [{"op": "prefix.drop", "prefix_id": "p"}],
    "session.drop": [{"op": "session.drop", "session": "s"}],
    "result": [
        {"op": "plan", "prompt": "x", "stream": "all",
         "return": ["plan", "text", "thinking", "tokens", "timings"]},
    ],
    "stats": [{"op": "stats"}],
    "error": [{"op": "plan", "prompt": ""}, {"op": "shutdown"}],
    "ack": [{"op": "cancel", "target": "x"}],
}  # fmt: skip
"""Reply -> requests that get it, in the order in which they are sent."""


def test_a_server_sends_what_the_schemas_say_and_nothing_else(house: House) -> None:
    seen = set()
    peer = house.peer(house.mock())
    for name, bodies in ASKED.items():
        for body in bodies:
            for reply in replies(peer, body):
                kind = "chunk" if reply["type"] == "chunk" else name
                schema = closed(SCHEMAS[f"reply.{kind}"])
                jsonschema_rs.validator_for(schema).validate(reply)
                seen.add(kind)
    assert seen == schemas.REPLIES.keys()


def replies(peer: Peer, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    peer.send(**body)
    while True:
        yield (reply := peer.receive())
        if reply["type"] != "chunk":
            return
