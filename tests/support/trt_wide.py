"""The 27B's graphs without its weights, built by TensorRT for RTX on a CPU and never executed.

    python tests/support/trt_wide.py > table.json

prints time, size and layers of every engine: of the small planner, of the 27B with plugins, and of
its first layers with TensorRT's own products.
"""

from __future__ import annotations

import json
import resource
import sys
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from support.trt_builds import (
    NANO,
    BuiltEngine,
    BuiltPackage,
    build_engine,
    build_real,
    options,
)

from thor_dflash.builders.build import make_plan, material
from thor_dflash.builders.checkpoint.drafter import drafter_layout
from thor_dflash.builders.checkpoint.target import target_layout
from thor_dflash.builders.synthetic import QWEN36_27B, QWEN36_27B_DFLASH, SyntheticCheckpoint
from thor_dflash.builders.tensorrt.package import plan_engines
from thor_dflash.config.build import BuildConfig
from thor_dflash.config.tensorrt import TensorRTConfig


def build_wide(tmp: Path, layers: int, *, dense: bool) -> BuiltPackage:
    """Build the engines of the 27B's first layers; all of its engines and its drafter's, or, if
    `dense`, its prefill with TensorRT's own products.
    """
    config = BuildConfig(
        engine="tensorrt",
        tensorrt=TensorRTConfig(prefill_linears="tensorrt" if dense else "plugin"),
    )
    dims = replace(QWEN36_27B, layers=QWEN36_27B.layers[:layers])
    target = SyntheticCheckpoint(tmp, dims, target_layout(dims))
    drafter = None
    if not dense:
        of = QWEN36_27B_DFLASH
        drafter = SyntheticCheckpoint(tmp, of, drafter_layout(of))
    (tmp / "config.json").write_text("{}")
    plan = plan_engines(material(make_plan(target, drafter, config)))
    made = BuiltPackage(tmp)
    for one in plan.together:
        if not dense or one.graphs[0].products:
            made.engines[one.name] = build_engine(tmp, one, plan.constants)
    return made


def rows(model: str, engines: dict[str, BuiltEngine]) -> list[list[object]]:
    """Return a row of the table for each engine."""
    return [
        [
            f"{model}: {name}",
            round(one.seconds, 2),
            one.nbytes,
            len(one.layers),
            sum(layer.kind == "custom_layer" for layer in one.layers),
            len(one.together.graphs[0].products),
            len(one.together.ranges),
        ]
        for name, one in engines.items()
    ]


def main() -> None:
    """Build all, and print the tables as JSON."""
    head = ["engine", "build, s", "bytes", "layers", "plugins", "own FP4 products", "profiles"]
    table: list[list[object]] = [head]
    sums: list[list[object]] = [["build", "engines", "s", "peak memory, MiB", "plans, MB"]]
    for model in ("planner-nano", "27B, plugins", "27B, 8 layers, own products"):
        with tempfile.TemporaryDirectory() as name:
            tmp, start = Path(name), time.perf_counter()
            if model == "planner-nano":
                config = options(tmp)
                made = build_real(tmp / "p", NANO / "target", NANO / "drafter", config)
            else:
                dense = "own" in model
                made = build_wide(tmp, 8 if dense else 64, dense=dense)
            seconds = time.perf_counter() - start
            table += rows(model, made.engines)
            size = sum(one.nbytes for one in made.engines.values())
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
            sums.append([model, len(made.engines), round(seconds, 1), peak, round(size / 1e6, 1)])
    kinds = Counter(layer.kind for one in made.engines.values() for layer in one.layers)
    print(
        json.dumps(
            {"builds": sums, "engines": table, "kinds": [["type", "layers"], *kinds.items()]}
        )
    )


if __name__ == "__main__":
    main()
