"""Times full-size cycles that draw their tokens beside greedy ones, with both kinds of drafters.

    python tests/gpu/sampling_cycles.py

The weights are random: times are those of a planner, acceptance is not. Milliseconds; medians of
ROUNDS rounds in one process, greedy and sampled in turn, so that a drift of the clocks meets all.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from support.full_size import opened

from thor_dflash.calib.studies import script
from thor_dflash.core.progress import Progress as Reporter
from thor_dflash.core.progress import choose
from thor_dflash.core.tensors import Array
from thor_dflash.runtime.decoding.block import Sampling
from thor_dflash.runtime.measure.bench_report import CONTEXT, CYCLE
from thor_dflash.runtime.measure.cuda_bench import CudaBench

ROUNDS = 5
DRAWN = {
    "no truncation": Sampling(temperature=1.0, seed=1),
    "top_k 20": Sampling(temperature=1.0, top_k=20, seed=1),
    "top_k 20, top_p 0.95": Sampling(temperature=1.0, top_k=20, top_p=0.95, seed=1),
    "top_p 0.95": Sampling(temperature=1.0, top_p=0.95, seed=1),
    "min_p 0.05": Sampling(temperature=1.0, min_p=0.05, seed=1),
}
SHAPES = {"DFlash": "qwen3.6-27b", "DFlash2": "qwen3.8-27b"}
REJECTION = ("sample_drafts_rejection", "accept_rejection")
COLUMNS = {
    "cycle, accept sampled": ("propose", "verify", "accept_sampled", "observe"),
    "cycle, drafts sampled too": (
        *("propose", "sample_drafts", "verify", "accept_sampled", "observe"),
    ),
    "cycle, rejection": ("propose", REJECTION[0], "verify", REJECTION[1], "observe"),
}
ALONE = {
    "accept alone": "accept_sampled", "drafts alone": "sample_drafts",
    "rejecting accept alone": REJECTION[1], "rejecting drafts alone": REJECTION[0],
}  # fmt: skip
"""The drafts of rejection are drawn before its accept reads them."""


SPREAD, PEAK, RISE = 2.5, 100, 12.0
"""The logits that accept and sample_drafts get alone: their standard deviation, and how many of the
best rise by how much, so that the rows have a peak as a model's do. In a cycle they are those of
random weights: the flattest rows, where top_p keeps nearly every id.
"""


def peaked(bench: CudaBench) -> dict[str, Array]:
    """Logits of a peak in each row, for `accept` and for the drafts."""
    bench.at(CONTEXT, bench.block)
    bench.steps(CYCLE)
    logits = bench.model.read("logits")
    logits *= np.float32(SPREAD) / logits.std()
    best = np.argsort(-logits, axis=1)[:, :PEAK]
    rise = np.float32(RISE) * np.linspace(1, 0, PEAK, dtype=np.float32)
    np.put_along_axis(logits, best, np.take_along_axis(logits, best, 1) + rise, 1)
    width = bench.call("sample_drafts").inputs["draft_logits"].spec.at({})[1]
    return {"logits": logits, "draft_logits": np.ascontiguousarray(logits[:, :width])}


def measure(bench: CudaBench) -> dict[str, dict[str, list[float]]]:
    """Row -> column -> milliseconds by round."""
    rounds: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    logits, inputs = peaked(bench), bench.call(REJECTION[1]).inputs
    bench.engine.write(inputs["drawn"], np.array([bench.block - 1], np.int32))
    bench.engine.write(inputs["mask"], np.full(inputs["mask"].spec.at({}), -1, np.int32))
    for _ in range(ROUNDS):
        rounds["greedy"]["cycle"].append(bench.steps(CYCLE).median)
        rounds["greedy"]["accept alone"].append(bench.steps(["accept"]).median)
        for name, how in DRAWN.items():
            bench.model.write_sampling(how)
            bench.at(CONTEXT, bench.block)  # and sends what was written
            found = rounds[name]
            for column, steps in COLUMNS.items():
                found[column].append(bench.steps(steps).median)
            bench.engine.write(inputs["logits"], logits["logits"])
            drafts = bench.call("sample_drafts").inputs["draft_logits"]
            bench.engine.write(drafts, logits["draft_logits"])
            bench.engine.read(bench.call("verify").inputs["length"])
            for column, step in reversed(ALONE.items()):
                found[column].append(bench.steps([step]).median)
    return rounds


def table(drafter: str, rounds: dict[str, dict[str, list[float]]]) -> list[tuple[object, ...]]:
    """A row for each way to draw; what it adds to a cycle is in percent of the greedy cycle."""
    greedy = rounds["greedy"]["cycle"]
    alone = round(statistics.median(rounds["greedy"]["accept alone"]), 4)
    first = round(statistics.median(greedy), 4)
    blank = [""] * (len(ALONE) - 1)
    rows: list[tuple[object, ...]] = [
        (drafter, "greedy", alone, *blank, first, *[""] * (2 * len(COLUMNS) - 1))
    ]
    for name in DRAWN:
        times = [rounds[name][c] for c in (*ALONE, *COLUMNS)]
        adds = (
            100 * statistics.median(s / g - 1 for s, g in zip(t, greedy, strict=True))
            for t in times[len(ALONE) :]
        )
        cells = (round(statistics.median(t), 4) for t in times)
        rows.append((drafter, name, *cells, *(round(x, 2) for x in adds)))
    return rows


def run(reporter: Reporter) -> list[tuple[object, ...]]:
    """Open a full-size package of each drafter and measure it."""
    adds = ("accept adds, %", "both add, %", "rejection adds, %")
    rows: list[tuple[object, ...]] = [("drafter", "drawn", *ALONE, *COLUMNS, *adds)]
    for drafter, shape in SHAPES.items():
        with opened(shape, False, reporter) as bench:
            rows += table(drafter, measure(bench))
    return rows


def main(arguments: list[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--json", action="store_true", help="print the table as JSON")
    args = parser.parse_args(arguments)
    reporter = choose(sys.stderr)
    rows = run(reporter)
    reporter.close()
    script.show([("sampled cycles", rows)], as_json=args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
