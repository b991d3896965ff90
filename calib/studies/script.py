"""What the measuring scripts share: arguments, tasks, requests, tables, and errors as one line."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from thor_dflash.calib.demo import MODEL
from thor_dflash.calib.planbench import Task, task_from_line
from thor_dflash.core.errors import ThorError
from thor_dflash.core.progress import print_line


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


def parser(description: str | None, *, package: bool = True) -> argparse.ArgumentParser:
    """The arguments of all scripts."""
    made = argparse.ArgumentParser(description=description)
    if package:
        made.add_argument("package", type=Path)
        made.add_argument("--threads", type=count, default=1)
    made.add_argument("--json", action="store_true", help="print the tables as JSON")
    return made


def tasks(limit: int | None = None) -> list[Task]:
    """The committed held-out tasks, families taking turns."""
    lines = (MODEL / "heldout.jsonl").read_text(encoding="utf-8").splitlines()
    return [task_from_line(line) for line in lines[:limit]]


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
