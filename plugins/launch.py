"""Descriptions of kernel launches: kernels, grids and arguments.

An operator's `launch.py` exports `KERNELS`. Its `launches(site, device)` returns the launches of
one call, in order. The code that runs them (the CUDA engine, a TensorRT plugin, a test) provides
the memory for the arguments; a launch rule never sees an address."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from thor_dflash.core.tensors import Array, DType
from thor_dflash.plugins.contract import Attribute, Attributes, Op

Choice = Mapping[str, int]
"""A legal way to launch a call: parameters of its operator's launch rule by name."""


@dataclass(frozen=True, slots=True)
class Device:
    """The properties of a device that launch rules use."""

    capability: tuple[int, int]
    """Compute capability, (9, 0) or (11, 0)."""
    multiprocessors: int
    shared: int = 232448
    """Maximum shared memory of one block, bytes."""
    tuned: Mapping[str, Choice] = field(default_factory=dict[str, Choice], hash=False, repr=False)
    """Choices that replace those of the rules, by the `key` of a call."""

    def choice(self, site: CallSite) -> Choice | None:
        """Returns the choice for a call that replaces its rule's, if there is one."""
        return self.tuned.get(site.key) if self.tuned else None

    def choosing(self, site: CallSite, choice: Choice) -> Device:
        """Returns this device with another choice for one call."""
        return replace(self, tuned={**self.tuned, site.key: choice})


THOR = Device((11, 0), 20)
H100 = Device((9, 0), 132)


@dataclass(frozen=True, slots=True)
class Shaped:
    """Element type and shape of one port of a call."""

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
class CallSite:
    """One call of an operator with all sizes known. Ports that the call leaves out are absent."""

    op: Op
    attributes: Attributes
    ports: Mapping[str, Shaped]
    """Inputs and outputs of the contract by name, and ports added by programs or
    `OpKernels.packed`."""
    following: CallSite | None = None
    """The call whose weight this one prefetches (AHEAD), if it is known."""

    def size(self, port: str, axis: int) -> int:
        """One size of one port."""
        return self.ports[port].shape[axis]

    def __contains__(self, port: str) -> bool:
        return port in self.ports

    @property
    def key(self) -> str:
        """What calls with the same launches have in common: a hash of operator, attributes and
        sizes. Caches and rings are left out, whose sizes a session decides, and what is prefetched.
        """
        ports = {
            name: (shaped.dtype.value, shaped.shape)
            for name, shaped in self.ports.items()
            if name != PREFETCHED and not any(word in name for word in SESSION_SIZED)
        }
        parts = (self.op.name, sorted(self.attributes.values.items()), sorted(ports.items()))
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Pointer:
    """An argument: the address of a port; a null pointer if the call leaves it out."""

    port: str


@dataclass(frozen=True, slots=True)
class PointerTable:
    """An argument: the address of a table in device memory with the addresses of several ports, u64
    each.
    """

    ports: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class BufferOffset:
    """An argument: the address of an int64 in device memory, an offset in bytes to the addresses of
    some states. It is added to the address of an input and subtracted from that of an output, so
    that a state that is not updated in place can alternate between two buffers. A null pointer if
    the offset is always 0.
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
    """An argument: temporary memory of this call; its launches share it by name.

    `zeroed` memory (for arrival counters) is zero before the first launch ever, is used by no other
    call, and every launch must leave it zero. Other scratch memory is uninitialised and may be
    reused by later calls.
    """

    name: str
    nbytes: int
    zeroed: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """An argument: the address of a constant array in device memory."""

    values: Array


Argument = Pointer | PointerTable | BufferOffset | Int | Real | Scratch | Table
NO_DEFINES: Mapping[str, int] = {}


PREFETCHED = "next_packed"
"""Port of a call that prefetches: the packed weight of the next product, which a later call
reads."""
SESSION_SIZED = ("cache_", "ring_")
"""Parts of the names of ports whose sizes depend on the session's context."""
MOST_PREFETCHED = 24 << 20
"""Most bytes of a weight to prefetch: a Thor's L2 cache has 32 MiB, an H100's 50."""


