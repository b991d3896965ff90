"""Resource usage of compiled kernels, cached by the text of their sources."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from pathlib import Path

from emulator.compiler import cached

from thor_dflash.plugins.cuda.compile import compile_source, digest

_USAGE = re.compile(
    r"Compiling entry function '(?P<name>\w+)'.*?"
    r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, "
    r"(?P<loads>\d+) bytes spill loads.*?Used (?P<registers>\d+) registers"
    r"(?:.*?(?P<shared>\d+) bytes smem)?",
    re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class KernelUsage:
    """What ptxas reports about one kernel."""

    registers: int
    """Per thread."""
    spilled: int
    """Bytes stored to and loaded from local memory because registers ran out."""
    shared: int
    """Static shared memory, bytes."""


def reported(log: str) -> dict[str, KernelUsage]:
    """Kernel -> usage, from the compiler's log."""
    found: dict[str, KernelUsage] = {}
    for part in re.split(r"(?=ptxas info\s*: Compiling entry)", log):
        if match := _USAGE.search(part):
            found[match["name"]] = KernelUsage(
                int(match["registers"]),
                int(match["stores"]) + int(match["loads"]),
                int(match["shared"] or 0),
            )
    return found


def usage_of(source: Path, defines: Mapping[str, int], arch: str) -> dict[str, KernelUsage]:
    """Kernel -> registers, spills and shared memory, as ptxas reports them for a source file."""

    def make(path: Path) -> None:
        usage = reported(compile_source(source, defines, arch).log)
        path.write_text(json.dumps({name: astuple(found) for name, found in usage.items()}))

    path = cached(digest(source, defines, arch), ".json", make)
    return {name: KernelUsage(*found) for name, found in json.loads(path.read_text()).items()}
