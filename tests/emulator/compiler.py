"""Compiles kernels for the emulator: g++ makes a library of an operator's CUDA source and the
machine in tests/emulator. Compiled files are kept, for all processes and checkouts.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
MACHINE = ROOT / "tests" / "emulator"
PLUGINS = ROOT / "plugins"
COMPILER = shutil.which("g++")
FLAGS = (
    "-std=c++17", "-O1", "-fPIC", "-w", "-ffp-contract=off", "-fno-strict-aliasing",
    "-U_FORTIFY_SOURCE",  # Ubuntu's g++ defines it, and then longjmp may not leave a fiber
)  # fmt: skip
CHECKED = (
    "-fsanitize=thread,alignment,bounds,integer-divide-by-zero",
    "-fsanitize-undefined-trap-on-error",
    "--param=tsan-instrument-func-entry-exit=0",
)
"""Flags for kernels: g++ calls a hook of the machine (memory.cpp) before every load and store."""
LINES = ("-g1", "-gdwarf-4")
"""Flags that add line numbers to the same code. Compiling takes a third longer with them, so it is
done only after a fault, to translate the addresses of its message."""
FAST = ("-O3",)
"""More optimisation, for the machine: it is compiled once, while every kernel is compiled anew."""
WITHOUT_LIBRARIES = ("-shared", "-nodefaultlibs")
"""Flags to link without reading libstdc++ and the libraries that it needs: their tables of symbols
take most of the time of a link. `_cpp_library` is named instead; symbols are found on loading."""
PARTS = ("memory", "machine", "lanes", "copies", "fiber")
"""Source files of the machine, in the order in which they must be linked."""
KERNEL = re.compile(r"emulated_kernel\s+void\s+(\w+)\s*\(([^)]*)\)")
INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)
HEADER = '#include "cuda/device.cuh"\n#include "registry.h"\n'
KEPT = 7 * 86400
"""Seconds after its last use until a compiled file is deleted."""


class EmulatorFault(AssertionError):
    """A kernel's source does not compile, or the kernel did something that CUDA does not allow."""


def _compile(*arguments: str | Path) -> str:
    assert COMPILER is not None
    done = subprocess.run(
        [COMPILER, *map(str, arguments)], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise EmulatorFault(f"g++ does not take it:\n{done.stderr[:8000]}")
    return done.stdout


def _preprocessed(source: Path, defines: Mapping[str, int], *more: str) -> str:
    wanted = [f"-D{name}={value}" for name, value in sorted(defines.items())]
    return _compile(
        "-E", "-std=c++17", "-w", *more, *wanted, "-I", MACHINE, "-I", PLUGINS, "-x", "c++", source
    )


@cache
def _signatures(source: Path, defines: tuple[tuple[str, int], ...]) -> dict[str, tuple[str, ...]]:
    def make(path: Path) -> None:
        text = _preprocessed(source, dict(defines), "-DEMULATOR_LIST", "-P")
        path.write_text(json.dumps(KERNEL.findall(text)))

    path = cached("\n".join([_text(source), repr(defines), KERNEL.pattern]), ".kernels", make)
    found = {}
    for name, parameters in json.loads(path.read_text()):
        parts = [part.strip() for part in parameters.split(",") if part.strip()]
        found[name] = tuple(_kind(part) for part in parts)
    return found


@cache
def _text(source: Path) -> str:
    """The source and all files of the project that it includes, directly or indirectly."""
    known: dict[Path, str] = {}
    left = [source]
    while left:
        path = left.pop()
        if path in known:
            continue
        known[path] = path.read_text()
        for name in INCLUDE.findall(known[path]):
            places = (path.parent / name, MACHINE / name, PLUGINS / name)
            left += [place for place in places if place.exists()]
    return "\n".join(f"{_named(path)}\n{known[path]}" for path in sorted(known))


def _named(path: Path) -> str:
    """A path that is the same in every checkout, so that checkouts share what is compiled. They
    can, because `_placed` names source files without their folders.
    """
    return os.path.relpath(path, ROOT)


def _kind(parameter: str) -> str:
    if "*" in parameter:
        return "pointer"
    kind = re.sub(r"\bconst\b", "", parameter).strip().rpartition(" ")[0].strip()
    return {"int": "int", "i32": "int", "float": "real"}.get(kind, kind)


def signatures(source: Path, defines: Mapping[str, int]) -> dict[str, tuple[str, ...]]:
    """The kernels of a source file: the kind of each argument, "pointer", "int" or "real"."""
    return _signatures(source, tuple(sorted(defines.items())))


@cache
def folder_of(place: str) -> Path:
    """The directory of compiled files, shared by all processes. Deletes files that have not been
    used for KEPT seconds.
    """
    folder = Path(place) / f"thor-dflash-emulator-{os.getuid()}"
    folder.mkdir(exist_ok=True)
    oldest = time.time() - KEPT
    for file in os.scandir(folder):
        with contextlib.suppress(FileNotFoundError):  # another process was faster
            if file.is_file() and file.stat().st_mtime < oldest:
                os.unlink(file)
    return folder


def cached(key: str, suffix: str, make: Callable[[Path], None]) -> Path:
    """The file for a key. The first process that asks for it makes it, by `make(path)`."""
    folder = folder_of(tempfile.gettempdir())
    path = folder / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}{suffix}"
    with contextlib.suppress(FileNotFoundError):
        os.utime(path)
        return path
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            with tempfile.TemporaryDirectory(dir=folder) as name:
                made = Path(name) / path.name
                make(made)
                made.rename(path)
    return path


