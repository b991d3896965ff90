"""Memory of more than 2^31 elements or bytes, as long prompts and large models have it.

Of each launch, a few blocks run whose memory lies far behind the beginning, and only what they may
use is there.
"""

from __future__ import annotations

import mmap
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from emulator.compiler import COMPILER, MACHINE
from emulator.runner import Emulator
from support.kernel_runner import (
    GUARD,
    SLAB,
    Buffer,
    Pointers,
    Step,
    Value,
    buffer,
    packed,
    shaped,
    site_of,
    slabs,
)

from thor_dflash.core.tensors import Array, DType
from thor_dflash.plugins import LINEAR
from thor_dflash.plugins.launch import (
    H100,
    Argument,
    Device,
    Int,
    Launch,
    Pointer,
    PointerTable,
    Real,
    Scratch,
    Shaped,
    Table,
)
from thor_dflash.plugins.linear.launch import launches
from thor_dflash.plugins.linear.layout import layout
from thor_dflash.plugins.linear.prefill_launch import HIGH, LOW, cut

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++ (Debian package g++)")

BF16 = DType.BF16.numpy
SOME = MACHINE / "some_blocks.cu"
ROWS, WIDTH = 131_072, 17_408
"""Rows of a long step of a prompt; the inner width of Qwen3.6-27B's MLP."""
VOCABULARY, HIDDEN = 248_320, 5_120
"""Of Qwen3.6-27B."""
MANY = 2**24
"""Rows whose second slab begins behind 2^31 bytes. No step is as long, but one of fewer rows may
have more slabs.
"""


def far(made: Buffer, offset: int) -> Buffer:
    """The buffer as that part of larger memory which begins `offset` bytes behind its start."""
    made.offset = -offset
    return made


def untouched(nbytes: int) -> Buffer:
    """A buffer of which only the pages that are touched take memory."""
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = np.frombuffer(mmap.mmap(-1, nbytes + 2 * GUARD, flags=private), np.uint8)
    return Buffer("untouched", memory, writable=True, from_kernels=True)


def part(of: Buffer, offset: int, nbytes: int) -> Buffer:
    """Memory of its own within that of a buffer."""
    return replace(of, memory=of.memory[offset : offset + nbytes + 2 * GUARD])


def run(source: Path, launch: Launch, arguments: tuple[Value, ...], *more: Buffer) -> None:
    """Run a launch. Its memory is the buffers among its arguments and those given."""
    known = [x for x in arguments if isinstance(x, Buffer)]
    Emulator()([*known, *more], [Step(source, launch, arguments)])


def some_blocks(launch: Launch, first: int, count: int) -> Launch:
    """A launch that runs so many blocks of another one."""
    defines = {**launch.defines, "FIRST": first, "BLOCKS": launch.grid[0]}
    return replace(launch, grid=(count, *launch.grid[1:]), defines=defines)


def rows_of(rng: np.random.Generator, t: int, width: int) -> Array:
    return rng.standard_normal((t, width)).astype(BF16)


def prologue(t: int, k: int) -> Launch:
    inputs = {"x": Shaped(DType.BF16, (t, k)), "weight0": Shaped(DType.BF16, (16, k))}
    launch = launches(packed(site_of(LINEAR, {}, inputs), {})[0], H100)[0]
    assert launch.kernel == "linear_rows"
    return launch


def test_the_last_row_of_a_long_step_enters_its_product() -> None:
    x = rows_of(np.random.default_rng(1), 1, WIDTH)
    launch = prologue(ROWS, WIDTH)
    y = untouched(2 * ROWS * WIDTH)
    row = far(buffer("x", x), 2 * (ROWS - 1) * WIDTH)
    arguments = (row, None, None, y, Int(WIDTH), Real(1e-6), Real(0.0))
    run(SOME, some_blocks(launch, ROWS - 1, 1), arguments)
    got = y.data.view(np.uint16).reshape(-1, ROWS, SLAB)[:, -1]
    # A row's columns are ordered as those of the last of eight rows.
    np.testing.assert_array_equal(got, slabs(np.repeat(x, 8, axis=0)).view(np.uint16)[:, -1])


def test_an_item_of_a_long_step_reads_and_writes_its_own_rows_alone() -> None:
    """Enough multiprocessors for one item each: then all items are half a tile of rows. Row tiles
    vary fastest, so these three are the last piece's: both halves of one tile, half of the last.
    """
    rng = np.random.default_rng(2)
    k, n, first, count = 2 * SLAB, 320, MANY - 2 * HIGH, 3 * LOW
    weight = {"weight0": rows_of(rng, n, k)}
    inputs = {"x": Shaped(DType.BF16, (MANY, k)), "weight0": shaped(weight["weight0"])}
    site, stored = packed(site_of(LINEAR, {}, inputs), weight)
    many = Device((9, 0), 10**6)
    launch, plan = launches(site, many)[-1], layout(site)
    found = cut(plan, MANY, many.multiprocessors)
    assert (found.whole, launch.grid[0]) == (0, 2 * len(found.pieces) * MANY // HIGH)
    x = rows_of(rng, count, k)
    whole, nbytes = untouched(2 * MANY * k), 2 * count * SLAB
    held = [part(whole, 2 * (slab * MANY + first) * SLAB, nbytes) for slab in range(2)]
    for slab, content in zip(held, slabs(x), strict=True):
        slab.data[:] = content.reshape(-1).view(np.uint8)
    far(held[0], 2 * first * SLAB)
    y = far(buffer("y0", 2 * count * n), 2 * first * n)
    known = {name: buffer(name, a, writable=False, kernels=False) for name, a in stored.items()}

    def value(argument: Argument) -> Value:
        match argument:
            case Pointer(port):
                return known.get(port)
            case Scratch():
                return held[0]
            case Table(values):
                return buffer("table", values, writable=False, kernels=False)
            case PointerTable():
                return Pointers((y,))
            case _:
                return argument

    arguments = tuple(map(value, launch.arguments))
    run(SOME, some_blocks(launch, launch.grid[0] - 4, 3), arguments, held[1], y)
    columns = found.pieces[-1].column
    want = x.astype(np.float64) @ weight["weight0"][columns:].astype(np.float64).T
    got = y.data.view(BF16).reshape(count, n).astype(np.float64)
    np.testing.assert_allclose(got[:, columns:], want, rtol=2.0**-7, atol=1e-4)
    assert np.isnan(got[:, :columns]).all()
