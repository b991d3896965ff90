"""The machine that the doctor examines. Queries that could hang run in a child process."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from thor_dflash.core import strict_records
from thor_dflash.core.errors import EngineError
from thor_dflash.plugins.cuda.compile import ENDING
from thor_dflash.runtime.doctor import probe
from thor_dflash.runtime.doctor.facts import CommandOutput, Cuda, Nvrtc, TensorRT

T = TypeVar("T", Cuda, Nvrtc, TensorRT)
COMMAND_SECONDS = 5.0
PROBE_SECONDS = 60.0
"""Time limit of a query. A driver that wakes a sleeping board takes seconds, and so does importing
TensorRT."""
LARGEST = 1 << 20
"""Maximum bytes read of a command's output."""


@dataclass(frozen=True, slots=True)
class LocalMachine:
    """Everything the doctor needs of this machine. No method hangs or raises."""

    root: Path = Path("/")
    probe_seconds: float = PROBE_SECONDS

    @property
    def python(self) -> tuple[int, int]:
        """Version of the interpreter."""
        return sys.version_info.major, sys.version_info.minor

    @property
    def processor(self) -> str:
        """ "x86_64", "aarch64"."""
        return platform.machine()

    def version(self, distribution: str) -> str:
        """Version of an installed distribution, or ""."""
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            return ""

    def text(self, path: str) -> str:
        """Contents of a small file, or ""."""
        try:
            return (self.root / path).read_text(encoding="utf-8", errors="replace").strip("\0\n ")
        except OSError:
            return ""

    def paths(self, pattern: str) -> Sequence[str]:
        """Files that match a glob, sorted."""
        found = sorted(self.root.glob(pattern))
        return [path.relative_to(self.root).as_posix() for path in found]

    def run(self, *command: str) -> CommandOutput:
        """Run a command for a few seconds at most."""
        return _run([*command], COMMAND_SECONDS)

    def space(self, directory: str) -> int:
        """Bytes free where a directory is or would be made; -1 if that is not writable."""
        try:
            path = Path(directory).expanduser()
            while not path.exists() and path != path.parent:
                path = path.parent
            return shutil.disk_usage(path).free if os.access(path, os.W_OK) else -1
        except (OSError, RuntimeError):  # no permission to look, or no home to expand
            return -1

    def kernels(self, directory: str) -> int:
        """Compiled kernels that a directory holds; -1 if it is none or closed."""
        try:
            path = Path(directory).expanduser()
            held = sum(name.endswith(ENDING) for name in os.listdir(path))
        except FileNotFoundError:
            return 0
        except (OSError, RuntimeError):
            return -1
        return held

    def cuda(self) -> Cuda:
        """Query the CUDA driver."""
        return self._probe(Cuda, "cuda")

    def nvrtc(self, arch: str, device: int) -> Nvrtc:
        """Compile a kernel for `arch`, and load it on a device unless that is -1."""
        return self._probe(Nvrtc, "nvrtc", arch, str(device))

    def tensorrt(self) -> TensorRT:
        """Import TensorRT and query its versions."""
        return self._probe(TensorRT, "tensorrt")

    def _probe(self, kind: type[T], query: str, *more: str) -> T:
        words: list[str] = probe.arguments(query, more, sys.path)
        output = _run([sys.executable, *words], self.probe_seconds)
        last = output.text.strip().rpartition("\n")[2]
        try:
            # A library may crash the child during its clean-up; the reply before that counts.
            return strict_records.decode(kind, json.loads(last), "", EngineError)
        except (ValueError, EngineError):
            ending = (
                f"no answer within {self.probe_seconds:.0f} s"
                if output.code is None
                else f"its process ended with status {output.code}"
            )
            return kind(error=f"{ending} ({last[-200:] or 'no output'})")


def _run(command: list[str], seconds: float) -> CommandOutput:
    # Output goes to a file: a grandchild that keeps a pipe open would keep its reader waiting. The
    # file is in memory, as disks may be full.
    with open(os.memfd_create("output"), "w+b") as file:
        try:
            child = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT
            )
        except OSError as e:
            return CommandOutput(None, str(e))
        try:
            code: int | None = child.wait(seconds)
        except subprocess.TimeoutExpired:
            # Do not wait for it: a process stuck inside a driver does not end when killed.
            child.kill()
            code = None
        file.seek(0)
        return CommandOutput(code, file.read(LARGEST).decode(errors="replace"))
