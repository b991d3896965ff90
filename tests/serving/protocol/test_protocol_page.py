"""docs/reference/protocol.md against the code, field by field: the contract states all that the
code does, and nothing else.
"""

from __future__ import annotations

import dataclasses
import json
import re
import typing
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import structs

from thor_dflash.core.results import Speculation, Timings, Usage
from thor_dflash.serving.client.retry import CODES
from thor_dflash.serving.protocol import codec, messages

TEXT = (Path(__file__).parents[3] / "docs/reference/protocol.md").read_text()
ENVELOPE = {"v", "op", "id", "token"}


def part(title: str) -> str:
    """A section of the contract, by the beginning of its heading."""
    (found,) = re.findall(rf"^##+ {re.escape(title)}.*?\n(.*?)(?=^##|\Z)", TEXT, re.M | re.S)
    return str(found)


def rows(title: str) -> list[list[str]]:
    """The cells of a section's table, without its head."""
    lines = [line for line in part(title).splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def words(text: str) -> list[str]:
    """The words between backticks."""
    return re.findall(r"`([^`]+)`", text)


def outside(text: str) -> set[str]:
    """The words between backticks that are not inside parentheses."""
    return set(words(re.sub(r"\([^()]*\)", "", text)))


def terms(what: str, after: str = "") -> set[str]:
    """The `outside` words of the paragraph or bullet that begins with `what` and `after`."""
    (found,) = re.findall(
        rf"^(?:\* )?`{what}`{re.escape(after)}(.*?)(?=\n\n|^\* )", TEXT, re.M | re.S
    )
    return outside(str(found))


def names(struct: Any) -> set[str]:
    if dataclasses.is_dataclass(struct):
        return {field.name for field in dataclasses.fields(struct)}
    return {field.encode_name for field in structs.fields(struct)}


def choices(hint: Any) -> set[str]:
    return set(typing.get_args(hint))


OPERATIONS = {words(row[0])[0]: row for row in rows("4. Operations")}


def test_every_operation_and_each_of_its_fields() -> None:
    assert OPERATIONS.keys() == codec.OPERATIONS.keys()
    for op, row in OPERATIONS.items():
        if op != "plan":
            fields = names(codec.OPERATIONS[op]) - ENVELOPE
            assert outside(row[1]) == fields, op


def test_every_field_of_a_plan_and_its_default() -> None:
    fields = {field.encode_name: field for field in structs.fields(messages.PlanRequest)}
    documented: set[str] = set()
    for first, default, text in rows("5. `plan`"):
        documented |= set(words(first))
        if set(words(first)) == {"json_schema"}:
            documented |= {"response_format"} & set(re.findall(r"response_format", text))
        if "Also `" in text:
            documented |= {words(text[text.index("Also `") :])[0]}
        if default.startswith("`"):
            value = fields[words(first)[0]].default
            literal = words(default)[0]
            plain = json.loads(literal) if literal[0] in "[f" else literal
            assert value == (tuple(plain) if isinstance(plain, list) else plain), first
        elif default.isdecimal():
            assert fields[words(first)[0]].default == int(default)
    assert documented == fields.keys() - ENVELOPE


@pytest.mark.parametrize(
    ("field", "hint"),
    [
        (name, messages.PlanRequest)
        for name in ("thinking", "preempt", "accept_mode", "acceptance", "on_deadline")
    ],
)
def test_every_choice_of_a_plan_is_named(field: str, hint: type[msgspec.Struct]) -> None:
    hints = typing.get_type_hints(hint)
    literals = re.findall(r"Literal\[([^\]]*)\]", str(hints[field]))
    want = set(re.findall(r"'(\w+)'", literals[0]))
    (row,) = (row for row in rows("5. `plan`") if words(row[0])[0] == field)
    assert {word for word in want if word in row[1] + row[2]} == want


def test_every_role_and_field_of_a_turn_is_named() -> None:
    (row,) = (row for row in rows("5. `plan`") if "messages" in words(row[0]))
    documented = set(re.sub(r"\W", " ", " ".join(words(row[2]))).split())
    assert documented == choices(messages.Role) | names(messages.Message)


def test_the_example_has_every_field_of_a_result() -> None:
    (block,) = re.findall(r"```json\n(.*?)```", part("6."), re.S)
    example = json.loads(block)
    assert example.keys() == names(messages.Result)
    assert example["usage"].keys() == names(Usage)
    assert example["timings"].keys() == names(Timings)
    assert example["spec"].keys() == names(Speculation)


def test_every_word_a_result_may_hold() -> None:
    hints = typing.get_type_hints(messages.Result)
    assert terms("finish_reason", ":") - {"max_tokens"} == choices(messages.Finish) - {
        "cancelled", "preempted",
    }  # fmt: skip
    assert terms("status", ":") == choices(messages.Status)
    assert terms("thinking_closed", ":") == choices(hints["thinking_closed"]) - {""}


def test_every_chunk() -> None:
    text = part("Chunks")
    named = set(words(text[text.index("with `kind`") :]))
    assert named >= choices(messages.Kind)
    assert named >= choices(messages.Phase)
    every = named | set(re.findall(r'"(\w+)":', text))
    assert every >= names(messages.Chunk)


def test_every_error_and_its_fields() -> None:
    documented = {word for row in rows("7. Errors") for word in words(row[0])}
    assert documented == CODES - {"unreachable"}
    assert set(re.findall(r'"(\w+)":', part("7. Errors").splitlines()[0])) >= names(
        messages.ErrorReply
    ) - {"v", "id", "seq"}


def test_every_state() -> None:
    assert terms("state", ":") == choices(messages.State)


def test_what_is_answered_is_what_the_contract_says(house: Any, tmp_path: Path) -> None:
    bind = f"ipc://{tmp_path}/plan"
    server = house.mock(bind=(bind,), allow_admin=True, prefix_dir=str(tmp_path / "kept"))
    peer = house.peer(server)
    asked: dict[str, dict[str, Any]] = {
        "validate": {"prompt": "x", "json_schema": {"type": "object"}},
        "cancel": {"target": "x"},
        "prefix.put": {"prefix_id": "p", "system": "You plan.", "persist": True},
        "prefix.drop": {"prefix_id": "p"},
        "session.drop": {"session": "s"},
    }
    documented: dict[str, dict[str, Any]] = {}
    for op in (*(OPERATIONS.keys() - {"plan", "drain", "shutdown"}), "drain", "shutdown"):
        documented[op] = peer.ask(op=op, id=op, **asked.get(op, {}))
        fields = documented[op].keys() - {"v", "id", "type", "seq"}
        text = OPERATIONS[op][2]
        allowed = outside(text) - {"ack", "prefix.put", "finish_reason"}
        assert fields <= allowed, op
        assert fields == allowed, op
    hello, stats = documented["hello"], documented["stats"]
    for name, table in (("server", hello), ("defaults", hello), ("device", hello),
                        ("device", stats)):  # fmt: skip
        op = "hello" if table is hello else "stats"
        (inside,) = re.findall(rf"`{name}` \(([^()]*)\)", OPERATIONS[op][2])
        assert set(words(inside)) == table[name].keys(), (op, name)
    assert terms("limits", ":") - {"serve.cancel_ms"} >= hello["limits"].keys()
    (model,) = re.findall(r"^`model`, null before `ready`:(.*?)\n\n", TEXT, re.M | re.S)
    assert outside(model) == hello["model"].keys()
