"""Rehearses a large model from its BF16 weights to an answer: synth, quantize (with ten kills, on
the CPU and on the GPU), build, generate. The weights are random: sizes and times are a model's.

    python tests/gpu/rehearse.py --work DIR [--shape qwen3.6-27b] [--layers 48] [--engine cuda] \\
        [--seconds 540] [PART ...]

Parts, in order: disk synth quantize kills gpu build ready generate report. Without any, all that
are not done. Each is noted in DIR/rehearsal.json when it has ended. One that `--seconds` cuts short
is continued by the same command, which exits with 3 until all is done: so it fits machines that
give a command ten minutes. `build` first removes the BF16 checkpoint, so the most disk is BF16 and
NVFP4: 42 + 17 GB for 48 layers, 54 + 22 GB for 64. `report` prints figures as
docs/performance/record.py wants them.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "thor_dflash.cli.main"]
KILLS = 10
STARTING = 0.5
"""Seconds until a process has imported what it needs."""
PROBE = 2 << 30
"""Bytes written and read to measure the disk."""
PIECE = 1 << 24
LOOK = 0.1
"""Seconds from one look at the memory of a command to the next."""
AGAIN = 3
"""Exit status: the same command continues."""


class OutOfTime(Exception):
    """The command was interrupted, to continue later."""


@dataclass(slots=True)
class Child:
    """What one run of a command needed."""

    seconds: float
    peak: int
    """Most resident memory of its processes together, bytes, as LOOK finds it; a page that several
    hold counts once.
    """
    anonymous: int
    """The same without pages of files, which the system can take back."""
    status: int


@dataclass(slots=True)
class Rehearsal:
    args: argparse.Namespace
    end: float
    done: dict[str, Any] = field(default_factory=dict)

    @property
    def notes(self) -> Path:
        return self.args.work / "rehearsal.json"

    @property
    def paths(self) -> dict[str, Path]:
        names = ("bf16", "nvfp4", "again", "drafter", "drafter-nvfp4", "package")
        return {name: self.args.work / name for name in names}

    def note(self, part: str, found: dict[str, Any]) -> None:
        self.done[part] = found
        beside = self.notes.with_suffix(".partial")
        beside.write_text(json.dumps(self.done, indent=1))
        beside.replace(self.notes)
        print(f"{part}: {json.dumps(found)}", file=sys.stderr, flush=True)

    def run(self, *arguments: str | Path, kill_after: float = 0.0) -> Child:
        """Run the command line to its end, or kill it after so many seconds.

        Raises: OutOfTime when the time is over: the command was interrupted.
        """
        start = time.monotonic()
        left = self.end - start
        wait = min(kill_after or left, left)
        with (self.args.work / "stdout").open("wb") as printed:
            command = [*COMMAND, *map(str, arguments)]
            process = subprocess.Popen(command, cwd=ROOT, stdout=printed)
        ended, status, peak, anonymous, look = 0, 0, 0, 0, start
        while not ended and time.monotonic() - start < wait:
            if time.monotonic() >= look:
                together = [memory(pid) for pid in family(process.pid)]
                peak = max(peak, sum(every for every, _ in together))
                anonymous = max(anonymous, sum(own for _, own in together))
                look = time.monotonic() + LOOK
            ended, status = os.waitpid(process.pid, os.WNOHANG)
            time.sleep(0.02)
        if not ended:
            out_of_time = wait == left
            process.send_signal(signal.SIGINT if out_of_time else signal.SIGKILL)
            _, status = os.waitpid(process.pid, 0)
            if out_of_time:
                raise OutOfTime
        process.returncode = os.waitstatus_to_exitcode(status)
        return Child(time.monotonic() - start, peak, anonymous, process.returncode)

    def must(self, *arguments: str | Path) -> dict[str, Any]:
        """Run a command that must succeed; return its figures, of all its runs if it was
        interrupted.
        """
        key, start = " ".join(map(str, arguments)), time.monotonic()
        before = self.done.setdefault("interrupted", {}).get(key, 0.0)
        try:
            made = self.run(*arguments)
        except OutOfTime:
            spent = round(before + time.monotonic() - start, 2)
            self.note("interrupted", {**self.done["interrupted"], key: spent})
            raise
        if made.status:
            sys.exit(f"{arguments[0]} ended with {made.status}")
        self.done["interrupted"].pop(key, None)
        return {
            "seconds": round(before + made.seconds, 2), "peak_bytes": made.peak,
            "peak_without_files_bytes": made.anonymous,
        }  # fmt: skip

    # ---- parts
    def disk(self) -> None:
        path = self.args.work / "probe"
        data = os.urandom(PIECE)
        size = min(PROBE, shutil.disk_usage(self.args.work).free // 4)
        start = time.monotonic()
        with path.open("wb") as file:
            for _ in range(size // PIECE):
                file.write(data)
            file.flush()
            os.fsync(file.fileno())
            wrote = time.monotonic() - start
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        start = time.monotonic()
        with path.open("rb", buffering=0) as file:
            while file.read(PIECE):
                pass
        read = time.monotonic() - start
        path.unlink()
        self.note("disk", {"write_gb_s": size / wrote / 1e9, "read_gb_s": size / read / 1e9})

    def synth(self) -> None:
        shape = ["--shape", self.args.shape]
        shape += ["--layers", str(self.args.layers)] if self.args.layers else []
        found: dict[str, Any] = {"resumed": (self.args.work / ".bf16.partial").exists()}
        # The drafter first: it is small, and refuses too few layers.
        if self.args.drafter and not self.paths["drafter"].exists():
            self.must("synth", *shape, "--drafter", "--out", self.paths["drafter"])
        if not self.paths["bf16"].exists():
            found |= self.must("synth", *shape, "--out", self.paths["bf16"])
        self.note("synth", {**found, "bytes": size_of(self.paths["bf16"])})

    def quantize(self) -> None:
        resumed = (self.args.work / ".nvfp4.partial").exists()
        made = self.must(*self._quantize("nvfp4"))
        if self.args.drafter and not self.paths["drafter-nvfp4"].exists():
            self.must(
                "quantize", "--drafter", self.paths["drafter"], "--out",
                self.paths["drafter-nvfp4"],
            )  # fmt: skip
        read, wrote = size_of(self.paths["bf16"]), size_of(self.paths["nvfp4"])
        self.note("quantize", {
            **made, "resumed": resumed, "read_bytes": read, "written_bytes": wrote,
            "gb_s": (read + wrote) / made["seconds"] / 1e9, "hashes": hashes(self.paths["nvfp4"]),
        })  # fmt: skip

    def _quantize(self, out: str, *more: str) -> list[str | Path]:
        source, made = self.paths["bf16"], self.paths[out]
        method = ["--method", self.args.method]
        return ["quantize", "--target", source, "--out", made, *method, *more]

    def kills(self) -> None:
        """Kill ten runs at random moments, finish, compare. The first result is removed before: its
        hashes are known.
        """
        shutil.rmtree(self.paths["nvfp4"], ignore_errors=True)
        whole = self.done["quantize"]["seconds"]
        killed = self.done.get("killed", [])
        while len(killed) < KILLS:
            moment = STARTING + random.uniform(0.05, 1.5) * whole / KILLS
            if self.end - time.monotonic() < moment + 5:
                raise OutOfTime
            made = self.run(*self._quantize("nvfp4"), kill_after=moment)
            if made.status == 0:  # it was faster than the clock
                break
            killed.append(round(moment, 2))
            self.note("killed", killed)
        if not self.paths["nvfp4"].exists():
            self.must(*self._quantize("nvfp4"))
        same = hashes(self.paths["nvfp4"]) == self.done["quantize"]["hashes"]
        self.note("kills", {"killed_after": killed, "same_bytes": same})

    def gpu(self) -> None:
        """The same on the GPU, in place of the result so far."""
        if self.args.engine != "cuda":
            self.note("gpu", {"same_bytes": None})
            return
        shutil.rmtree(self.paths["nvfp4"], ignore_errors=True)
        made = self.must(*self._quantize("nvfp4", "--device", "cuda"))
        same = hashes(self.paths["nvfp4"]) == self.done["quantize"]["hashes"]
        moved = self.done["quantize"]["read_bytes"] + self.done["quantize"]["written_bytes"]
        rate = moved / made["seconds"] / 1e9
        searched = self.must(
            "quantize", "--target", self.paths["bf16"], "--out", self.paths["again"], "--method",
            "mse", "--device", "cuda",
        )  # fmt: skip
        shutil.rmtree(self.paths["again"])
        self.note(
            "gpu", {**made, "gb_s": rate, "same_bytes": same, "mse_seconds": searched["seconds"]}
        )

    def build(self) -> None:
        shutil.rmtree(self.paths["bf16"], ignore_errors=True)
        drafter: list[str | Path] = []
        if self.args.drafter:
            drafter = ["--drafter", self.paths["drafter-nvfp4"]]
        made = self.must(
            "build", "--engine", self.args.engine, "--target", self.paths["nvfp4"], *drafter,
            "--out", self.paths["package"], "--force",
        )  # fmt: skip
        self.note("build", {**made, "bytes": size_of(self.paths["package"])})

    def ready(self) -> None:
        if self.args.engine != "cuda":  # bench measures this engine alone
            self.note("ready", {"figures": []})
            return
        command = [*COMMAND, "bench", "--package", str(self.paths["package"]), "--ready", "--json"]
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
        self.note("ready", {"figures": json.loads(done.stdout)})

    def generate(self) -> None:
        tokens = self.args.work / "tokens.json"
        tokens.write_text(json.dumps(list(range(1000, 1064))))
        made = self.must(
            "generate", "--package", self.paths["package"], "--tokens", tokens, "--max-tokens",
            "64", "--ignore-eos", "--json",
        )  # fmt: skip
        answer = json.loads((self.args.work / "stdout").read_text())
        found = {name: answer["usage"][name] for name in ("prompt_tokens", "output_tokens")}
        found |= {name: answer["timings"][name] for name in ("prefill_ms", "tok_s")}
        self.note("generate", {**made, **found})

    def report(self) -> None:
        layers = self.args.layers or "all"
        rows: list[list[Any]] = [["part", "figure", "value"]]
        rows += [["model", "shape", f"{self.args.shape}, {layers} layers"]]
        rows += [["model", "method", self.args.method]]
        for part in PARTS:
            found = self.done.get(part, {})
            rows += [[part, *shown(name, x)] for name, x in found.items() if name not in APART]
            for figure in found.get("figures", ()):
                rows.append([part, f"{figure['name']}, {figure['unit']}", figure["value"]])
        print(json.dumps({"rehearsal": rows}))


APART = ("hashes", "figures")
"""Notes that are no figures of the report."""


def shown(name: str, value: Any) -> list[Any]:
    """A figure with its unit."""
    if isinstance(value, list):
        return [f"{name}, s", ", ".join(map(str, value))]
    if name.endswith("bytes") and type(value) is int:
        kind = name.removesuffix("bytes").removesuffix("_").replace("_", " ") or "size"
        return [f"{kind}, GB", round(value / 1e9, 2)]
    return [name.replace("gb_s", "GB/s").replace("tok_s", "tok/s").replace("_", " "), value]


PARTS: dict[str, Callable[[Rehearsal], None]] = {
    "disk": Rehearsal.disk, "synth": Rehearsal.synth, "quantize": Rehearsal.quantize,
    "kills": Rehearsal.kills, "gpu": Rehearsal.gpu, "build": Rehearsal.build,
    "ready": Rehearsal.ready, "generate": Rehearsal.generate, "report": Rehearsal.report,
}  # fmt: skip


def family(pid: int) -> list[int]:
    """A process and all that it started, directly or not."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            parent = int(path.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(path.parent.name))
    found = [pid]
    for one in found:
        found += children.get(one, [])
    return found


