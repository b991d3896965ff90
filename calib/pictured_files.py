"""Writes held-out tasks as files, each with two pictures that need different plans, to try a model
that sees on. Those of models/planner-nano-eyes/examples were written so:

python -m thor_dflash.calib.pictured_files --out models/planner-nano-eyes/examples --count 3

The text of a task is N.txt, its pictures are Na.png and Nb.png. Needs the extra `images`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from itertools import count as count_from
from itertools import islice
from pathlib import Path

from thor_dflash.calib.planbench.families import Rejected
from thor_dflash.calib.planbench.pictured import PicturedTask, rearranged, sample_pictured
from thor_dflash.calib.studies.script import count, run
from thor_dflash.core.extras import extra


def pairs() -> Iterator[tuple[PicturedTask, PicturedTask]]:
    """Held-out tasks, each with its picture and another one."""
    for seed in count_from(0):
        for family in ("tabletop", "household"):
            pictured = sample_pictured(family, seed, "heldout")
            try:
                yield pictured, rearranged(pictured)
            except Rejected:
                continue


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line and write the files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--count", type=count, default=3)
    args = parser.parse_args(argv)
    with extra("images"):
        from PIL import Image
    args.out.mkdir(parents=True, exist_ok=True)
    for number, pair in enumerate(islice(pairs(), args.count), 1):
        text = pair[0].task.messages[-1][1]
        (args.out / f"{number}.txt").write_text(text + "\n", encoding="utf-8")
        for which, pictured in zip("ab", pair, strict=True):
            Image.fromarray(pictured.drawn.rgb).save(args.out / f"{number}{which}.png")


if __name__ == "__main__":
    sys.exit(run(main))
