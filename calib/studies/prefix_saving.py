"""What a prefix saves: held-out tasks with and without the prompt's beginning held.

    python -m thor_dflash.calib.studies.prefix_saving PACKAGE [--count 24]

Every prompt but its last TAIL tokens is put, as a robot that plans again in the same scene would.
"""

from __future__ import annotations

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


def timed(session: Session, prompt: tuple[int, ...]) -> tuple[tuple[int, ...], float, int]:
    """Tokens, ms to the first of them, and prompt tokens that were held."""
    times: list[float] = []
    tokens: tuple[int, ...] = ()
    for _ in range(RUNS):
        request = Request(prompt=prompt, max_tokens=ANSWER)
        tokens = script.tokens_of(session.run(request, DflashDrafter()))
        times.append(session.report().timings.ttft_ms)
    return tokens, median(times), session.report().usage.cached_tokens


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
    parser = script.parser(__doc__)
    parser.add_argument("--count", type=script.count, default=24)
    args = parser.parse_args(argv)
    session = open_session(args.package, EngineConfig(threads=args.threads), Silent())
    rows: list[tuple[float, ...]] = []
    for task in script.tasks(args.count):
        prompt = script.request_of(session, task).prompt
        plain, without, _ = timed(session, prompt)
        prefix = session.prefixes.put("scene", prompt[:-TAIL])
        assert prefix is not None
        same, with_it, cached = timed(session, prompt)
        assert same == plain, "a prefix must change no token"
        save, load = disk_ms(session, "scene")
        session.prefixes.drop("scene")
        rows.append((len(prompt), cached, without, with_it, prefix.bytes, save, load))
    names = ("prompt tokens", "held", "ttft without, ms", "ttft with, ms", "bytes", "save, ms",
             "load, ms")  # fmt: skip
    table: list[Sequence[object]] = [("of all prompts", "least", "median", "most")]
    for name, column in zip(names, zip(*rows, strict=True), strict=True):
        table.append((name, *(round(of(column)) for of in (min, median, max))))
    script.show([("prefix", table)], as_json=args.json)


if __name__ == "__main__":
    sys.exit(script.run(main))
