"""Times images on the 27B: the vision tower, and the time to the first token of a prompt with one.

    python tests/gpu/image_times.py

The weights are random. Milliseconds; medians of ROUNDS runs after a warm one. *Cold*: a picture
that was never sent. *Cached*: the same picture behind another text, so that the tower does not run
again. *Turn reused*: the next turn of the conversation, whose picture is read already. Predicted
on a Thor: the tower at THOR_TFLOPS, bytes of its weights and of a prefill step at the read rate.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from thor_dflash.calib.studies import script
from thor_dflash.cli.commands.replay import random_session
from thor_dflash.config.tree import Config
from thor_dflash.core.model_dims import PATCH_COLUMNS, TowerDims
from thor_dflash.core.progress import choose
from thor_dflash.package.manifest import encoder_name
from thor_dflash.runtime.decoding.proposers import DflashDrafter
from thor_dflash.runtime.engines.cuda.engine import CudaEngine
from thor_dflash.runtime.engines.cuda.graph_capture import Runner
from thor_dflash.runtime.measure.cuda_bench import CudaBench
from thor_dflash.runtime.session import Request, Session
from thor_dflash.runtime.session.turn_cache import Conversation
from thor_dflash.runtime.vision.picture import PatchGrid, Picture

ROUNDS = 7
SHAPE = "qwen3.6-27b"
CHUNK = 128
REUSE = 4 << 30
FRAMES = {"640 x 480": (640, 480), "1280 x 720": (1280, 704)}
"""Camera -> size after resizing."""
TEXT = 64
"""Tokens before the image, behind it, and of the next turn."""
THOR_TFLOPS = 55.0
"""Implied by the predicted prefill of 2,048 tokens in 1.8 s: see docs/performance/prefill.md."""


def flop(grid: PatchGrid, dims: TowerDims, out: int) -> float:
    """Floating-point operations of the tower for one image."""
    c, p = dims.hidden, grid.patches
    block = 2 * p * (4 * c * c + 2 * c * dims.intermediate) + 4 * p * p * c
    merger = 2 * grid.tokens * (16 * c * c + 4 * c * out)
    return dims.depth * block + merger + 2 * p * PATCH_COLUMNS * c


class Frames:
    """Pictures and texts, never one twice."""

    def __init__(self) -> None:
        self._rng = np.random.default_rng(0)

    def picture(self, width: int, height: int) -> Picture:
        return Picture(self._rng.integers(0, 256, (height, width, 3), dtype=np.uint8))

    def text(self) -> list[int]:
        return [int(i) for i in self._rng.integers(1000, 200_000, TEXT)]


def tower_ms(session: Session, picture: Picture) -> float:
    """Time of the tower's graph."""
    model = session.model
    assert isinstance(model.engine, CudaEngine)
    name = encoder_name(next(s for s in model.manifest.image_patches if s >= picture.grid.patches))
    before = model.engine.busy().get(name, 0.0)
    assert np.isfinite(model.encode(picture).astype(np.float32)).all()
    return 1e3 * (model.engine.busy()[name] - before)


def first_token_ms(session: Session, ids: list[int], picture: Picture) -> tuple[float, list[int]]:
    """Time to the first tokens, the picture's digest included, and the tokens."""
    start = time.perf_counter()
    images = session.images(ids, [picture])
    assert images is not None
    ends = Conversation(boundaries=((len(images.prompt), "prompt"),))
    request = Request(prompt=images.prompt, images=images, max_tokens=TEXT // 4, conversation=ends)
    spent, answer = 0.0, list[int]()
    for chunk in session.run(request, DflashDrafter()):
        answer += chunk.tokens
        spent = spent or bool(answer) * 1e3 * (time.perf_counter() - start)
    return spent, answer


def times(session: Session, frames: Frames, size: tuple[int, int]) -> tuple[float, ...]:
    """Milliseconds of the tower and to the first token: cold, cached, turn reused."""
    vision = session.manifest.vision
    assert vision is not None
    mark = [vision.image_token]
    found: list[tuple[float, ...]] = []
    for _ in range(ROUNDS + 1):
        picture = frames.picture(*size)
        tower = tower_ms(session, frames.picture(*size))
        cold, _ = first_token_ms(session, [*frames.text(), *mark, *frames.text()], picture)
        ids = [*frames.text(), *mark, *frames.text()]
        cached, answer = first_token_ms(session, ids, picture)
        reused, _ = first_token_ms(session, [*ids, *answer, *frames.text()], picture)
        found.append((tower, cold, cached, reused))
    return tuple(statistics.median(column) for column in zip(*found[1:], strict=True))


def rows(session: Session) -> Iterator[tuple[object, ...]]:
    """A row for each frame."""
    vision, frames = session.manifest.vision, Frames()
    assert vision is not None
    yield (
        "frame", "tokens", "tower", "TFLOP of it", "TFLOP/s", "first token, cold",
        "picture cached", "turn reused", "tower on a Thor, predicted",
    )  # fmt: skip
    for name, size in FRAMES.items():
        grid = frames.picture(*size).grid
        tower, *first = times(session, frames, size)
        work = flop(grid, vision.tower, session.manifest.target.hidden) / 1e12
        yield (name, grid.tokens, tower, work, 1e3 * work / tower, *first, 1e3 * work / THOR_TFLOPS)


def unchanged(session: Session) -> list[tuple[object, ...]]:
    """A verify of a package with a tower."""
    engine = session.model.engine
    assert isinstance(engine, CudaEngine)
    runner = Runner(engine.driver, Config().engine.cubins_directory)
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
