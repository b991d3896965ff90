"""Times full-size cycles with a DFlash2 drafter and with an MTP layer beside those with a DFlash
drafter.

    python tests/gpu/dflash2_cycles.py

The weights are random: times are those of a planner, acceptance is not. Milliseconds; medians of
ROUNDS rounds over all packages, so that a drift of the clocks meets all of them.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from support.full_size import opened

from thor_dflash.calib.studies import script
from thor_dflash.core.progress import Progress as Reporter
from thor_dflash.core.progress import choose
from thor_dflash.runtime.measure.bench_report import CONTEXT, CYCLE, LINEARS, THOR_READ
from thor_dflash.runtime.measure.cuda_bench import CudaBench, operators

ROUNDS = 3
FIRST, SECOND = "qwen3.6-27b", "qwen3.8-27b"
PACKAGES = {
    "DFlash, 16 rows, 64k": (FIRST, True, False, 0),
    "DFlash2, 8 rows, 64k": (SECOND, True, False, 0),
    "DFlash2, 8 rows, all ids": (SECOND, False, False, 0),
    "DFlash2, 8 of 16 rows, 64k": (SECOND, True, False, 16),
    "MTP, 3 drafts, 64k": (FIRST, True, True, 0),
    "MTP, 3 drafts, all ids": (FIRST, False, True, 0),
}
"""Name -> shape, whether the drafter has a reduced vocabulary, whether it is the MTP layer, and the
rows of a verify, 0 for the drafter's."""
PARTS = (
    "linear",
    "head",
    "draft_attention",
    "draft_conv",
    "selector",
    "compose",
    "context_kv",
    "embed",
    "rms_norm",
    "fill_drafts",
)


def times(bench: CudaBench) -> dict[str, float]:
    """Milliseconds of each step, of a cycle, and of the drafter's operators each alone."""
    bench.at(CONTEXT, bench.block)
    # An MTP layer takes in rows when it next drafts.
    cycle = [name for name in CYCLE if name in bench.model.graphs]
    found = {name: bench.steps([name]).median for name in cycle}
    found["cycle"] = bench.steps(cycle).median
    # Its drafts come from a text: the host has written the tokens.
    found["lookup cycle"] = bench.steps([name for name in cycle if name != "propose"]).median
    present = bench.operators("propose")
    for op in (op for op in PARTS if op in present):
        found[f"propose: {op}"] = bench.steps(["propose"], operators(op)).median
    return found


def measure(reporter: Reporter, count: int) -> list[tuple[object, ...]]:
    """The table: a row for each figure, a column for each package; medians of `count` rounds."""
    rounds: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for _ in range(count):
        for name, made in PACKAGES.items():
            shape, reduced, mtp, block = made
            with (
                opened(shape, reduced, reporter, mtp=mtp, block=block) as bench,
                reporter.task(f"measuring {name}"),
            ):
                found = {**times(bench), **facts(bench)}
            for figure, value in found.items():
                rounds[figure][name].append(value)
    rows: list[tuple[object, ...]] = [("figure", *PACKAGES)]
    for figure, by in rounds.items():
        cells = (round(statistics.median(by[n]), 4) if n in by else "" for n in PACKAGES)
        rows.append((figure, *cells))
    return rows


def facts(bench: CudaBench) -> dict[str, float]:
    """What the times depend on, and a prediction from it."""
    size = _cycle_bytes(bench)
    return {
        "propose, launches": bench.launches(["propose"]),
        "cycle, GB": size / 1e9,
        "read rate, GB/s": bench.bandwidth() / 1e9,
        "cycle of a Thor at its full read rate, predicted": 1e3 * size / THOR_READ,
    }


def _cycle_bytes(bench: CudaBench) -> int:
    """What a cycle must read: weights, state and cache."""
    steps = [name for name in ("verify", "propose", "observe") if name in bench.model.graphs]
    weights = sum(bench.bytes(name, LINEARS) for name in steps)
    return weights + bench.state_bytes() + bench.cache_bytes() * CONTEXT


def main(arguments: list[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--json", action="store_true", help="print the table as JSON")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    args = parser.parse_args(arguments)
    reporter = choose(sys.stderr)
    rows = measure(reporter, args.rounds)
    reporter.close()
    script.show([("cycles", rows)], as_json=args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
