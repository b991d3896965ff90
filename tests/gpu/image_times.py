"""Times images on the 27B: the vision tower, and the time to the first token of a prompt with one.

    python tests/gpu/image_times.py

The weights are random. Milliseconds; what is measured is in thor_dflash/runtime/measure/
image_bench.py, as for `bench --image`. Predicted on a Thor: the tower at THOR_TFLOPS.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from thor_dflash.calib.studies import script
from thor_dflash.cli.commands.bench import random_session
from thor_dflash.config.tree import Config
from thor_dflash.core.progress import choose
from thor_dflash.runtime.engines.cuda.engine import CudaEngine
from thor_dflash.runtime.engines.cuda.launch_runner import LaunchRunner
from thor_dflash.runtime.measure.cuda_bench import CudaBench
from thor_dflash.runtime.measure.image_bench import REUSE, THOR_TFLOPS, measure_image
from thor_dflash.runtime.session import Session

SHAPE = "qwen3.6-27b"
CHUNK = 128
CAMERAS = {"640 x 480": (640, 480), "1280 x 720": (1280, 704)}
"""Camera -> size after resizing, which needs Pillow."""


def rows(session: Session) -> Iterator[tuple[object, ...]]:
    """A row for each frame."""
    yield (
        "frame", "tokens", "tower", "TFLOP of it", "TFLOP/s", "first token, cold",
        "picture cached", "turn reused", "tower on a Thor, predicted",
    )  # fmt: skip
    for name, size in CAMERAS.items():
        found = measure_image(session, size)
        work, t = found.tflop, found.times
        rate, thor = 1e3 * work / t.tower, 1e3 * work / THOR_TFLOPS
        yield (name, found.grid.tokens, t.tower, work, rate, t.cold, t.cached,
               t.reused, thor)  # fmt: skip


def unchanged(session: Session) -> list[tuple[object, ...]]:
    """A verify of a package with a tower."""
    engine = session.model.engine
    assert isinstance(engine, CudaEngine)
    runner = LaunchRunner(engine.driver, Config().engine.cubins_directory)
    bench = CudaBench(engine, session.model, runner, {}, 0)
    return [("step", "ms"), ("verify, with a tower", bench.steps(["verify"]).median)]


def main(arguments: list[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--json", action="store_true", help="print the table as JSON")
    args = parser.parse_args(arguments)
    reporter = choose(sys.stderr)
    config = Config()
    build = dataclasses.replace(config.build, vision="on")
    config = dataclasses.replace(
        config, build=build, engine=dataclasses.replace(config.engine, chunk=CHUNK)
    )
    with random_session(SHAPE, None, config, REUSE, reporter) as session:
        found = [("images", list(rows(session))), ("unchanged", unchanged(session))]
    reporter.close()
    script.show(found, as_json=args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
