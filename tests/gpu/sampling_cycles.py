"""Times full-size cycles that draw their tokens beside greedy ones.

    python tests/gpu/sampling_cycles.py

The weights are random: times are those of a planner, acceptance is not. Milliseconds; medians of
ROUNDS rounds in one process, greedy and sampled in turn, so that a drift of the clocks meets all.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections import defaultdict
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT)]

from thor_dflash.builders.synthetic import write_synthetic
from thor_dflash.calib.studies import script
from thor_dflash.cli.commands.bench import CAPACITY, variants
from thor_dflash.config.tree import Config
from thor_dflash.core.progress import Progress as Reporter
from thor_dflash.core.progress import choose
from thor_dflash.runtime.decoding.block import Sampling
from thor_dflash.runtime.engines.cuda.engine import CudaEngine
from thor_dflash.runtime.measure.bench_report import CONTEXT, CYCLE
from thor_dflash.runtime.measure.cuda_bench import CudaBench, open_bench
from thor_dflash.runtime.measure.random_weights import RandomWeights

ROUNDS = 5
DRAWN = {
    "no truncation": Sampling(temperature=1.0, seed=1),
    "top_k 20": Sampling(temperature=1.0, top_k=20, seed=1),
    "top_k 20, top_p 0.95": Sampling(temperature=1.0, top_k=20, top_p=0.95, seed=1),
    "top_p 0.95": Sampling(temperature=1.0, top_p=0.95, seed=1),
    "min_p 0.05": Sampling(temperature=1.0, min_p=0.05, seed=1),
}
ACCEPTS = ("propose", "verify", "accept_sampled", "observe")
WHOLE = ("propose", "sample_drafts", "verify", "accept_sampled", "observe")


SPREAD, PEAK, RISE = 2.5, 100, 12.0
"""The logits that accept and sample_drafts get alone: their standard deviation, and how many of the
best rise by how much, so that the rows have a peak as a model's do. In a cycle they are those of
random weights: the flattest rows, where top_p keeps nearly every id.
"""


def measure(bench: CudaBench) -> dict[str, dict[str, list[float]]]:
    """Row -> column -> milliseconds by round."""
    rounds: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    bench.at(CONTEXT, bench.block)
    bench.steps(CYCLE)
    logits = bench.model.read("logits")
    logits *= np.float32(SPREAD) / logits.std()
    best = np.argsort(-logits, axis=1)[:, :PEAK]
    rise = np.float32(RISE) * np.linspace(1, 0, PEAK, dtype=np.float32)
    np.put_along_axis(logits, best, np.take_along_axis(logits, best, 1) + rise, 1)
    for _ in range(ROUNDS):
        rounds["greedy"]["cycle"].append(bench.steps(CYCLE).median)
        rounds["greedy"]["accept alone"].append(bench.steps(["accept"]).median)
        for name, how in DRAWN.items():
            bench.model.write_sampling(how)
            bench.at(CONTEXT, bench.block)  # and sends what was written
            found = rounds[name]
            found["cycle, accept sampled"].append(bench.steps(ACCEPTS).median)
            found["cycle, drafts sampled too"].append(bench.steps(WHOLE).median)
            bench.engine.write(bench.call("accept").inputs["logits"], logits)
            width = bench.call("sample_drafts").inputs["draft_logits"].spec.at({})[1]
            bench.engine.write(
                bench.call("sample_drafts").inputs["draft_logits"], logits[:, :width]
            )
            bench.engine.read(bench.call("verify").inputs["length"])
            found["accept alone"].append(bench.steps(["accept_sampled"]).median)
            found["drafts alone"].append(bench.steps(["sample_drafts"]).median)
    return rounds


def table(rounds: dict[str, dict[str, list[float]]]) -> list[tuple[object, ...]]:
    """A row for each way to draw; what it adds to a cycle is in percent of the greedy cycle."""
    greedy = rounds["greedy"]["cycle"]
    columns = ("accept alone", "drafts alone", "cycle, accept sampled", "cycle, drafts sampled too")
    rows: list[tuple[object, ...]] = [
        ("drawn", *columns, "accept adds, %", "both add, %"),
        ("greedy", round(statistics.median(rounds["greedy"]["accept alone"]), 4), "",
         round(statistics.median(greedy), 4), "", "", ""),
    ]  # fmt: skip
    for name in DRAWN:
        times = [rounds[name][c] for c in columns]
        adds = (
            100 * statistics.median(s / g - 1 for s, g in zip(t, greedy, strict=True))
            for t in times[2:]
        )
        cells = (round(statistics.median(t), 4) for t in times)
        rows.append((name, *cells, *(round(x, 2) for x in adds)))
    return rows


def run(reporter: Reporter) -> list[tuple[object, ...]]:
    """Open a full-size package and measure it."""
    variant = next(variants(Config(), ablations=False))
    variant = replace(variant, build=replace(variant.build, engine="cuda"))
    cubins = variant.engine.cubins_directory
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        made = write_synthetic("qwen3.6-27b", out, variant.build)
        fill = RandomWeights(out, cubins)
        with closing(CudaEngine(out, variant.engine, reporter, fill)) as engine:
            bench = open_bench(engine, made, CAPACITY, (), cubins)
            return table(measure(bench))


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
