"""Builds the 27B's engines with the recorder, from a checkpoint without contents. A script, because
the peak memory of its process is measured.

    python tests/support/trt_synthetic_27b.py DIRECTORY plugin|tensorrt

Prints counts and sizes of what was built, as JSON.
"""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from stand_ins import trt_parser as parser
from stand_ins import trt_recorder as recorder
from support.trt_builds import maker, recording

from thor_dflash.builders.build import make_plan, material
from thor_dflash.builders.checkpoint.drafter import drafter_layout
from thor_dflash.builders.checkpoint.target import target_layout
from thor_dflash.builders.synthetic import QWEN36_27B, QWEN36_27B_DFLASH, SyntheticCheckpoint
from thor_dflash.builders.tensorrt.package import plan_engines, write_engines
from thor_dflash.config.build import BuildConfig
from thor_dflash.config.tensorrt import TensorRTConfig
from thor_dflash.core.progress import Silent
from thor_dflash.package.manifest import FileEntry, hash_file


class Folder:
    """Writes files straight into a directory, in place of an AtomicPackage."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def write(self, name: str, writer: Callable[[Path], None]) -> FileEntry:
        writer(self._directory / name)
        return hash_file(self._directory / name)


def main(directory: Path, prefill: str) -> None:
    section = TensorRTConfig(timings=str(directory / "t"), prefill_linears=prefill)  # type: ignore[arg-type]
    config = BuildConfig(engine="tensorrt", tensorrt=section, capacity=32768)
    plan = make_plan(
        SyntheticCheckpoint(directory, QWEN36_27B, target_layout(QWEN36_27B)),
        SyntheticCheckpoint(directory, QWEN36_27B_DFLASH, drafter_layout(QWEN36_27B_DFLASH)),
        config,
    )
    made = replace(plan_engines(material(plan)), synthetic=True)
    parser.BEGINNING = 0  # weights are holes in a sparse file: their first read takes milliseconds
    with recording():
        write_engines(Folder(directory), made, maker(section, Silent()), Silent())
    weights = {n: w for one in made.together for g in one.graphs for n, w in g.weights.items()}
    report = {
        "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "layers": {b.network.name: len(b.network.layers) for b in recorder.BUILT},
        "profiles": {b.network.name: len(b.config.profiles) for b in recorder.BUILT},
        "inputs": {b.network.name: b.network.num_inputs for b in recorder.BUILT},
        "constants": {b.network.name: sum(b.network.initializers.values()) for b in recorder.BUILT},
        "workspace": {b.network.name: max(b.workspaces.values()) for b in recorder.BUILT},
        "weights": sum(w.nbytes for w in weights.values()),
        "by_engine": {
            one.name: sum(w.nbytes for w in one.graphs[0].weights.values()) for one in made.together
        },
        "plans": sum(p.stat().st_size for p in directory.glob("*.plan*")),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
