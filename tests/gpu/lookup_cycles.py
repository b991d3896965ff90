"""Times a full-size cycle whose drafts come from a text beside one that the drafter drafts.

    python tests/gpu/lookup_cycles.py [--json]

The weights are random: times are those of a planner. A lookup cycle runs verify, accept and
observe; its tokens are written by the host like the other small inputs of a step. Milliseconds;
medians of ROUNDS rounds over all packages, so that a drift of the clocks meets all of them.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from gpu.dflash2_cycles import PACKAGES, ROUNDS, opened

from thor_dflash.calib.studies import script
from thor_dflash.core.progress import choose
from thor_dflash.runtime.measure.bench_report import CONTEXT, CYCLE

LOOKUP = tuple(name for name in CYCLE if name != "propose")
PLAIN = ("verify", "accept")
CYCLES = {"drafter": CYCLE, "lookup": LOOKUP, "plain": PLAIN}


def main(arguments: list[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--json", action="store_true", help="print the table as JSON")
    args = parser.parse_args(arguments)
    reporter = choose(sys.stderr)
    taken: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for _ in range(ROUNDS):
        for package, made in PACKAGES.items():
            with opened(*made, reporter) as bench, reporter.task(f"measuring {package}"):
                bench.at(CONTEXT, bench.block)
                for name, graphs in CYCLES.items():
                    taken[name][package].append(bench.steps(graphs).median)
    reporter.close()
    rows: list[tuple[object, ...]] = [("cycle, ms", *PACKAGES)]
    for name, by in taken.items():
        rows.append((name, *(round(statistics.median(by[package]), 4) for package in PACKAGES)))
    script.show([("lookup cycles", rows)], as_json=args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
