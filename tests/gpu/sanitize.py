"""Runs short requests of planner-nano with each of its drafters, greedy and drawn, a prefill step
of each size, and a prompt with images of a small random model, to be run by a sanitizer.

    compute-sanitizer --tool memcheck python tests/gpu/sanitize.py
    compute-sanitizer --tool racecheck python tests/gpu/sanitize.py

Kernels are launched one by one and do not overlap, so that the tools can name the kernel. With
--graph they run as in production, as one graph. The exit status is 0 if there were answers and
drafts.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]

from support.checkpoints import write_drafter, write_target
from support.engine_pair import DRAFTER, SEEING, built
from support.planner_nano import package, request

from thor_dflash.config.decode import SamplingConfig
from thor_dflash.config.engine import EngineConfig
from thor_dflash.core.progress import Silent
from thor_dflash.runtime.decoding.proposers import DflashDrafter
from thor_dflash.runtime.session import Request, Session, open_session
from thor_dflash.runtime.vision.picture import Picture

DRAWN = SamplingConfig(temperature=1.0, top_k=20, top_p=0.95, min_p=0.01, seed=1)
LAWS = (SamplingConfig(), DRAWN, replace(DRAWN, acceptance="rejection"))


def answered(session: Session, asked: Request) -> bool:
    """Whether there were an answer and drafts."""
    answer = [t for chunk in session.run(asked, DflashDrafter()) for t in chunk.tokens]
    drafted = session.report().spec.drafted
    print(f"{len(asked.prompt)} prompt tokens, answer {answer}, {drafted} drafted", flush=True)
    return bool(answer and drafted)


def planner(session: Session, tokens: int) -> bool:
    """Requests, and a prefill step of each size."""
    asked = request(session, 0, tokens)
    good = [answered(session, replace(asked, sampling=law)) for law in LAWS]
    model = session.model
    for rows in model.step_sizes:
        part = (asked.prompt * 4)[:rows]
        assert model.step_rows(len(part)) == rows
        model.state.reset()
        model.prefill(part, observe=True)
    return all(good)


def images(session: Session, tokens: int) -> bool:
    """A prompt with two images."""
    rng = np.random.default_rng(4)
    shown = [
        Picture(rng.integers(0, 256, (16 * rows, 16 * columns, 3), dtype=np.uint8))
        for rows, columns in ((6, 8), (4, 10))
    ]
    placed = session.images([1, 2, 240, 241, 242, 3, 240, 241, 242, 4], shown)
    assert placed is not None
    return answered(session, Request(prompt=placed.prompt, images=placed, max_tokens=tokens))


def main() -> int:
    """Build the packages and run them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--tokens", type=int, default=24, help="longest answer")
    parser.add_argument("--graph", action="store_true", help="as one graph, kernels overlapping")
    parser.add_argument("--saves", choices=("records", "states"), default="records")
    args = parser.parse_args()
    config = EngineConfig(graphs=args.graph, overlap=args.graph)
    good: list[bool] = []
    with tempfile.TemporaryDirectory() as folder:
        for drafter in ("drafter", "drafter2"):
            out = Path(folder) / drafter
            package(out, drafter, engine="cuda", saves=args.saves, chunk=0)
            with closing(open_session(out, config, Silent())) as session:
                good.append(planner(session, args.tokens))
        root = Path(folder) / "images"
        write_target(root / "target", SEEING, 3, "mixed")
        write_drafter(root / "drafter", SEEING, DRAFTER, 4, "modelopt")
        with closing(open_session(built(root, "cuda"), config, Silent())) as session:
            good.append(images(session, args.tokens))
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
