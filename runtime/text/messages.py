"""Chats as they are written in a file. Imports nothing that a client of a server does not have."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from typing import Any, NoReturn, cast

import msgspec

from thor_dflash.core.errors import RequestError
from thor_dflash.core.message_text import check_utf8, show
from thor_dflash.core.strict_records import as_list, as_table

ROLES = ("system", "user", "assistant", "tool")
SEEING = ("user", "tool")
"""Roles whose content may be a list of texts and images."""
_KEYS = ("role", "content", "reasoning_content", "tool_calls", "tool_call_id")
_ONLY = {"tool_calls": "assistant", "tool_call_id": "tool"}
_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])
_SHORT = 4096
ChatTurn = dict[str, Any]
"""A checked message: texts, `content` that may be a list of parts, and `tool_calls` as
[{"function": {"name", "arguments"}}], where the arguments are the JSON text of an object."""


def chat(messages: object, pictures: int = 0) -> list[ChatTurn]:
    """As `check_chat`. Results of tools that name their calls are put into the order of the calls:
    chat templates show no ids, so that order is the only link.
    """
    turns = check_chat(messages, pictures)
    return [turns[i] for i in rendered_order(turns)]


def check_chat(messages: object, pictures: int = 0) -> list[ChatTurn]:
    """Check that `messages` is a chat: a list of objects with a known role and a text, of which
    parts show so many pictures.

    Raises:
        RequestError: it is not; the message names the entry.
    """
    entries = as_list(messages)
    if not entries:
        raise RequestError(
            f"messages must be a list of at least one message (got {show(messages)})"
        )
    turns = [_entry(entry, f"messages[{i}]") for i, entry in enumerate(entries)]
    found = sum((as_list(turn["content"]) or []).count({"type": "image"}) for turn in turns)
    if found != pictures:
        raise RequestError(f"messages must show {pictures} images (got {found})")
    return turns


def _entry(entry: object, where: str) -> ChatTurn:
    fields = as_table(entry)
    if fields is None:
        raise RequestError(f"{where} must be an object (got {show(entry)})")
    for key in fields.keys() - set(_KEYS):
        known = ", ".join(_KEYS)
        raise RequestError(f"{where} must have keys among {known} (got {show(key)})")
    for key in ("role", "content"):
        if key not in fields:
            raise RequestError(f"{where}.{key} must be present (got nothing)")
    if fields["role"] not in ROLES:
        known = ", ".join(ROLES)
        raise RequestError(f"{where}.role must be one of {known} (got {show(fields['role'])})")
    return {key: _field(key, value, fields["role"], where) for key, value in fields.items()}


def _field(key: str, value: object, role: object, where: str) -> object:
    only = _ONLY.get(key, role)
    if role != only:
        raise RequestError(f"{where}.{key} must be in a message of role {only} (got {show(role)})")
    if key == "tool_calls":
        return _calls(value, f"{where}.tool_calls")
    if key == "content" and (parts := as_list(value)) is not None and role in SEEING:
        return [_part(part, f"{where}.content[{i}]") for i, part in enumerate(parts)]
    if not isinstance(value, str):
        rule = "a string" if role in SEEING else f"a string in a message of role {role}"
        raise RequestError(f"{where}.{key} must be {rule} (got {show(value)})")
    check_utf8(f"{where}.{key}", value)
    return value


def _part(part: object, where: str) -> dict[str, str]:
    fields = as_table(part) or {}
    if fields == {"type": "image"}:
        return {"type": "image"}
    text = fields.get("text")
    if fields.keys() != {"type", "text"} or fields["type"] != "text" or not isinstance(text, str):
        rule = 'a part {"type": "text", "text": ...} or {"type": "image"}'
        raise RequestError(f"{where} must be {rule} (got {show(part)})")
    check_utf8(f"{where}.text", text)
    return {"type": "text", "text": text}


def _calls(given: object, where: str) -> list[dict[str, Any]]:
    calls = as_list(given)
    if calls is None:
        raise RequestError(f"{where} must be a list (got {show(given)})")
    return [_call(as_table(call) or {}, f"{where}[{i}]") for i, call in enumerate(calls)]


def _call(call: Mapping[str, object], where: str) -> dict[str, Any]:
    if call.get("type", "function") != "function":
        raise RequestError(f"{where}.type must be function (got {show(call['type'])})")
    if not isinstance(call.get("id"), str | None):
        raise RequestError(f"{where}.id must be a text (got {show(call['id'])})")
    function = as_table(call.get("function")) or {}
    name, arguments = function.get("name"), function.get("arguments", "{}")
    if not isinstance(name, str) or not name:
        raise RequestError(f"{where}.function.name must be a text (got {show(name)})")
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    if not _is_object(arguments):
        raise RequestError(
            f"{where}.function.arguments must be a JSON text of an object (got {show(arguments)})"
        )
    check_utf8(f"{where}.function", name + arguments)
    return {"id": call.get("id"), "function": {"name": name, "arguments": arguments}}


def _is_object(text: str) -> bool:
    """Whether Python's own decoder, which the template's process uses, makes a mapping of it."""
    if len(text) < _SHORT:  # Python refuses longer integers
        with suppress(msgspec.DecodeError, ValueError, RecursionError):
            _OBJECT.decode(text)  # takes less than Python's, in a tenth of the time
            return True
    try:
        return isinstance(json.loads(text, parse_constant=_no_constant), dict)
    except (ValueError, RecursionError):
        return False


def _no_constant(word: str) -> NoReturn:
    raise ValueError(word)  # NaN and Infinity, which Python reads and JSON does not have


def rendered_order(turns: Sequence[Mapping[str, Any]]) -> list[int]:
    """The indices of turns in the order in which a prompt has them: see `chat`. Images go with
    their turns.
    """
    found: list[int] = []
    order: dict[object, int] = {}
    for are_results, group in groupby(range(len(turns)), lambda i: turns[i]["role"] == "tool"):
        part = list(group)
        if are_results:
            ids = [turns[i].get("tool_call_id") for i in part]
            if len(set(ids)) == len(ids) and all(i in order for i in ids):
                part.sort(key=lambda i: order[turns[i].get("tool_call_id")])
        else:
            calls = cast("list[dict[str, object]]", turns[part[-1]].get("tool_calls") or [])
            ids = [call.get("id") for call in calls]
            order = {name: i for i, name in enumerate(ids) if isinstance(name, str)}
        found += part
    return found
