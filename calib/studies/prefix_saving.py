"""What a prefix saves: held-out tasks with and without the prompt's beginning held.

    python -m thor_dflash.calib.studies.prefix_saving PACKAGE HELDOUT.jsonl [--count 24]

Every prompt but its last TAIL tokens is put, as a robot that plans again in the same scene would.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from thor_dflash.calib.studies import script
from thor_dflash.config.engine import EngineConfig
from thor_dflash.core.progress import Silent
from thor_dflash.runtime.decoding.proposers import DflashDrafter
from thor_dflash.runtime.session import Request, Session, open_session

TAIL = 24
"""A request of a few words, and the marks around it."""
RUNS = 3
"""Runs a time is the median of."""
ANSWER = 16
"""Tokens decoded: enough to compare, too few to matter."""


def prompts(session: Session, heldout: Path, count: int) -> list[tuple[int, ...]]:
    """The first prompts of a task file."""
    text, found = script.text_of(session), list[tuple[int, ...]]()
    for task in script.read_tasks(heldout, count):
        messages = [{"role": r, "content": c} for r, c in task.messages]
        found.append(tuple(text.encode(text.render(messages, thinking=True))))
    return found


def timed(session: Session, prompt: tuple[int, ...]) -> tuple[list[int], float, int]:
    """Tokens, ms to the first of them, and prompt tokens that were held."""
    times: list[float] = []
    tokens: list[int] = []
    for _ in range(RUNS):
        request = Request(prompt=prompt, max_tokens=ANSWER)
        tokens = [t for chunk in session.run(request, DflashDrafter()) for t in chunk.tokens]
        times.append(session.report().timings.ttft_ms)
    return tokens, median(times), session.report().cached_tokens


def disk_ms(session: Session, name: str) -> tuple[float, float]:
    """ms to save and to load a prefix."""
    with tempfile.TemporaryDirectory() as folder:
        path, begin = Path(folder) / "prefix", time.perf_counter()
        session.prefixes.save(name, path)
        middle = time.perf_counter()
        session.prefixes.load(path)
        return 1e3 * (middle - begin), 1e3 * (time.perf_counter() - middle)


def main(argv: Sequence[str] | None = None) -> None:
    """Read the arguments, run, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("package", type=Path)
    parser.add_argument("heldout", type=Path)
    parser.add_argument("--count", type=script.count, default=24)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args(argv)
    session = open_session(args.package, EngineConfig(threads=args.threads), Silent())
    rows: list[tuple[float, ...]] = []
    for prompt in prompts(session, args.heldout, args.count):
        plain, without, _ = timed(session, prompt)
        prefix = session.prefixes.put("scene", prompt[:-TAIL])
        assert prefix is not None
        same, with_it, cached = timed(session, prompt)
        assert same == plain, "a prefix must change no token"
        save, load = disk_ms(session, "scene")
        session.prefixes.drop("scene")
        rows.append((len(prompt), cached, without, with_it, prefix.bytes, save, load))
    names: tuple[str, ...] = ("prompt tokens", "held", "ttft without, ms", "ttft with, ms", "bytes")
    names += ("save, ms", "load, ms")
    for name, column in zip(names, zip(*rows, strict=True), strict=True):
        print(f"| {name} | {min(column):.0f} | {median(column):.0f} | {max(column):.0f} |")
    print(f"{len(rows)} prompts; the same tokens with and without, all of them")


if __name__ == "__main__":
    sys.exit(script.run(main))
