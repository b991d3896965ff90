"""Runs kernels on a CPU: g++ compiles a room's CUDA source against tests/emulator.

One cluster runs at a time, and each of its threads is a fiber (tests/emulator/machine.cpp). Much of
what is undefined behaviour on a GPU raises EmulatorFault here: accesses outside every buffer, data
races, lanes of one warp in different collectives, deadlocks, misaligned copies, a block that ends
while another block of its cluster may still access its shared memory.
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
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from kernels import Buffer, Pointers, Step, Value

from thor_dflash.plugins.launch import Int, Real
from thor_dflash.tensors import Array

ROOT = Path(__file__).parent.parent
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
PARTS = ("memory", "machine", "lanes", "copies", "fiber")
"""Source files of the machine, in the order in which they must be linked."""
KERNEL = re.compile(r"emulated_kernel\s+void\s+(\w+)\s*\(([^)]*)\)")
INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)
HEADER = '#include "cuda/device.cuh"\n#include "registry.h"\n'
MESSAGE_BYTES = 16384
KEPT = 7 * 86400
"""Seconds after its last use until a compiled file is deleted."""


class EmulatorFault(AssertionError):
    """A kernel's source does not compile, or the kernel did something that CUDA does not allow."""


class _Range(ctypes.Structure):
    _fields_ = [
        ("begin", ctypes.c_void_p),
        ("bytes", ctypes.c_uint64),
        ("flags", ctypes.c_uint32),
    ]


class _Stacks(ctypes.Structure):
    _fields_ = [("begin", ctypes.c_void_p), ("made", ctypes.c_uint64)]


class _Launch(ctypes.Structure):
    _fields_ = [
        ("kernel", ctypes.c_char_p),
        ("grid", ctypes.c_uint32 * 3),
        ("threads", ctypes.c_int),
        ("shared", ctypes.c_int),
        ("cluster", ctypes.c_int),
        ("seed", ctypes.c_uint32),
        ("ranges", ctypes.c_int),
        ("memory", ctypes.POINTER(_Range)),
        ("message", ctypes.c_char_p),
        ("message_bytes", ctypes.c_int),
        ("stacks", ctypes.POINTER(_Stacks)),
    ]


_STACKS = _Stacks()
_ONE_AT_A_TIME = threading.Lock()
"""All launches share the fibers' stacks, and launches of one library share a machine."""


_FOLD = frozenset("state states accepted record_k record_d record_decay".split())
EARLY = {
    "gdn_rows": _FOLD | {"tail", "record_qkv"},
    "gdn_prefill": _FOLD,
    "attend_split": frozenset("length cache_k cache_v next_cache_k next_cache_v".split()),
    "draft_attention": frozenset("length window first ring_k ring_v".split()),
}
"""Kernel -> ports that no earlier kernel of the same graph writes. The kernel may read them before
wait_for_previous, but not write them."""


def is_early(kernel: str, port: str) -> bool:
    """Whether a kernel may read a port before wait_for_previous: see EARLY."""
    return port in EARLY.get(kernel, ())


@dataclass(frozen=True, slots=True)
class Memory:
    """A range of memory that a launch may access."""

    address: int
    nbytes: int
    writable: bool = True
    from_kernels: bool = False
    """Other kernels write or read it, so it must not be accessed before wait_for_previous."""
    early: bool = False
    """An exception to `from_kernels`: reading it before wait_for_previous is allowed."""
    counted: bool = False
    """Each of its bytes counts how many times it is prefetched."""


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
    return "\n".join(p.read_text() for p in sorted(MACHINE.rglob("*")) if p.is_file())


@cache
def _machine_objects() -> tuple[Path, ...]:
    def make(source: Path) -> Path:
        def compiled(to: Path) -> None:
            _compile(*FLAGS, *FAST, "-c", "-I", MACHINE, source, "-o", to)

        return cached("\n".join([_machine(), source.name, *FLAGS, *FAST]), ".o", compiled)

    return tuple(make(MACHINE / f"{name}.cpp") for name in PARTS)


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
def _built(source: Path, defines: tuple[tuple[str, int], ...], lines: tuple[str, ...] = ()) -> Path:
    names = list(_signatures(source, defines))
    entries = "".join(f"EMULATE({n})\n" for n in names)
    wanted = [f"-D{name}={value}" for name, value in defines]
    header, objects = _header(lines), _machine_objects()

    def linked(to: Path) -> None:
        file, unit = to.with_suffix(".cpp"), to.with_suffix(".o")
        file.write_text(f'namespace {{\n#include "{source}"\n}}\n{entries}')
        include = ("-include", header, "-I", MACHINE, "-I", PLUGINS)
        _compile(*FLAGS, *lines, *CHECKED, "-c", *wanted, *include, file, "-o", unit)
        # memory.o first: dynamic shared memory must be the first of all shared memory.
        _compile("-shared", *objects, unit, "-o", to)

    flags = (*FLAGS, *lines, *FAST, *CHECKED)
    parts = [_named(source), _text(source), repr(defines), entries, HEADER, _machine(), *flags]
    return cached("\n".join(parts), ".so", linked)


