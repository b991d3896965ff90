"""The images of OpenAI's requests: `data:` URLs, and files below one directory; nothing else."""

from __future__ import annotations

import base64
import os
import re
import stat
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote

from thor_dflash.core.bounds import MOST_IMAGE_BYTES
from thor_dflash.core.message_text import cut, show
from thor_dflash.serving.protocol.errors import bad_request

LOW_DETAIL = 1 << 18
"""Most pixels of an image of low detail."""
_DATA = re.compile(r"data:image/(jpe?g|png);base64,(.*)", re.DOTALL)
_ENDINGS = {".jpg": "jpeg", ".jpeg": "jpeg", ".png": "png"}


def image_of(url: str, detail: str | None, directory: str, where: str) -> dict[str, Any]:
    """Return an image as TDP/1 has it, without an id.

    Args:
        directory: Below which files may be read; "": none may.
        where: The field that errors name.

    Raises:
        PlanError: bad_request; the URL is another, or there is no such image.
    """
    if found := _DATA.fullmatch(url):
        kind, text = found[1].replace("jpg", "jpeg"), found[2]
        try:
            data = base64.b64decode(text, validate=True)
        except ValueError as e:  # binascii.Error, or text beyond ASCII
            raise bad_request(f"{where}.url must be valid base64 (got: {e})", where) from e
    elif url.startswith("file:"):
        kind, data = _file(url, directory, where)
    else:
        rule = "data:image/jpeg;base64,... or data:image/png;base64,...: send the bytes"
        raise bad_request(f"{where}.url must be {rule} (got {cut(show(url))})", where)
    most = {"max_pixels": LOW_DETAIL} if detail == "low" else {}
    return {"format": kind, "data": data, **most}


def _file(url: str, directory: str, where: str) -> tuple[str, bytes]:
    if not directory:
        rule = "a data: URL: this gateway reads no files, which needs gateway.image_dir"
        raise bad_request(f"{where}.url must be {rule} (got {cut(show(url))})", where)
    path = PurePosixPath(unquote(url.removeprefix("file:").removeprefix("//")))
    root = PurePosixPath(os.path.realpath(directory))
    kind = _ENDINGS.get(path.suffix.lower())
    outside = ".." in path.parts or not path.is_relative_to(root) or path == root
    if outside or kind is None or "\0" in str(path):
        rule = "a .jpg, .jpeg or .png below the directory of the gateway's images"
        raise bad_request(f"{where}.url must be {rule} (got {cut(show(url))})", where)
    try:
        return kind, _read_below(Path(root), path.relative_to(root).parts)
    except OSError as e:
        rule = "a file that can be read, without links on the way"
        raise bad_request(f"{where}.url must be {rule} (got: {e.strerror})", where) from e


def _read_below(root: Path, parts: tuple[str, ...]) -> bytes:
    """Read a regular file, opening every directory on the way without following links."""
    at = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for name in parts[:-1]:
            inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=at)
            os.close(at)
            at = inner
        # Not blocking: the opening of a pipe would wait for a writer.
        file = os.open(parts[-1], os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=at)
    finally:
        os.close(at)
    with open(file, "rb") as stream:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise OSError(0, "no regular file")
        return stream.read(MOST_IMAGE_BYTES + 1)