def memory(pid: int) -> tuple[int, int]:
    """Resident bytes of a process, and how many of them are no file's; pages that it shares with
    others are divided among them.
    """
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:  # it has ended
        return 0, 0
    sizes = {name: int(kib) << 10 for name, kib in re.findall(r"^(\w+): +(\d+) kB$", text, re.M)}
    return sizes["Pss"], sizes["Pss"] - sizes["Pss_File"]


def size_of(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def hashes(directory: Path) -> dict[str, str]:
    found: dict[str, str] = {}
    for path in sorted(directory.iterdir()):
        with path.open("rb") as file:
            found[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--work", type=Path, required=True, metavar="DIR")
    parser.add_argument("--shape", default="qwen3.6-27b")
    parser.add_argument("--layers", type=int, default=0)
    parser.add_argument("--engine", choices=("cuda", "ort"), default="cuda")
    parser.add_argument("--method", choices=("rtn", "mse"), default="mse")
    parser.add_argument("--no-drafter", dest="drafter", action="store_false")
    parser.add_argument("--seconds", type=float, default=540)
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS])
    args = parser.parse_args(arguments)
    args.work.mkdir(parents=True, exist_ok=True)
    run = Rehearsal(args, time.monotonic() + args.seconds)
    if run.notes.exists():
        run.done = json.loads(run.notes.read_text())
    parts = args.parts or [part for part in PARTS if part not in run.done]
    try:
        for part in parts:
            PARTS[part](run)
    except OutOfTime:
        print("out of time: the same command continues", file=sys.stderr)
        return AGAIN
    return 0


if __name__ == "__main__":
    sys.exit(main())