@cache
def _machine() -> str:
    """The emulator's own sources: without the probes, which are kernels."""
    parts = (p for p in sorted(MACHINE.rglob("*")) if p.suffix in (".h", ".cpp", ".cuh"))
    return "\n".join(part.read_text() for part in parts)


@cache
def _machine_objects() -> tuple[Path, ...]:
    def make(source: Path) -> Path:
        def compiled(to: Path) -> None:
            _compile(*FLAGS, *FAST, "-c", "-I", MACHINE, source, "-o", to)

        return cached("\n".join([_machine(), source.name, *FLAGS, *FAST]), ".o", compiled)

    return tuple(make(MACHINE / f"{name}.cpp") for name in PARTS)


@cache
def _cpp_library() -> Path:
    """An empty library that calls itself libstdc++. What is linked with it loads the real one."""

    def made(to: Path) -> None:
        empty = to.with_suffix(".cpp")
        empty.write_text("")
        _compile(*WITHOUT_LIBRARIES, "-fPIC", "-Wl,-soname,libstdc++.so.6", empty, "-o", to)

    return cached("\n".join(["libstdc++", *WITHOUT_LIBRARIES]), ".so", made)


@cache
def _header(lines: tuple[str, ...]) -> Path:
    """The header that every kernel includes first. The precompiled header lies beside it, under the
    name that g++ looks for.
    """

    def written(to: Path) -> None:
        to.write_text(HEADER)

    def compiled(to: Path) -> None:
        _compile(*FLAGS, *lines, *CHECKED, "-I", MACHINE, "-x", "c++-header", path, "-o", to)

    key = "\n".join([_machine(), HEADER, *FLAGS, *lines, *CHECKED])
    path = cached(key, ".h", written)
    cached(key, ".h.gch", compiled)
    return path


@cache
def built(source: Path, defines: tuple[tuple[str, int], ...], lines: tuple[str, ...] = ()) -> Path:
    """The library of a source file's kernels, compiled with the extra flags `lines`."""
    names = list(_signatures(source, defines))
    entries = "".join(f"EMULATE({n})\n" for n in names)
    wanted = [f"-D{name}={value}" for name, value in defines]
    header, objects, library = _header(lines), _machine_objects(), _cpp_library()

    def linked(to: Path) -> None:
        file, unit = to.with_suffix(".cpp"), to.with_suffix(".o")
        file.write_text(f'namespace {{\n#include "{source}"\n}}\n{entries}')
        include = ("-include", header, "-I", MACHINE, "-I", PLUGINS)
        _compile(*FLAGS, *lines, *CHECKED, "-c", *wanted, *include, file, "-o", unit)
        # memory.o first: dynamic shared memory must be the first of all shared memory.
        _compile(*WITHOUT_LIBRARIES, *objects, unit, "-Wl,--no-as-needed", library, "-o", to)

    flags = (*FLAGS, *lines, *FAST, *CHECKED, *WITHOUT_LIBRARIES)
    parts = [_named(source), _text(source), repr(defines), entries, HEADER, _machine(), *flags]
    return cached("\n".join(parts), ".so", linked)


@cache
def library_of(source: Path, defines: tuple[tuple[str, int], ...]) -> ctypes.CDLL:
    """The compiled kernels of a source file and the emulator's machine."""
    return ctypes.CDLL(str(built(source, defines)))
