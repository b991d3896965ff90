"""Requests in both encodings and in the GR00T dialect: how they are read, and how whatever is wrong
with one is refused by name.
"""

from __future__ import annotations

import json
import math
import time
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.flood_peers import BODIES

from thor_dflash.core.errors import PlanError
from thor_dflash.serving.protocol import codec, errors, messages, validation
from thor_dflash.serving.protocol.codec import JSON, MSGPACK, Codec

PLAN = {"v": 1, "op": "plan", "id": "a", "prompt": "Bring the cup."}


def read(body: bytes) -> messages.Request:
    found = codec.codec_of(body)
    return codec.read(found, body, codec.head_of(found, body))


def refused(body: bytes | dict[str, Any]) -> PlanError:
    with pytest.raises(PlanError) as caught:
        request = read(body if isinstance(body, bytes) else JSON.encode(body))
        assert isinstance(request, messages.PlanRequest)
        validation.check(request)
        validation.check_values(request)
    return caught.value


@pytest.mark.parametrize("encoding", [JSON, MSGPACK], ids=["json", "msgpack"])
def test_both_encodings_say_the_same(encoding: Codec) -> None:
    request = read(encoding.encode({**PLAN, "stream": "steps", "return": ["plan"]}))
    assert isinstance(request, messages.PlanRequest)
    assert (request.prompt, request.stream, request.parts) == (PLAN["prompt"], "steps", ("plan",))


BEGUN = b'{"op":"plan","id":"a","prompt":"x",'


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (BEGUN + b'"metadata":{"a":[1e999]}}', "metadata[...][0]"),
        (BEGUN + b'"seed":' + b"9" * 5000 + b"}", "seed"),
        (BEGUN + b'"prompt":' + b"[" * 500 + b"]" * 500 + b"}", "prompt"),
        (MSGPACK.encode({"op": "ping", 1: 2}), None),
        (b"[1]", None),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_what_no_reply_could_repeat_is_refused_by_name(body: bytes, field: str | None) -> None:
    error = refused(body)
    assert (error.code, error.field) == ("bad_request", field)
    assert " must be " in error.message
    assert JSON.encode(errors.error_reply(error, "a"))


def test_fields_of_ones_own_are_ignored_and_others_are_not() -> None:
    assert read(JSON.encode({**PLAN, "x_trace": [{"deep": 1}]})) == read(JSON.encode(PLAN))
    assert refused({**PLAN, "x_trace": 1, "y_trace": 1}).field == "y_trace"


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"null", b"\xff", b'{"op":"plan"',
        b'{"op":' + b"[" * 100_000, b"\x81\xa2op" + b"\x91" * 100_000,
        b'{"op":"plan","id":"a","prompt":"\\ud800"}', b"\x82\xa2op\xa4plan\xa2id\xa1\xff",
        b'{"op":"plan","id":"a","prompt":NaN}', b"\xdf\xff\xff\xff\xff", b'{"id":"a"}',
        MSGPACK.encode({**PLAN, "metadata": {"a": msgspec.msgpack.Ext(5, b"x")}}),
        MSGPACK.encode({**PLAN, "metadata": {"a": b"bytes"}}),
        MSGPACK.encode({**PLAN, "metadata": {"a": float("nan")}}),
    ],
    ids=lambda body: repr(body)[:30],
)  # fmt: skip
def test_broken_bodies_are_refused(body: bytes) -> None:
    assert refused(body).code == "bad_request"


def outcome(body: bytes) -> str:
    try:
        read(body)
    except PlanError as e:
        return e.code
    return "read"


@given(st.binary(max_size=200), st.integers(0, 2))
def test_any_bytes_are_read_or_refused(tail: bytes, start: int) -> None:
    body = (b"", b'{"', b"\x83")[start] + tail
    assert outcome(body) in ("read", "bad_request", "unsupported_version")


