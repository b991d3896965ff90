"""Resource usage of compiled kernels, cached by the text of their sources."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import astuple
from pathlib import Path

from emulator.compiler import cached

from thor_dflash.plugins.cuda.compile import KernelUsage, compile_source, digest


def usage_of(source: Path, defines: Mapping[str, int], arch: str) -> dict[str, KernelUsage]:
    """Kernel -> registers, spills and shared memory, as ptxas reports them for a source file."""

    def make(path: Path) -> None:
        usage = compile_source(source, defines, arch).usage
        path.write_text(json.dumps({name: astuple(found) for name, found in usage.items()}))

    path = cached(digest(source, defines, arch), ".json", make)
    return {name: KernelUsage(*found) for name, found in json.loads(path.read_text()).items()}
