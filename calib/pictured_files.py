"""Writes held-out tasks with pictures as files, to try a model that sees on.

python -m thor_dflash.calib.pictured_files --out DIR --count 3

The text of a task is N.txt, its picture N.png. Needs Pillow, of the extra `images`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from thor_dflash.calib.planbench.pictured import heldout_pictured
from thor_dflash.calib.studies.script import count, run
from thor_dflash.core.extras import extra


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line and write the files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--count", type=count, default=3)
    args = parser.parse_args(argv)
    with extra("images"):
        from PIL import Image
    args.out.mkdir(parents=True, exist_ok=True)
    for number, pictured in enumerate(heldout_pictured(args.count)):
        text = pictured.task.messages[-1][1]
        (args.out / f"{number}.txt").write_text(text + "\n", encoding="utf-8")
        Image.fromarray(pictured.drawn.rgb).save(args.out / f"{number}.png")


if __name__ == "__main__":
    sys.exit(run(main))