@given(st.data())
def test_any_mutation_is_read_or_refused(data: st.DataObject) -> None:
    encoding = data.draw(st.sampled_from([JSON, MSGPACK]))
    whole = encoding.encode({**PLAN, "messages": None, "metadata": {"a": [1, {"b": "c"}]}})
    at = data.draw(st.integers(0, len(whole) - 1))
    body = whole[:at] + data.draw(st.binary(max_size=3)) + whole[at + 1 :]
    assert outcome(body) in ("read", "bad_request", "unsupported_version")


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"promt": "x"}, "promt"),
        ({"max_tokens": "4"}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"id": "x" * 65}, "id"),
        ({"stream": "all the way"}, "stream"),
        ({"messages": [{"role": "user", "content": "x"}]}, "prompt"),
        ({"prompt": None, "messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"prompt": None, "messages": [{"role": "user", "text": "x"}]}, "messages[0].text"),
        ({"temperature": 0.001}, "temperature"),
        ({"temperature": 101}, "temperature"),
        ({"top_p": 0.9}, "top_p"),
        ({"temperature": 1, "top_k": -1}, "top_k"),
        ({"temperature": 1, "top_k": 2**31}, "top_k"),
        ({"max_tokens": 2**31}, "max_tokens"),
        ({"temperature": 1, "seed": 2**63}, "seed"),
        ({"acceptance": "rejection"}, "acceptance"),
        (
            {"temperature": 1, "acceptance": "rejection", "accept_mode": "relaxed_thinking"},
            "acceptance",
        ),
        ({"temperature": 1, "repetition_penalty": 1.1}, "repetition_penalty"),
        ({"stop": ["."]}, "stop"),
        ({"thinking_budget": 3, "thinking_token_budget": 4}, "thinking_token_budget"),
        ({"metadata": {"a": "x" * 2000}}, "metadata"),
        ({"metadata": {"a": json.loads("[" * 70 + "]" * 70)}}, "metadata"),
        ({"response_format": {"type": "json_object"}}, "response_format.type"),
        ({"op": "pland"}, "op"),
        ({"v": 2}, "v"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_is_not_understood_is_refused_by_name(change: dict[str, Any], field: str) -> None:
    error = refused({**PLAN, **change})
    assert error.field == field
    assert error.code in ("bad_request", "too_large", "unsupported_version")
    assert field.split("[")[0].split(".")[0] in error.message


@pytest.mark.parametrize("kind", BODIES)
def test_the_time_to_read_a_body_is_bounded_by_its_length(kind: str) -> None:
    """What 1 MB may cost in CPU time: 1e308 alone took 1.3 s. A fifth of it is read."""
    body = BODIES[kind](200_000)
    best = math.inf
    for _ in range(3):
        begun = time.thread_time()
        outcome(body)
        best = min(best, time.thread_time() - begun)
    assert best < 0.05


@pytest.mark.parametrize(
    "field", ["metadata", "json_schema", "tool_choice", "chat_template_kwargs", "x_own"]
)
@pytest.mark.parametrize("encoding", [JSON, MSGPACK], ids=["json", "msgpack"])
def test_free_form_values_have_a_largest_size(encoding: Codec, field: str) -> None:
    fits = {"a": [1] * (codec.FREE_FORM_BYTES // 4)}
    long = "y" * codec.FREE_FORM_BYTES
    body = encoding.encode({**PLAN, "prompt": long, field: fits})
    assert outcome(body) == "read"
    error = refused(encoding.encode({**PLAN, field: {"a": long}}))
    assert (error.code, error.field) == ("too_large", None if field == "x_own" else field)


@pytest.mark.parametrize("encoding", [JSON, MSGPACK], ids=["json", "msgpack"])
def test_tools_and_calls_of_messages_have_a_largest_size(encoding: Codec) -> None:
    long = "y" * (codec.FREE_FORM_BYTES // 2)
    turn = {"role": "assistant", "content": long, "tool_calls": [{"a": long}]}
    asked = {"op": "plan", "id": "i", "tools": [{"a": long}]}
    assert outcome(encoding.encode({**asked, "messages": [turn]})) == "read"
    calls = refused(encoding.encode({**asked, "messages": [turn, turn]}))
    assert (calls.code, "tool_calls" in calls.message) == ("too_large", True)
    tools = refused(encoding.encode({**asked, "tools": 2 * [{"a": long}]}))
    assert (tools.code, tools.field) == ("too_large", "tools")
    if encoding is JSON:
        body = encoding.encode({**asked, "messages": [turn, turn]})
        assert refused(body.replace(b"tool_c", b"tool\\u005fc")).code == "too_large"
    turns = refused(encoding.encode({**asked, "messages": [turn, long, long]}))
    assert (turns.code, turns.field) == ("bad_request", "messages")


@pytest.mark.parametrize("encoding", [JSON, MSGPACK], ids=["json", "msgpack"])
def test_images_are_beside_the_largest_request(encoding: Codec) -> None:
    most = codec.FREE_FORM_BYTES
    data: Any = bytes(3 * most) if encoding is MSGPACK else "AAAA" * most
    image = {"id": "a", "format": "png", "data": data}
    head = codec.Head(op="plan", id="i")

    def refusal(**fields: Any) -> tuple[str, str | None]:
        with pytest.raises(PlanError) as caught:
            codec.read(encoding, encoding.encode({**PLAN, **fields}), head, most)
        return caught.value.code, caught.value.field

    codec.read(encoding, encoding.encode({**PLAN, "images": [image]}), head, most)
    assert refusal(images=[image], prompt="y" * most) == ("too_large", None)
    few = {**image, "data": data[:4]}
    assert refusal(images=[image, *[few] * codec.MOST_IMAGES]) == ("too_large", "images")
    assert refusal(images=[data]) == ("bad_request", "images")


def test_a_long_field_of_the_head_is_none() -> None:
    long = "x" * codec.HEAD_BYTES
    assert refused({**PLAN, "op": long}).field == "op"
    head = codec.head_of(JSON, JSON.encode({**PLAN, "id": long, "token": [long]}))
    assert codec.id_of(head) is None
    assert head.token != [long]
