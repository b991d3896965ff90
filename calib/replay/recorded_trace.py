"""Recorded conversations: the requests of their turns, and the answers that were recorded.

The file has one JSON object per message, as MLPerf Inference's Edge Agentic workload
(`agentic_coding_2.5h.jsonl`) has: `conversation_id`, `turn` and `role`, and

    user        content; at the beginning of a conversation also system and tools
    assistant   tool_calls, reasoning_content; content may be absent
    tool        tool_results: [{tool_call_id, content}]
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from thor_dflash.core.errors import RequestError
from thor_dflash.core.message_text import show
from thor_dflash.core.strict_records import as_list, as_table

LARGEST = 1 << 30
"""Most bytes of a trace."""
Message = dict[str, Any]
"""A message in OpenAI's form."""


@dataclass(frozen=True, slots=True)
class RecordedTurn:
    """A request of a conversation, and how it was answered."""

    messages: tuple[Message, ...]
    """All of the conversation up to the request, earlier answers as they were recorded."""
    answer: Message


@dataclass(frozen=True, slots=True)
class RecordedConversation:
    """A conversation."""

    name: str
    tools: tuple[Mapping[str, Any], ...]
    """OpenAI's form."""
    turns: tuple[RecordedTurn, ...]


@dataclass(frozen=True, slots=True)
class RecordedTrace:
    """The conversations of a file, in its order."""

    sha256: str
    """Of the file."""
    conversations: tuple[RecordedConversation, ...]

    def first(self, conversations: int | None, turns: int | None) -> RecordedTrace:
        """Only the first conversations, and of each the first turns; None: all."""
        kept = self.conversations[:conversations]
        cut = tuple(RecordedConversation(c.name, c.tools, c.turns[:turns]) for c in kept)
        return RecordedTrace(self.sha256, cut)

    @property
    def turns(self) -> int:
        """Turns of all conversations."""
        return sum(len(one.turns) for one in self.conversations)


@dataclass(slots=True)
class _Open:
    """A conversation while its rows are read."""

    tools: tuple[Mapping[str, Any], ...]
    messages: list[Message] = field(default_factory=list[Message])
    turns: list[RecordedTurn] = field(default_factory=list[RecordedTurn])


def read_trace(path: Path) -> RecordedTrace:
    """Read a trace.

    Raises:
        RequestError: it cannot be read, or is none; the message names the line.
    """
    try:
        with path.open("rb") as file:
            data = file.read(LARGEST + 1)
    except OSError as e:
        raise RequestError(f"{path} must be readable (got: {e.strerror})") from e
    if len(data) > LARGEST:
        raise RequestError(f"{path} must have at most {LARGEST} bytes (got more)")
    conversations: dict[str, _Open] = {}
    for number, line in enumerate(data.splitlines(), 1):
        if line.strip():
            where = f"{path}:{number}"
            _add(_row(line, where), conversations, where)
    if not any(one.turns for one in conversations.values()):
        raise RequestError(f"{path} must hold a conversation with an answer (got none)")
    return RecordedTrace(
        hashlib.sha256(data).hexdigest(),
        tuple(
            RecordedConversation(name, one.tools, tuple(one.turns))
            for name, one in conversations.items()
        ),
    )


def _row(line: bytes, where: str) -> Mapping[str, Any]:
    try:
        table = as_table(json.loads(line))
    except (ValueError, RecursionError) as e:
        raise RequestError(f"{where} must be JSON (got: {e})") from e
    if table is None:
        raise RequestError(f"{where} must be an object (got {show(line.decode(errors='replace'))})")
    return table


def _add(row: Mapping[str, Any], conversations: dict[str, _Open], where: str) -> None:
    name, role = row.get("conversation_id"), row.get("role")
    if not isinstance(name, str):
        raise RequestError(f"{where}: conversation_id must be a text (got {show(name)})")
    if role == "user" and name not in conversations:
        tools = as_list(row.get("tools", [])) or []
        conversations[name] = _Open(tuple(as_table(tool) or {} for tool in tools))
        if "system" in row:
            system = {"role": "system", "content": row["system"]}
            conversations[name].messages.append(system)
    if (found := conversations.get(name)) is None:
        raise RequestError(f"{where}: a conversation must begin with a user (got {show(role)})")
    if role == "assistant":
        keys = ("content", "reasoning_content", "tool_calls")
        answer = {"role": role, **{key: row[key] for key in keys if key in row}}
        found.turns.append(RecordedTurn(tuple(found.messages), answer))
        found.messages.append(answer)
    else:
        found.messages.extend(_spoken(row, role, where))


def _spoken(row: Mapping[str, Any], role: object, where: str) -> Iterator[Message]:
    if role == "user":
        yield {"role": role, "content": row.get("content", "")}
        return
    results = as_list(row.get("tool_results"))
    if role != "tool" or results is None:
        rule = "role must be user, assistant, or tool with tool_results"
        raise RequestError(f"{where}: {rule} (got {show(role)})")
    for result in results:
        table = as_table(result) or {}
        yield {
            "role": "tool",
            "tool_call_id": table.get("tool_call_id"),
            "content": table.get("content", ""),
        }
