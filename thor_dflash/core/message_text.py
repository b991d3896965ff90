"""Text of messages: values shortened, control characters escaped, one line."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable

from thor_dflash.core.errors import RequestError

SHOWN = 80
"""Maximum characters of a value in a message."""
LINE = 2000
"""Maximum characters of a message, so that a huge value in one does not flood a terminal or log."""
_WRITTEN = "\u00a0\u200c\u200d\u3000"
"""Part of ordinary text, though Python does not call them printable: the no-break and ideographic
spaces, and the joiners of Persian, Indic scripts and emoji."""


def show(value: object) -> str:
    """A value as it would be written in TOML, shortened for a message."""
    cut = value[: SHOWN + 1] if isinstance(value, str | bytes) else value
    text = ""
    # Piece by piece, because encoding a large value completely would be slow.
    try:
        for piece in json.JSONEncoder(default=str, ensure_ascii=False).iterencode(cut):
            text += piece
            if len(text) > SHOWN:
                return text[: SHOWN - 3] + "..."
    except ValueError:  # Python does not print huge integers, which TOML can give in hex
        return text + "a number of thousands of digits"
    return text


def visible(text: str, keep: str = "") -> str:
    """`text` with control characters and other unprintable ones, except those in `keep`, escaped: a
    terminal would obey them, and a line break would look like the next line of a log.
    """
    if text.isprintable():  # a logged prompt may have a million characters: do not go through them
        return text
    keep += _WRITTEN
    return "".join(
        c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text
    )


def one_line(text: str) -> str:
    """A message as one line of visible characters."""
    return cut(visible(" ".join(text.split())), LINE)


def cut(text: str, most: int = SHOWN) -> str:
    """`text`, with the middle left out if it has more than `most` characters."""
    if len(text) <= most:
        return text
    end = most // 4
    return f"{text[: most - end - 5]} ... {text[-end:]}"


def check_utf8(what: str, text: str) -> None:
    """Refuse text with lone surrogates: its source was not UTF-8.

    Raises:
        RequestError: `text` has some; names `what`.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as e:
        raise RequestError(f"{what} must be UTF-8 (got: {e.reason} at {e.start})") from e


def nearest(name: str, known: Iterable[str], prefix: str = "") -> str:
    """`did you mean x?`, or the known names if none is similar; each with `prefix`."""
    names = sorted(known)
    begun = [other for other in names if name and other.startswith(name)]
    near = begun or difflib.get_close_matches(name, names, n=1)
    if near:
        return f"did you mean {prefix}{near[0]}?"
    return f"known: {', '.join(prefix + other for other in names)}"
