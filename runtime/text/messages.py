"""Chats as they are written in a file. Imports nothing that a client of a server does not have."""

from __future__ import annotations

from typing import cast

from thor_dflash.core.errors import RequestError
from thor_dflash.core.message_text import check_utf8, show
from thor_dflash.core.strict_records import as_list, as_table

ROLES = ("system", "user", "assistant", "tool")
_KEYS = ("role", "content", "reasoning_content")


def chat(messages: object) -> list[dict[str, str]]:
    """Check that `messages` is a chat: a list of objects with a known role and a string content.

    Raises:
        RequestError: it is not; the message names the entry.
    """
    entries = as_list(messages)
    if not entries:
        raise RequestError(
            f"messages must be a list of at least one message (got {show(messages)})"
        )
    return [_entry(entry, f"messages[{i}]") for i, entry in enumerate(entries)]


def _entry(entry: object, where: str) -> dict[str, str]:
    fields = as_table(entry)
    if fields is None:
        raise RequestError(f"{where} must be an object (got {show(entry)})")
    for key in fields.keys() - set(_KEYS):
        known = ", ".join(_KEYS)
        raise RequestError(f"{where} must have keys among {known} (got {show(key)})")
    for key in ("role", "content"):
        if key not in fields:
            raise RequestError(f"{where}.{key} must be present (got nothing)")
    for key, value in fields.items():
        if not isinstance(value, str):
            raise RequestError(f"{where}.{key} must be a string (got {show(value)})")
        check_utf8(f"{where}.{key}", value)
    if fields["role"] not in ROLES:
        known = ", ".join(ROLES)
        raise RequestError(f"{where}.role must be one of {known} (got {show(fields['role'])})")
    return cast("dict[str, str]", fields)
