"""Runs a command that prints JSON and stores it as a raw result of docs/performance.

    python docs/performance/record.py NAME [--commit ID] [--out DIR] -- COMMAND...

The result is NAME.json in results/ or DIR, with date, machine, clocks, versions, commit and
command. NAME is a kind (bench, startup, heldout, ...), or a kind and a label ("bench-2"). The JSON
is a list of figures, as `thor-dflash bench --json` prints them, or an object: name -> table, whose
first row is its header.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"
PACKAGES = ("numpy", "onnx", "onnxruntime", "tokenizers", "llguidance", "pyzmq", "msgspec",
            "uvicorn", "cuda-bindings", "nvidia-cuda-nvrtc",
            "tensorrt-rtx-cu13-bindings")  # fmt: skip


def output(*command: str) -> str:
    """What a command prints; empty if it cannot run."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def machine() -> dict[str, str]:
    """The processor and, if there is one, the NVIDIA device with its driver and clocks."""
    info = Path("/proc/cpuinfo")
    text = info.read_text(encoding="utf-8") if info.is_file() else ""
    model = re.search(r"^model name\s*: (.*)$", text, re.M)
    name = model[1] if model else platform.machine()
    found = {"cpu": f"{os.cpu_count()} cores, {name}", "system": platform.platform()}
    query = "name,driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.limit"
    line = output("nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader").partition("\n")[0]
    if line:
        gpu, driver, now, most, memory, power = line.split(", ")
        clocks = f"SM {now} of at most {most}, memory {memory}, power limit {power}"
        found |= {"gpu": gpu, "driver": driver, "clocks": clocks}
    return found


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that matter to a measurement."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def record(name: str, commit: str, out: Path, command: Sequence[str]) -> int:
    """Run a command and store what it prints; its exit status."""
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        return done.returncode
    found: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": machine(),
        "versions": versions(),
        "commit": commit or output("git", "rev-parse", "--short", "HEAD"),
        "command": shlex.join(command),
        "data": json.loads(done.stdout),
    }
    out.mkdir(exist_ok=True)
    text = json.dumps(found, indent=1, ensure_ascii=False, allow_nan=False)
    (out / f"{name}.json").write_text(text + "\n", encoding="utf-8")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and store its result."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("name")
    parser.add_argument("--commit", default="", help="where the checkout has no git history")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="DIR")
    parser.add_argument("command", nargs="+")
    args = parser.parse_args(argv)
    return record(args.name, args.commit, args.out, args.command)


if __name__ == "__main__":
    sys.exit(main())
