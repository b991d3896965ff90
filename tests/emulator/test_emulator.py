"""The emulator itself: operations equal numpy's, and every mistake in a probe is reported."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import ml_dtypes
import numpy as np
import pytest
from emulator.compiler import COMPILER, MACHINE, EmulatorFault
from emulator.runner import Memory, run

from thor_dflash.core.tensors import Array

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++ (Debian package g++)")
PROBES = MACHINE / "probes.cu"
SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.emulator) for seed in (1, 2, 3, 4))]
BF16, F16, FP8 = ml_dtypes.bfloat16, np.float16, ml_dtypes.float8_e4m3fn


def probe(
    kernel: str,
    arrays: Sequence[Array],
    *numbers: int,
    threads: int = 32,
    shared: int = 0,
    blocks: int = 1,
    seed: int = 0,
    writable: bool = True,
    from_kernels: bool = False,
    cluster: int = 1,
) -> None:
    """Run a kernel of probes.cu; its arguments are arrays, then integers. `writable`: whether the
    kernel may write the first array; it may always write the others.
    """
    arguments: list[ctypes.c_void_p | ctypes.c_int32 | ctypes.c_float]
    arguments = [ctypes.c_void_p(x.ctypes.data) for x in arrays]
    arguments += [ctypes.c_int32(n) for n in numbers]
    memory = [
        Memory(x.ctypes.data, x.nbytes, writable or i > 0, from_kernels)
        for i, x in enumerate(arrays)
    ]
    run(PROBES, {}, kernel, (blocks, 1, 1), threads, shared, arguments, memory, seed, cluster)


def words(n: int) -> Array:
    return np.random.default_rng(n).integers(0, 2**32, n, dtype=np.uint32)


def floats(n: int) -> Array:
    return np.random.default_rng(n).standard_normal(n).astype(np.float32)


# ---- what operations mean ------------------------------------------------------------------------
def bits(x: Array, dtype: type) -> Array:
    """Bits of float32 numbers rounded to a type; NaN of any sign and payload is one pattern."""
    raw = x.astype(dtype).view(f"u{np.dtype(dtype).itemsize}").astype(np.uint32)
    return np.where(np.isnan(x), 0x7FFF if np.dtype(dtype).itemsize == 2 else 0x7F, raw)


def awkward() -> Array:
    """float32 numbers that are hard to round: ties, subnormals, the ends of each type, NaN."""
    ends = [
        0, -0.0, np.inf, -np.inf, np.nan, 65504, 65519.9, 65520, 448, 464, 463.9, 465, 1e9, -1e9
    ]  # fmt: skip
    ties = [1 + i * 2.0**-j for i in range(9) for j in (4, 5, 8, 9, 11, 12)]
    small = [
        i * 2.0**-j for i in range(1, 12) for j in (7, 9, 10, 11, 15, 24, 25, 26, 126, 133, 140)
    ]
    every = np.array([*ends, *ties, *small], np.float32)
    return np.resize(np.concatenate([every, -every]), 1024)


def test_conversions_round_as_the_types_do() -> None:
    x = awkward()
    for first in range(0, 1024, 64):
        part = x[first : first + 64]
        out = np.zeros((32, 3), np.uint32)
        with np.errstate(all="ignore"):
            probe("elements", [part.view(np.uint32), out])
            low, high = part[:32], part[32:]
            np.testing.assert_array_equal(out[:, 0], bits(low, BF16) | bits(high, BF16) << 16)
            np.testing.assert_array_equal(out[:, 1], bits(low, F16) | bits(high, F16) << 16)
            low, high = np.clip(low, -448, 448), np.clip(high, -448, 448)
            np.testing.assert_array_equal(out[:, 2], bits(low, FP8) | bits(high, FP8) << 8)


# ---- copies and barriers -------------------------------------------------------------------------
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("parts", [1, 2, 3, 9])
def test_a_ring_of_bulk_copies(parts: int, seed: int) -> None:
    x, out = floats(64 * parts), np.zeros(64, np.float32)
    probe("ring", [x, out], parts, threads=96, shared=544, seed=seed)
    np.testing.assert_allclose(out, x.reshape(parts, 64).sum(0), atol=1e-5)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("cluster", [1, 3])
def test_the_last_block_sees_all(cluster: int, seed: int) -> None:
    parts, counter, out = np.zeros(9, np.float32), np.zeros(1, np.uint32), np.zeros(1, np.float32)
    probe("last_block", [parts, counter, out], threads=64, blocks=9, seed=seed, cluster=cluster)
    assert out[0] == 45
    assert counter[0] == 0


# ---- mistakes ------------------------------------------------------------------------------------
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("kernel", "threads"),
    [
        ("wrong_no_sync", 64),
        ("wrong_byte_of_a_word", 64),
        ("wrong_no_warp_sync", 32),
        ("wrong_no_release", 96),
    ],
)
def test_a_missing_barrier_is_a_race_in_every_order(kernel: str, threads: int, seed: int) -> None:
    x = np.ones(1024, np.uint32)
    with pytest.raises(EmulatorFault, match=r"a race at .*probes\.cu:\d+ and no barrier"):
        probe(kernel, [x, np.zeros(64, np.uint32)], threads=threads, shared=544, seed=seed)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("count", [32, 63])
def test_a_phase_does_not_wait_for_more_arrivals_than_its_count(count: int, seed: int) -> None:
    x, out = words(64), np.zeros(64, np.uint32)
    probe("wrong_count", [x, out], 64, threads=64, seed=seed)
    np.testing.assert_array_equal(out, x[::-1])
    with pytest.raises(EmulatorFault, match=r"a race at .*probes\.cu:\d+ and no barrier"):
        probe("wrong_count", [x, out], count, threads=64, seed=seed)


@pytest.mark.parametrize(
    ("kernel", "threads", "message"),
    [
        ("wrong_lanes_diverge", 32, "different collectives"),
        ("wrong_deadlock", 64, "no thread can go on"),
        ("wrong_no_init_done", 32, "no barrier_init_done"),
    ],
)
@pytest.mark.parametrize("seed", SEEDS)
def test_misused_collectives_are_faults(kernel: str, threads: int, message: str, seed: int) -> None:
    with pytest.raises(EmulatorFault, match=message):
        probe(kernel, [np.zeros(64, np.uint32)], threads=threads, seed=seed)


@pytest.mark.parametrize(
    ("seed", "message"), [(0, "no thread can go on"), (1, "this one's end may be missed")]
)
def test_a_phase_whose_end_may_be_missed_is_reported(seed: int, message: str) -> None:
    with pytest.raises(EmulatorFault, match=message):
        probe("wrong_two_phases", [np.zeros(64, np.uint32)], threads=64, seed=seed)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("cluster", [1, 2, 4])
def test_blocks_see_each_others_writes_only_by_arriving(cluster: int, seed: int) -> None:
    parts, counter, out = np.zeros(256, np.float32), np.zeros(1, np.uint32), np.zeros(9, np.float32)
    with pytest.raises(EmulatorFault, match="a race in device memory"):
        probe(
            "wrong_arrival", [parts, counter, out], threads=64, blocks=4, seed=seed, cluster=cluster
        )
    with pytest.raises(EmulatorFault, match="a race in device memory"):
        probe("wrong_neighbour", [parts, out], threads=1, blocks=4, seed=seed, cluster=cluster)


@pytest.mark.parametrize("seed", [0, 1])
def test_a_copy_not_waited_for_is_not_there(seed: int) -> None:
    raw = np.ones(200, np.float32)
    x = raw[(-raw.ctypes.data // 4) % 4 :][:128]
    for waited in (1, 0):
        bulk = np.zeros(32, np.float32)
        probe("wrong_copy", [x, bulk], 128, 0, waited, shared=272, seed=seed)
        assert np.all(bulk == 1) if waited else np.all(np.isnan(bulk))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("engine", [0, 1])
def test_a_copy_over_words_not_yet_received_is_reported(engine: int, seed: int) -> None:
    x, out = floats(128), np.zeros(64, np.float32)
    probe("wrong_refill", [x, out], engine, 1, 0, threads=64, shared=256, seed=seed)
    np.testing.assert_array_equal(out, x[:64] + x[64:])
    for receives, late in ((0, 1), (1, 1), (1, 2), (2, 0)):
        numbers = engine, receives, late
        with pytest.raises(EmulatorFault, match="no received lies between"):
            probe("wrong_refill", [x, out], *numbers, threads=64, shared=256, seed=seed)


@pytest.mark.parametrize("where", [-1, 32, 1 << 20])
def test_a_read_outside_every_buffer_is_reported(where: int) -> None:
    with pytest.raises(EmulatorFault, match="in no buffer"):
        probe("wrong_index", [words(32), np.zeros(32, np.uint32)], where)


def test_a_write_to_an_input_is_reported() -> None:
    probe("wrong_write", [words(32), words(32)], 0)
    with pytest.raises(EmulatorFault, match="a write to an input"):
        probe("wrong_write", [words(32), words(32)], 0, writable=False)


@pytest.mark.parametrize("where", [-1, 64, 5000])
def test_shared_memory_ends_where_the_launch_says(where: int) -> None:
    probe("wrong_shared", [words(32)], 63, shared=64)
    with pytest.raises(EmulatorFault, match="outside of shared memory"):
        probe("wrong_shared", [words(32)], where, shared=64)


def test_memory_of_other_kernels_is_not_accessed_before_waiting() -> None:
    probe("wrong_no_wait", [words(32), words(32)])
    with pytest.raises(EmulatorFault, match="before wait_for_previous"):
        probe("wrong_no_wait", [words(32), words(32)], from_kernels=True)


def test_blocks_do_not_write_the_same_word() -> None:
    probe("same_word", [words(1)])
    with pytest.raises(EmulatorFault, match="a race in device memory"):
        probe("same_word", [words(1)], blocks=2)


def test_the_process_lives_on_after_a_fault() -> None:
    for _ in range(3):
        with pytest.raises(EmulatorFault):
            probe("wrong_deadlock", [words(64)], threads=64)
        test_the_last_block_sees_all(1, 0)
