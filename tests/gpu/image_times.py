"""Times the vision tower of the 27B, and the prefill of the rows that it makes.

    python tests/gpu/image_times.py

The weights are random. Milliseconds on the GPU; medians of ROUNDS runs after a warm one.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from support.full_size import opened

from thor_dflash.calib.studies import script
from thor_dflash.core.model_dims import PATCH_COLUMNS, TowerDims
from thor_dflash.core.progress import choose
from thor_dflash.package.manifest import encoder_name
from thor_dflash.runtime.measure.cuda_bench import CudaBench
from thor_dflash.runtime.vision.picture import PatchGrid, Picture

ROUNDS = 9
SHAPE = "qwen3.6-27b"
FRAMES = {"640 x 480": (640, 480), "1280 x 720": (1280, 704)}
"""Camera -> size after resizing."""


def flop(grid: PatchGrid, dims: TowerDims, out: int) -> float:
    """Floating-point operations of the tower for one image."""
    c, p = dims.hidden, grid.patches
    block = 2 * p * (4 * c * c + 2 * c * dims.intermediate) + 4 * p * p * c
    merger = 2 * grid.tokens * (16 * c * c + 4 * c * out)
    return dims.depth * block + merger + 2 * p * PATCH_COLUMNS * c


def encode_ms(bench: CudaBench, picture: Picture) -> float:
    """Median time of the tower's graph."""
    engine, times = bench.engine, list[float]()
    size = next(s for s in bench.model.manifest.image_patches if s >= picture.grid.patches)
    for _ in range(ROUNDS + 1):
        before = engine.busy().get(encoder_name(size), 0.0)
        rows = bench.model.encode(picture)
        assert np.isfinite(rows.astype(np.float32)).all()
        times.append(1e3 * (engine.busy()[encoder_name(size)] - before))
    return statistics.median(times[1:])


def measure(bench: CudaBench) -> list[tuple[object, ...]]:
    """A row for each frame."""
    manifest, rng = bench.model.manifest, np.random.default_rng(0)
    assert manifest.vision is not None
    rows: list[tuple[object, ...]] = [
        ("frame", "tokens", "tower, ms", "TFLOP", "TFLOP/s", "prefill of its rows, ms")
    ]
    for name, (width, height) in FRAMES.items():
        picture = Picture(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))
        grid = picture.grid
        ms, work = encode_ms(bench, picture), flop(grid, manifest.vision.tower, 5120) / 1e12
        read = 1e3 * bench.prefill(grid.tokens)
        rows.append((name, grid.tokens, round(ms, 3), round(work, 3), round(1e3 * work / ms, 1),
                     round(read, 2)))  # fmt: skip
    return rows


def main(arguments: list[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--json", action="store_true", help="print the table as JSON")
    args = parser.parse_args(arguments)
    reporter = choose(sys.stderr)
    with opened(SHAPE, True, reporter, vision=True) as bench:
        rows = measure(bench)
        same = [("step", "ms"), ("verify, with a tower", bench.steps(["verify"]).median)]
    reporter.close()
    script.show([("images", rows), ("unchanged", same)], as_json=args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
