"""What a room launches: kernels, their grids, and what each argument points at.

A room's `launch.py` holds `launches(site, device)`: the launches of one call, in order. Whoever
runs them (the CUDA engine, a TensorRT plugin, a test) finds the memory for the arguments; a rule
never sees an address.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from thor_dflash.plugins.op import Attributes, Op
from thor_dflash.tensors import Array, DType


@dataclass(frozen=True, slots=True)
class Device:
    """What a launch rule may know of a device."""

    capability: tuple[int, int]
    """Compute capability, (9, 0) or (11, 0)."""
    multiprocessors: int
    shared: int = 232448
    """Most shared memory of one block, bytes."""


THOR = Device((11, 0), 20)
H100 = Device((9, 0), 132)


@dataclass(frozen=True, slots=True)
class Shaped:
    """One bound port of a call."""

    dtype: DType
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size, bytes."""
        size = self.dtype.bytes
        for n in self.shape:
            size *= n
        return size


@dataclass(frozen=True, slots=True)
class Site:
    """One call of a room with every size a number. Ports that are left out are absent."""

    op: Op
    attributes: Attributes
    ports: Mapping[str, Shaped]
    """Inputs and outputs of the contract by name, and what programs and `Rule.packed` add."""
    following: Site | None = None
    """The call whose weight this one fetches ahead (AHEAD), where that is known."""

    def size(self, port: str, axis: int) -> int:
        """One size of one port."""
        return self.ports[port].shape[axis]

    def __contains__(self, port: str) -> bool:
        return port in self.ports


@dataclass(frozen=True, slots=True)
class At:
    """An argument: the address of a port; a null pointer where the call leaves it out."""

    port: str


@dataclass(frozen=True, slots=True)
class Addresses:
    """An argument: a table in device memory of the addresses of several ports, u64 each."""

    ports: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Shift:
    """An argument: the address of an int64 in device memory, how far states are from where the
    addresses of some ports say. An input lies so many bytes past its address, and an output goes as
    many before its own: the two places of a state that is not renewed in place, either way round.
    A null pointer where that is always 0.
    """

    ports: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Int:
    """An int32 argument."""

    value: int


@dataclass(frozen=True, slots=True)
class Real:
    """A float32 argument."""

    value: float


@dataclass(frozen=True, slots=True)
class Scratch:
    """An argument: memory of this call alone, shared by its launches under one name.

    `zeroed` memory is zero before the first launch ever, is nobody else's, and every launch must
    leave it zero (arrival counters). Other scratch holds anything and may be reused by later calls.
    """

    name: str
    nbytes: int
    zeroed: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """An argument: a constant array in device memory."""

    values: Array


Argument = At | Addresses | Shift | Int | Real | Scratch | Table
NO_DEFINES: Mapping[str, int] = {}


AHEAD = "next_packed"
"""Port of a call that fetches ahead: the packed weight of the next product, that another reads."""
MOST_AHEAD = 24 << 20
"""Bytes of a weight that are fetched ahead: a Thor's L2 cache has 32 MiB, an H100's 50."""


def ahead(site: Site, blocks: int) -> tuple[At, Int]:
    """Arguments of a launch that leaves memory idle: the weight that the next product reads, where
    the call has it, and the bytes of it that each of `blocks` brings into the L2 cache
    (cuda/ahead.cuh).
    """
    nbytes = site.ports[AHEAD].nbytes if AHEAD in site else 0
    return At(AHEAD), Int(min(nbytes, MOST_AHEAD) // blocks // 16 * 16)


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel launch."""

    kernel: str
    """Entry point in the room's source file."""
    grid: tuple[int, int, int]
    threads: int
    """Per block."""
    arguments: tuple[Argument, ...]
    shared: int = 0
    """Dynamic shared memory, bytes."""
    defines: Mapping[str, int] = field(default_factory=lambda: NO_DEFINES)
    """Compile-time constants: -Dname=value. One cubin per source file and set of them."""
    source: str = "kernel.cu"
    """File in the room's folder."""
    overlap: bool = True
    """May start before the launch before it has ended; it calls wait_for_previous."""
    cluster: int = 1
    """Blocks along x that share a cluster."""
