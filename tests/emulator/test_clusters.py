"""Clusters on the emulator: every mistake is reported."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import pytest
from emulator.compiler import COMPILER, MACHINE, EmulatorFault
from emulator.runner import Memory, run

from thor_dflash.core.tensors import Array

pytestmark = [
    pytest.mark.emulator,
    pytest.mark.skipif(COMPILER is None, reason="needs g++ (Debian package g++)"),
]
PROBES = MACHINE / "cluster_probes.cu"
MISTAKES = (
    "NONE", "NO_START", "NO_END", "NO_INIT_DONE", "NO_EXPECT", "RELAXED", "OVERWRITE",
    "WRONG_WAIT", "NO_WAIT", "TWO_ARRIVALS", "NO_ARRIVAL", "ENDS_EARLY", "FAR_BARRIER", "BEHIND",
    "LOCAL", "TOO_MUCH", "NO_SYNC", "APART",
)  # fmt: skip
"""The probes' enumeration, in order."""
RACE = r"a race at .*cluster_probes\.cu:\d+ and no barrier"
ENDED = "has ended|ended and nothing makes it wait"
every_order = pytest.mark.parametrize("seed", range(3))


def probe(
    kernel: str,
    arrays: Sequence[Array],
    *numbers: int,
    threads: int = 64,
    shared: int = 0,
    cluster: int = 2,
    blocks: int | None = None,
    seed: int = 0,
) -> None:
    """Run a kernel of cluster_probes.cu; its arguments are arrays, then integers. Without `blocks`
    the grid is one cluster.
    """
    arguments: list[ctypes.c_void_p | ctypes.c_int32 | ctypes.c_float]
    arguments = [ctypes.c_void_p(x.ctypes.data) for x in arrays]
    arguments += [ctypes.c_int32(n) for n in numbers]
    memory = [Memory(x.ctypes.data, x.nbytes) for x in arrays]
    grid = (cluster if blocks is None else blocks, 1, 1)
    run(PROBES, {}, kernel, grid, threads, shared, arguments, memory, seed, cluster)


def floats(*shape: int) -> Array:
    """Random float32, 16-byte aligned."""
    size = int(np.prod(shape))
    raw = np.random.default_rng(size).standard_normal(size + 4).astype(np.float32)
    return raw[-raw.ctypes.data // 4 % 4 :][:size].reshape(shape)


# Mistake -> message, by kernel: wrong_load, wrong_send.
LOADS = {
    "NO_START": "may not have started",
    "NO_END": ENDED,
    "RELAXED": RACE,
    "OVERWRITE": RACE,
    "TWO_ARRIVALS": "cluster_arrive: again before cluster_wait",
    "NO_ARRIVAL": "cluster_wait: without cluster_arrive",
    "ENDS_EARLY": "ended between cluster_arrive and cluster_wait",
    "APART": "lanes of one warp in different collectives",
    "LOCAL": "must be one of cluster_address",
    "BEHIND": "outside of shared memory",
}
STORES = {
    "NO_START": "may not have started",
    "NO_INIT_DONE": "no barrier_init_done",
    "NO_EXPECT": "no thread can go on(.|\n)*barrier_wait_cluster",
    "WRONG_WAIT": RACE,
    "NO_WAIT": f"{RACE}|has ended|ended before a copy to it",
    "NO_SYNC": RACE,
    "FAR_BARRIER": "must be in the same block",
    "TOO_MUCH": f"{RACE}|has ended|ended before a copy to it",
}


@every_order
@pytest.mark.parametrize("cluster", [2, 3])
@pytest.mark.parametrize("mistake", ["NONE", *LOADS])
def test_loads_need_barriers_before_and_after(mistake: str, cluster: int, seed: int) -> None:
    x, out = floats(cluster, 64), np.zeros((cluster, 64), np.float32)

    def load() -> None:
        number = MISTAKES.index(mistake)
        probe("wrong_load", [x, out], number, shared=256, cluster=cluster, seed=seed)

    if mistake != "NONE":
        with pytest.raises(EmulatorFault, match=LOADS[mistake]):
            load()
        return
    load()
    want = np.roll(x, -1, axis=0).reshape(cluster, 16, 4).sum(2)
    np.testing.assert_allclose(out, np.tile(want, 4), atol=1e-5)


@every_order
@pytest.mark.parametrize("mistake", ["NONE", "OVERWRITE", *STORES])
def test_stores_need_barriers_and_waits(mistake: str, seed: int) -> None:
    x, out = floats(3, 64), np.zeros((3, 64), np.float32)

    def send() -> None:
        number = MISTAKES.index(mistake)
        probe("wrong_send", [x, out], number, shared=520, cluster=3, seed=seed)

    if message := STORES.get(mistake):
        with pytest.raises(EmulatorFault, match=message):
            send()
        return
    send()  # OVERWRITE is right here: a store has read its words when it is issued
    np.testing.assert_array_equal(out, np.roll(x, 1, axis=0))
