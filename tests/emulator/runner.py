"""Runs kernels on a CPU, compiled by compiler.py.

One cluster runs at a time, and each of its threads is a fiber (tests/emulator/machine.cpp). Much of
what is undefined behaviour on a GPU raises EmulatorFault here: accesses outside every buffer, data
races, lanes of one warp in different collectives, deadlocks, misaligned copies, a block that ends
while another block of its cluster may still access its shared memory.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from emulator.compiler import LINES, MACHINE, EmulatorFault, built, library_of, signatures
from support.kernel_runner import Buffer, Pointers, Step, Value

from thor_dflash.core.tensors import Array
from thor_dflash.plugins.launch import Int, Real

MESSAGE_BYTES = 16384
LATE = 1 << 16
"""Added to the number of a warp, a seed of `run`."""


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
    "attend_split": frozenset("length shift at cache_k cache_v next_cache_k next_cache_v".split()),
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
        seed: Order of threads and blocks: 0 ascending, 1 descending, LATE + w ascending except that
            warp w of each block only runs when nothing else can go on, otherwise pseudo-random.
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


def probe(
    source: str,
    kernel: str,
    *arguments: Array | int,
    blocks: int = 1,
    threads: int = 32,
    shared: int = 0,
    **defines: int,
) -> None:
    """Run a kernel of a source file in tests/emulator, which may write all of its arrays."""
    run(
        MACHINE / source,
        defines,
        kernel,
        (blocks, 1, 1),
        threads,
        shared,
        [
            ctypes.c_int32(x) if isinstance(x, int) else ctypes.c_void_p(x.ctypes.data)
            for x in arguments
        ],
        [Memory(x.ctypes.data, x.nbytes) for x in arguments if not isinstance(x, int)],
    )


def _range(m: Memory) -> _Range:
    flags = m.writable + 2 * m.from_kernels + 4 * m.early + 8 * m.counted
    return _Range(m.address, m.nbytes, flags)


def _placed(message: str, source: Path, defines: tuple[tuple[str, int], ...]) -> str:
    """The message, its code addresses (@0x...) replaced by lines of the kernel's source."""
    tool = shutil.which("addr2line")
    if tool is None:
        return message
    library = built(source, defines, LINES)

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
    """A backend of tests/support/kernel_runner.py: runs the launches on this CPU."""

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
    """The address that a kernel gets. A buffer at a low address may begin before address 0: then
    the sum with an offset wraps around, as 64 bits do.
    """
    return 0 if given is None else (given.data.ctypes.data + given.offset) % 2**64
