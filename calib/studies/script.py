"""How the measuring scripts are called and end: what their caller can put right is one line."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from thor_dflash.calib.planbench import Task, task_from_line
from thor_dflash.core.errors import RequestError, ThorError
from thor_dflash.core.progress import print_line
from thor_dflash.runtime.session import Session
from thor_dflash.runtime.text.tokenizer import Tokenizer


def run(main: Callable[[], None]) -> int:
    """Run a script; its exit status."""
    try:
        main()
    except ThorError as e:
        text = " ".join(str(e).split())
    except OSError as e:
        if e.filename is None:
            raise
        text = f"{e.filename} must be usable (got: {e.strerror})"
    else:
        return 0
    print_line(sys.stderr, text)
    return 2


def count(text: str) -> int:
    """An option that is a count."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be an integer >= 1 (got {text})")
    return int(text)


def text_of(session: Session) -> Tokenizer:
    """The tokenizer and chat template of a session's package.

    Raises:
        RequestError: it has none.
    """
    if session.tokenizer is None:
        raise RequestError("the package must have a tokenizer.json (got one without)")
    return session.tokenizer


Table = Sequence[Sequence[object]]
"""Rows of cells; the first row is the header."""


def show(tables: Iterable[tuple[str, Table]], *, as_json: bool) -> None:
    """Print named tables: each as Markdown when it is there, or all of them as one JSON object."""
    if as_json:
        print(json.dumps(dict(tables), indent=1, allow_nan=False))
        return
    for name, (head, *rows) in tables:
        print(f"\n## {name}\n")
        for row in (head, ["---"] * len(head), *rows):
            cells = (f"{c:.2f}" if isinstance(c, float) else str(c) for c in row)
            print("| " + " | ".join(cells) + " |", flush=True)


def read_tasks(path: Path, most: int) -> list[Task]:
    """The first tasks of a file that holds one a line.

    Raises:
        RequestError: it cannot be read, or holds something else.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()[:most]
        found = [task_from_line(line) for line in lines]
    except OSError as e:
        raise RequestError(f"{path} must be a readable file (got: {e.strerror})") from e
    except (ValueError, KeyError, TypeError) as e:
        raise RequestError(f"{path} must hold a task a line (got: {e!r})") from e
    if not found:
        raise RequestError(f"{path} must hold a task a line (got an empty file)")
    return found
