"""Runs a short request of planner-nano and a prefill step of each size, to be run by a sanitizer.

    compute-sanitizer --tool memcheck python tests/gpu/sanitize.py
    compute-sanitizer --tool racecheck python tests/gpu/sanitize.py

Kernels are launched one by one and do not overlap, so that the tools can name the kernel. With
--graph they run as in production, as one graph. The exit status is 0 if there were an answer and
drafts.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from contextlib import closing
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]

from support.planner_nano import package, request

from thor_dflash.config.engine import EngineConfig
from thor_dflash.core.progress import Silent
from thor_dflash.runtime.decoding.proposers import DflashDrafter
from thor_dflash.runtime.session import open_session


def main() -> int:
    """Build a package, answer a request, run a prefill step of each size."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--tokens", type=int, default=24, help="longest answer")
    parser.add_argument("--graph", action="store_true", help="as one graph, kernels overlapping")
    parser.add_argument("--saves", choices=("records", "states"), default="records")
    args = parser.parse_args()
    config = EngineConfig(graphs=args.graph, overlap=args.graph)
    with tempfile.TemporaryDirectory() as folder:
        out = package(Path(folder) / "nano", engine="cuda", saves=args.saves, chunk=0)
        with closing(open_session(out, config, Silent())) as session:
            asked = request(session, 0, args.tokens)
            answer = [t for chunk in session.run(asked, DflashDrafter()) for t in chunk.tokens]
            drafted = session.report().spec.drafted
            model = session.model
            for rows in model.step_sizes:
                part = (asked.prompt * 4)[:rows]
                assert model.step_rows(len(part)) == rows
                model.state.reset()
                model.prefill(part, observe=True)
    print(f"{len(asked.prompt)} prompt tokens, answer {answer}, {drafted} drafted")
    return 0 if answer and drafted else 1


if __name__ == "__main__":
    sys.exit(main())
