"""Clusters on the emulator: what each operation does, and that every mistake is reported."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import pytest
from emulator.compiler import COMPILER, MACHINE, EmulatorFault
from emulator.runner import Memory, run

from thor_dflash.core.tensors import Array
from thor_dflash.plugins.cuda.compile import compile_source

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
every_order = pytest.mark.parametrize("seed", range(6))


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


@pytest.mark.parametrize("arch", ["sm_90", "sm_110"])
def test_the_probes_compile_for_a_gpu(arch: str) -> None:
    pytest.importorskip("cuda.bindings.nvrtc", reason="needs NVRTC (the extra [cuda])")
    usage = compile_source(PROBES, {}, arch).usage
    assert {"exchange", "feed", "wrong_send"} <= usage.keys()
    assert not any(found.spilled for found in usage.values())


# ---- right ---------------------------------------------------------------------------------------
@every_order
@pytest.mark.parametrize("cluster", [1, 2, 8])
def test_every_block_has_memory_of_its_own(cluster: int, seed: int) -> None:
    out = np.zeros((8, 32), np.float32)
    probe("own_memory", [out], threads=32, shared=128, cluster=cluster, blocks=8, seed=seed)
    want = np.repeat(np.arange(8)[:, None] * 101 + 3, 32, axis=1)
    np.testing.assert_array_equal(out, want)


@every_order
@pytest.mark.parametrize("cluster", [1, 2, 4, 8])
@pytest.mark.parametrize("how", ["stores", "loads"])
def test_blocks_exchange_words(how: str, cluster: int, seed: int) -> None:
    x, out = floats(8, 64), np.zeros((8, 64), np.float32)
    probe(
        "exchange",
        [x, out],
        ["stores", "loads"].index(how),
        3,
        shared=256 * (1 + cluster) + 8,
        cluster=cluster,
        blocks=8,
        seed=seed,
    )
    want = 3 * x.reshape(8 // cluster, cluster, 64).sum(1) + 3 * cluster
    np.testing.assert_allclose(out, np.repeat(want, cluster, axis=0), atol=1e-5)


@every_order
@pytest.mark.parametrize("parts", [1, 2, 5])
def test_a_stage_is_filled_again_when_all_blocks_have_read_it(parts: int, seed: int) -> None:
    x, out = floats(parts, 64), np.zeros((4, 64), np.float32)
    probe("feed", [x, out], parts, cluster=4, seed=seed)
    np.testing.assert_array_equal(out[0], 0)
    for got in out[1:]:
        np.testing.assert_allclose(got, x.sum(0), atol=1e-5)


@every_order
@pytest.mark.parametrize("cluster", [1, 2])
def test_words_may_come_before_they_are_announced(cluster: int, seed: int) -> None:
    x, out = floats(64), np.zeros((4, 64), np.float32)
    probe("unannounced", [x, out], cluster=cluster, blocks=4, seed=seed)
    np.testing.assert_array_equal(out, np.tile(x, (4, 1)))


# ---- mistakes ------------------------------------------------------------------------------------
# Mistake -> message, by kernel: wrong_load, wrong_send, wrong_release.
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
ARRIVALS = {
    "NO_INIT_DONE": "no barrier_init_done",
    "WRONG_WAIT": RACE,
    "NO_WAIT": f"{RACE}|has ended",
    "NO_END": ENDED,
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


@every_order
@pytest.mark.parametrize("mistake", ["NONE", *ARRIVALS])
def test_memory_is_overwritten_only_after_its_readers_arrived(mistake: str, seed: int) -> None:
    out = np.zeros((2, 32), np.float32)

    def release() -> None:
        probe("wrong_release", [out], MISTAKES.index(mistake), threads=32, seed=seed)

    if mistake == "NONE":
        release()
        np.testing.assert_array_equal(out, 1)
        return
    with pytest.raises(EmulatorFault, match=ARRIVALS[mistake]):
        release()


@pytest.mark.parametrize(
    ("seed", "message"), [(0, "nothing makes it wait"), (1, "block 0 of the cluster has ended")]
)
def test_a_block_that_others_read_must_wait_before_it_ends(seed: int, message: str) -> None:
    out = np.zeros((2, 32), np.float32)
    probe("wrong_one_sided", [out], MISTAKES.index("NONE"), threads=32, seed=seed)
    np.testing.assert_array_equal(out, [[0] * 32, [1] * 32])
    with pytest.raises(EmulatorFault, match=message):
        probe("wrong_one_sided", [out], MISTAKES.index("NO_END"), threads=32, seed=seed)
    with pytest.raises(EmulatorFault, match="nothing makes it wait"):
        probe("wrong_one_sided", [out], MISTAKES.index("RELAXED"), threads=32, seed=seed)


@pytest.mark.parametrize(("blocks", "cluster"), [(3, 2), (16, 16), (2, 0)])
def test_a_grid_is_whole_clusters(blocks: int, cluster: int) -> None:
    with pytest.raises(EmulatorFault, match="cluster"):
        probe("own_memory", [floats(512)], threads=32, shared=128, cluster=cluster, blocks=blocks)