@cache
def library_of(source: Path, defines: tuple[tuple[str, int], ...]) -> ctypes.CDLL:
    """The compiled kernels of a source file and the emulator's machine."""
    return ctypes.CDLL(str(_built(source, defines)))


def run(
    source: Path,
    defines: Mapping[str, int],
    kernel: str,
    grid: tuple[int, int, int],
    threads: int,
    shared: int,
    arguments: Sequence[ctypes.c_void_p | ctypes.c_int32 | ctypes.c_float],
    memory: Sequence[Memory],
    seed: int = 0,
    cluster: int = 1,
) -> None:
    """Run one launch.

    Args:
        seed: Order of threads and blocks: 0 ascending, 1 descending, otherwise pseudo-random.
        cluster: Blocks of a cluster, along x.

    Raises:
        EmulatorFault: see there.
    """
    if kernel not in signatures(source, defines):
        raise EmulatorFault(f"{source.name} must have the kernel {kernel}")
    known = tuple(sorted(defines.items()))
    library = library_of(source, known)
    ranges = (_Range * len(memory))(*map(_range, memory))
    message = ctypes.create_string_buffer(MESSAGE_BYTES)
    launch = _Launch(
        kernel.encode(),
        (ctypes.c_uint32 * 3)(*grid),
        threads,
        shared,
        cluster,
        seed,
        len(memory),
        ranges,
        ctypes.cast(message, ctypes.c_char_p),
        MESSAGE_BYTES,
        ctypes.pointer(_STACKS),
    )
    pointers = (ctypes.c_void_p * max(1, len(arguments)))(*(ctypes.addressof(a) for a in arguments))
    with _ONE_AT_A_TIME:
        failed = library[f"emulate_{kernel}"](ctypes.byref(launch), pointers)
    if failed:
        raise EmulatorFault(_placed(message.value.decode(), source, known))


def _range(m: Memory) -> _Range:
    flags = m.writable + 2 * m.from_kernels + 4 * m.early + 8 * m.counted
    return _Range(m.address, m.nbytes, flags)


def _placed(message: str, source: Path, defines: tuple[tuple[str, int], ...]) -> str:
    """The message, its code addresses (@0x...) replaced by lines of the kernel's source."""
    tool = shutil.which("addr2line")
    if tool is None:
        return message
    library = _built(source, defines, LINES)

    def place(match: re.Match[str]) -> str:
        lines = subprocess.run(
            [tool, "-i", "-e", library, match.group(1)], capture_output=True, text=True, check=False
        ).stdout.split("\n")
        spots = [line.split(" (")[0].rpartition("/")[2] for line in lines if ":" in line]
        spots = [spot for spot in spots if not spot.startswith(("device.cuh", "??"))]
        return " < ".join(spots) or match.group(0)

    return re.sub(r"@(0x[0-9a-f]+)", place, message)


@dataclass(frozen=True, slots=True)
class Emulator:
    """A backend of tests/kernels.py: runs the launches on this CPU."""

    seed: int = 0
    """Order of threads and blocks: see `run`."""
    counted: str = ""
    """Name of a buffer whose bytes count how many times they are prefetched."""

    def __call__(self, buffers: Sequence[Buffer], steps: Sequence[Step]) -> None:
        """Run the launches in order, over the content of the buffers."""
        tables: list[Array] = []

        def value(given: Value) -> ctypes.c_void_p | ctypes.c_int32 | ctypes.c_float:
            match given:
                case Int(number):
                    return ctypes.c_int32(number)
                case Real(number):
                    return ctypes.c_float(number)
                case Pointers(targets):
                    tables.append(np.array([_address(b) for b in targets], np.uint64))
                    return ctypes.c_void_p(tables[-1].ctypes.data)
                case _:
                    return ctypes.c_void_p(_address(given))

        for step in steps:
            one = step.launch
            arguments = [value(given) for given in step.arguments]
            memory = [
                Memory(
                    b.data.ctypes.data, b.data.nbytes, b.writable, b.from_kernels and one.overlap,
                    is_early(one.kernel, b.name), b.name == self.counted,
                ) for b in buffers
            ] + [Memory(t.ctypes.data, t.nbytes, False) for t in tables]  # fmt: skip
            run(
                step.source, one.defines, one.kernel, one.grid, one.threads, one.shared,
                arguments, memory, self.seed, one.cluster,
            )  # fmt: skip


def _address(given: Buffer | None) -> int:
    return 0 if given is None else given.data.ctypes.data + given.told
