"""Input files of the subcommands: JSON of limited size, schemas, chats, and token ids."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

from thor_dflash.core.bounds import IMAGE_MAGIC, MOST_IMAGE_BYTES
from thor_dflash.core.errors import RequestError
from thor_dflash.core.message_text import check_utf8, show
from thor_dflash.core.strict_records import as_list, as_table, decode, read_text, unique_keys
from thor_dflash.runtime.text.messages import check_chat, rendered_order

T = TypeVar("T")
FileFormat = Literal["jpeg", "png"]
ImageFile = tuple[FileFormat, bytes]
"""Format and bytes of an image."""
STDIN = 0
"""The descriptor of standard input."""
LARGEST_REPORT = 1 << 30
"""Maximum size of a report as JSON, bytes: ten times the profile of the longest soak with cycles of
5 ms."""


def read_json(path: Path, limit: int | None = None) -> object:
    """Read any JSON value. `limit`: as in `read_text`.

    Raises:
        RequestError: the file is missing, too large, or not JSON in UTF-8 with every key once.
    """
    try:
        text = read_text(path, limit)
        return cast("object", json.loads(text, object_pairs_hook=unique_keys))
    except OSError as e:
        raise RequestError(f"{path} must be a readable file (got: {e.strerror})") from e
    except (ValueError, RecursionError) as e:
        raise RequestError(f"{path} must be JSON (got: {e})") from e


def read_report(kind: type[T], path: Path, command: str) -> T:
    """Read what a subcommand printed with --json.

    Raises:
        RequestError: as `read_json`, or the file is no such report.
    """
    table = as_table(value := read_json(path, LARGEST_REPORT))
    if table is None:
        text = f"{path} must be a JSON object, as {command} --json prints it"
        raise RequestError(f"{text} (got {show(value)})")
    return decode(kind, table, str(path), RequestError)


def read_prompt(what: str, text: str, *, empty: bool = False) -> str:
    """The text of a prompt: `text` itself, `-` for standard input, `@FILE` for that of a file, as
    curl has it. Blank lines at the end of an input are dropped, as a shell does.

    Raises:
        RequestError: it is empty, unless it may be, cannot be read, is too large, or not UTF-8.
    """
    if text == "-" or text.startswith("@"):
        try:
            source = STDIN if text in ("-", "@-") else Path(text[1:])
            text = read_text(source).rstrip("\n")
        except (OSError, ValueError) as e:
            got = e.strerror if isinstance(e, OSError) else e
            raise RequestError(f"{what} {text} must be a readable text (got: {got})") from e
    if not text.strip() and not empty:
        raise RequestError(f"{what} must be a text that is not empty (got {show(text)})")
    check_utf8(what, text)
    return text


def read_images(paths: Sequence[str], text: str | None, option: str) -> list[ImageFile]:
    """Format and bytes of image files that go with a text.

    Raises:
        RequestError: there is no text, or a file is no JPEG or PNG that can be read.
    """
    if paths and text is None:
        raise RequestError(f"--image must go with {option} (got none)")
    return [_image_file(Path(path), f"--image {path}") for path in paths]


def _image_file(path: Path, what: str) -> ImageFile:
    try:
        with path.open("rb") as file:
            data = file.read(MOST_IMAGE_BYTES + 1)
    except (OSError, ValueError) as e:
        got = e.strerror if isinstance(e, OSError) else e
        raise RequestError(f"{what} must be a readable file (got: {got})") from e
    if len(data) > MOST_IMAGE_BYTES:
        raise RequestError(f"{what} must be at most {MOST_IMAGE_BYTES} bytes (got more)")
    kinds: list[FileFormat] = [
        kind for kind, magic in IMAGE_MAGIC.items() if data.startswith(magic)
    ]
    if not kinds:
        raise RequestError(f"{what} must be a JPEG or PNG (got another file)")
    return kinds[0], data


def read_schema(path: Path) -> dict[str, Any]:
    """Read a JSON schema, in the order of the file. Its keywords are not checked.

    Raises:
        RequestError: it is not a JSON object.
    """
    table = as_table(value := read_json(path))
    if table is None:
        raise RequestError(f"{path} must hold a JSON object (got {show(value)})")
    return table


def read_chat(path: Path) -> tuple[list[dict[str, Any]], list[ImageFile]]:
    """Read a chat, and the images that it shows: parts {"type": "image", "file": NAME} name files
    beside it.

    Raises:
        RequestError: it is not one, or a file is no image; the message names the wrong entry.
    """
    value = read_json(path)
    if (entries := as_list(value)) is None:
        return check_chat(value), []
    given: list[object] = []
    images: list[list[ImageFile]] = []
    for i, entry in enumerate(entries):
        shown: list[ImageFile] = []
        images.append(shown)
        fields = as_table(entry)
        if fields and (parts := as_list(fields.get("content"))) is not None:
            where = f"messages[{i}].content"
            seen = [_part(p, path.parent, f"{where}[{j}]", shown) for j, p in enumerate(parts)]
            entry = {**fields, "content": seen}
        given.append(entry)
    turns = check_chat(given, sum(map(len, images)))
    order = rendered_order(turns)
    return [turns[i] for i in order], [image for i in order for image in images[i]]


def _part(part: object, folder: Path, where: str, images: list[ImageFile]) -> object:
    fields = as_table(part) or {}
    if fields.get("type") != "image":
        return part
    name = fields.get("file")
    if fields.keys() != {"type", "file"} or not isinstance(name, str):
        rule = 'a text or {"type": "image", "file": NAME}'
        raise RequestError(f"{where} must be {rule} (got {show(part)})")
    images.append(_image_file(folder / name, f"{where}.file"))
    return {"type": "image"}


def read_tokens(path: Path) -> tuple[int, ...]:
    """Read a JSON list of at least one integer.

    Raises:
        RequestError: it is not one; the message names the wrong entry.
    """
    value = read_json(path)
    items = as_list(value)
    if not items:
        raise RequestError(f"{path} must be a list of at least one token id (got {show(value)})")
    return tuple(_token(item, f"{path}: tokens[{i}]") for i, item in enumerate(items))


def _token(item: object, where: str) -> int:
    if not isinstance(item, int) or isinstance(item, bool):
        raise RequestError(f"{where} must be an integer (got {show(item)})")
    return item


def in_vocabulary(tokens: tuple[int, ...], vocab: int) -> tuple[int, ...]:
    """Check that every token is an id below `vocab`; return the tokens.

    Raises:
        RequestError: names the first that is not.
    """
    for i, token in enumerate(tokens):
        if not 0 <= token < vocab:
            raise RequestError(f"tokens[{i}] must be in 0..{vocab - 1} (got {show(token)})")
    return tokens
