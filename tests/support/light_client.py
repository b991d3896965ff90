"""Measures what `pip install thor-dflash` brings and costs, in a fresh environment:

    python -m support.light_client WHEEL --json

in tests/. It prints sizes, the time to import the client, and that of `thor-dflash plan` with a
mock server in another process.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

from support.server_process import server

RUNS = 20
IMPORTS = {
    "import thor_dflash.serving.client": "import thor_dflash.serving.client",
    "import zmq, msgspec alone": "import zmq, msgspec",
    "python alone": "pass",
}


def median_ms(command: list[str]) -> tuple[float, float]:
    """Medians of a command's time from start to end: of the wall clock and of the processor."""
    walls: list[float] = []
    cpus: list[float] = []
    for _ in range(RUNS):
        wall, cpu = time.perf_counter(), cpu_s()
        subprocess.run(command, check=True, capture_output=True)
        walls.append(1e3 * (time.perf_counter() - wall))
        cpus.append(1e3 * (cpu_s() - cpu))
    return round(statistics.median(walls), 1), round(statistics.median(cpus), 1)


def cpu_s() -> float:
    """Processor time of the children so far."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("wheel")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory, server("--mock") as (endpoint, _):
        venv.create(directory, with_pip=True)
        bin = Path(directory, "bin")
        empty = installed(Path(directory))
        began = time.perf_counter()
        subprocess.run([bin / "pip", "install", "-q", args.wheel], check=True, stdout=sys.stderr)
        took = time.perf_counter() - began
        size = installed(Path(directory)) - empty
        rows: list[list[object]] = [["what", "wall clock", "processor"]]
        for name, code in IMPORTS.items():
            rows.append([f"{name}, ms", *median_ms([str(bin / "python"), "-c", code])])
        plan = [str(bin / "thor-dflash"), "plan", "x", "--server", endpoint]
        rows.append(["thor-dflash plan, mock without delay, ms", *median_ms(plan)])
        rows.append(["installed with its dependencies, MB", round(size / 1e6, 1), ""])
        rows.append(["pip install with a warm cache, s", round(took, 1), ""])
    print(json.dumps({"light client": rows}))


def installed(directory: Path) -> int:
    """Bytes of all files."""
    return sum(p.stat().st_size for p in directory.rglob("*") if p.is_file() and not p.is_symlink())


if __name__ == "__main__":
    main()
