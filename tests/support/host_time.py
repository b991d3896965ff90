"""Measures the time that Python takes in a cycle of the loop, with a CUDA driver that does nothing:

    python tests/support/host_time.py

Runs planner-nano with its drafter on the CUDA engine over fake_cuda, which answers one token a
cycle. Prints microseconds per cycle: the least and the median of RUNS runs. The time of cuda-python
and of a real driver is not included.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]

from stand_ins.fake_driver import FakeCuda, fake
from support.planner_nano import package, request

from thor_dflash.config.engine import EngineConfig
from thor_dflash.core.progress import Silent
from thor_dflash.runtime.decoding.proposers import DflashDrafter
from thor_dflash.runtime.session import Session, open_session

WARM, CYCLES, RUNS = 10, 500, 7


def one_run(session: Session, device: FakeCuda) -> float:
    """Run WARM cycles, then CYCLES more; return microseconds per cycle of the latter."""
    chunks = (
        c for c in session.run(request(session, 0, WARM + CYCLES), DflashDrafter()) if c.tokens
    )
    for _ in range(WARM):
        next(chunks)
    start = time.perf_counter()
    count = sum(1 for _ in chunks)
    spent = time.perf_counter() - start
    device.sent.clear()
    device.calls.clear()
    return 1e6 * spent / count


def main() -> None:
    """Build a package, open it, measure, print."""
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        device = fake(patch)
        out = package(Path(folder) / "nano", engine="cuda")
        with closing(open_session(out, EngineConfig(), Silent())) as session:
            times = [one_run(session, device) for _ in range(RUNS)]
    print(f"{min(times):.0f} least, {statistics.median(times):.0f} median of {RUNS}, us a cycle")


if __name__ == "__main__":
    main()