def prefetch_next(site: CallSite, blocks: int) -> tuple[Pointer, Int]:
    """Returns arguments for a launch that leaves memory idle: the next product's weight, if the
    call has it, and the bytes of it that each of `blocks` blocks prefetches into the L2 cache
    (cuda/prefetch.cuh).
    """
    nbytes = site.ports[PREFETCHED].nbytes if PREFETCHED in site else 0
    return Pointer(PREFETCHED), Int(min(nbytes, MOST_PREFETCHED) // blocks // 16 * 16)


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel launch."""

    kernel: str
    """Entry point in the operator's source file."""
    grid: tuple[int, int, int]
    threads: int
    """Threads per block."""
    arguments: tuple[Argument, ...]
    shared: int = 0
    """Dynamic shared memory, bytes."""
    defines: Mapping[str, int] = field(default_factory=lambda: NO_DEFINES)
    """Compile-time constants: -Dname=value. Each source file and set of constants has one cubin."""
    source: str = "kernel.cu"
    """File in the operator's folder."""
    overlap: bool = True
    """Whether it may start before the previous launch has ended; its kernel calls
    wait_for_previous."""
    cluster: int = 1
    """Blocks of a cluster, along x."""


Pack = Callable[[CallSite, Mapping[str, Array]], dict[str, Array]]
Fuses = Callable[[Mapping[str, Attribute]], bool]
"""Whether a call with these attributes can do part of the next product's prologue."""


def never(attributes: Mapping[str, Attribute]) -> bool:
    """A `Fuses` that no call has."""
    return False


def always(attributes: Mapping[str, Attribute]) -> bool:
    """A `Fuses` that every call has."""
    return True


def _nothing(site: CallSite) -> str:
    return ""


ActiveClusters = Callable[[Launch], int]
"""Returns how many clusters of a launch a device runs at the same time."""
Candidates = Callable[["CallSite", Device, "ActiveClusters | None"], "tuple[Choice, ...]"]
"""Returns legal choices for a call, the rule's first, then a few that may be faster on some device.
Without ActiveClusters the rule's estimate is used. A rule without a choice returns nothing."""


def no_candidates(
    site: CallSite, device: Device, active: ActiveClusters | None
) -> tuple[Choice, ...]:
    """`Candidates` of a rule without a choice."""
    return ()


@dataclass(frozen=True, slots=True)
class OpKernels:
    """The kernels of one operator, as engines and builders use them."""

    op: Op
    launches: Callable[[CallSite, Device], tuple[Launch, ...]]
    refuse: Callable[[CallSite], str] = _nothing
    """Returns why the kernels cannot run a call, or "" if they can."""
    candidates: Candidates = no_candidates
    in_place: frozenset[str] = frozenset()
    """Outputs that overwrite the input whose next value they are."""
    optional: frozenset[str] = frozenset()
    """Outputs that a call may leave out if nothing reads them."""
    packed: Callable[[CallSite], Mapping[str, Shaped]] | None = None
    """Returns the ports that replace weight#, block_scale# and row_scale#."""
    pack: Pack | None = None
    prefetches: Fuses = never
    """Can prefetch the next product's weight, in a call of few rows: port next_packed."""
    writes_slabs: Fuses = never
    """Can write its rows in the form of the next product's input: port y0_slabs."""
    fuses_norm: Fuses = never
    """The same with the next norm's weight applied: ports next_norm_weight, y0_slabs,
    y0_squares."""
    fuses_head_norm: Fuses = never
    """The same with the weight of a norm by head and the silu of a gate: ports next_gate,
    next_norm_weight, y0_slabs, y0_squares (by head)."""
    fuses_gate: Fuses = never
    """The same with the sigmoid of a gate: ports next_gate, y0_slabs."""

    def source(self, launch: Launch) -> Path:
        """The source file of one of the launches."""
        return self.op.folder / launch.source
