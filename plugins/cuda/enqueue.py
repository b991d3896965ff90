"""Resolves the arguments of launches to addresses and values, and enqueues them on a stream."""

# cuda-python publishes no types.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

from thor_dflash.plugins.cuda.driver import DriverCalls, pack
from thor_dflash.plugins.launch import (
    Argument,
    BufferOffset,
    Int,
    Launch,
    Pointer,
    PointerTable,
    Real,
    Scratch,
    Table,
)

ALIGNMENT = 256
"""Alignment of every piece of working memory, bytes."""

Arguments = Sequence[tuple[str, int | float]]
"""In the form that `driver.pack` takes."""


def working(launches: Sequence[Launch]) -> tuple[dict[str, int], int]:
    """Returns the offsets, by name, of the scratch memory that is needed only during a call, and
    its total size, bytes.
    """
    offsets: dict[str, int] = {}
    end = 0
    for launch in launches:
        for argument in launch.arguments:
            if not isinstance(argument, Scratch) or argument.zeroed or argument.name in offsets:
                continue
            offsets[argument.name] = end
            end += -(-argument.nbytes // ALIGNMENT) * ALIGNMENT
    return offsets, end


def content(argument: Table | PointerTable, address: Callable[[str], int]) -> bytes:
    """Returns the bytes that a table argument points to. `address` returns the address of a port, 0
    if the call leaves it out.
    """
    if isinstance(argument, Table):
        return argument.values.tobytes()
    return b"".join(address(port).to_bytes(8, "little") for port in argument.ports)


def values(
    launch: Launch,
    address: Callable[[str], int],
    table: Callable[[bytes], int],
    scratch: Callable[[Scratch], int],
    shift: Callable[[BufferOffset], int],
) -> Arguments:
    """Returns the arguments of one launch. The functions return the address of a port, of a table
    with the given content, of scratch memory, and of a Shift's int64.
    """

    def value(argument: Argument) -> tuple[str, int | float]:
        match argument:
            case Int():
                return "int", argument.value
            case Real():
                return "real", argument.value
            case Pointer():
                return "address", address(argument.port)
            case Table() | PointerTable():
                return "address", table(content(argument, address))
            case Scratch():
                return "address", scratch(argument)
            case BufferOffset():
                return "address", shift(argument)

    return [value(argument) for argument in launch.arguments]


def enqueue(
    gate: DriverCalls,
    stream: Any,
    kernel: Any,
    launch: Launch,
    arguments: Arguments,
    *,
    overlap: bool,
) -> None:
    """Launch one kernel on a stream. With `overlap` it may start before the previous one ends."""
    config = configuration(gate, stream, launch, overlap=overlap)
    pointers, held = pack(arguments)
    gate("cuLaunchKernelEx", config, kernel, ctypes.addressof(pointers), 0)
    del held  # the driver has copied the arguments


def configuration(gate: DriverCalls, stream: Any, launch: Launch, *, overlap: bool) -> Any:
    """Returns the driver's description of a launch, without kernel and arguments."""
    cu = gate.cu
    config = cu.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = launch.grid
    config.blockDimX, config.blockDimY, config.blockDimZ = launch.threads, 1, 1
    config.sharedMemBytes = launch.shared
    config.hStream = stream
    attributes: list[Any] = []
    kinds = cu.CUlaunchAttributeID
    if overlap:
        one = cu.CUlaunchAttribute()
        one.id = kinds.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        one.value.programmaticStreamSerializationAllowed = 1
        attributes.append(one)
    if launch.cluster > 1:
        one = cu.CUlaunchAttribute()
        one.id = kinds.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        one.value.clusterDim.x = launch.cluster
        one.value.clusterDim.y = one.value.clusterDim.z = 1
        attributes.append(one)
    config.attrs, config.numAttrs = attributes, len(attributes)
    return config
