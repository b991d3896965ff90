"""What linear's few-row kernel requests of memory, and where it puts results, at any size: its own
functions, with requests counted instead of made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from emulator import runner
from emulator.compiler import COMPILER, EmulatorFault
from emulator.runner import Emulator
from support import kernel_runner
from support.kernel_cases import cases_of
from support.linear_shapes import N4, SHAPES

from thor_dflash.core.tensors import Array
from thor_dflash.plugins import LINEAR
from thor_dflash.plugins.launch import THOR
from thor_dflash.plugins.linear import decode_launch
from thor_dflash.plugins.linear.layout import PackedLayout, WeightKind, _layout
from thor_dflash.plugins.linear.partition import Partition, WorkTile, first_tiles, partition

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++ (Debian package g++)")
PROBES = "linear_probes.cu"
UNIT = 64
"""Bytes whose requests are counted together, as in the probes."""
COMMON = {"WARPS": 8, "PARTS": 2, "MANY": 1, "TILES": 0, "LANES": 4, "EPILOGUE": 0, "ROW_SCALE": 0}
COMMON |= {"LOADED": 2, "HEAD_SCALE": 0, "K_SIZE": 128}
FP8, BF16 = WeightKind.FP8, WeightKind.BF16


def probe(
    kernel: str,
    grid: int,
    threads: int,
    *arguments: Array | int,
    parts: int = 2,
    narrow: int = 0,
    full: int = 1,
    k: int = 128,
) -> None:
    """Run a kernel of the probes: eight multiplying warps, 16 rows if `full`, else up to 15."""
    kinds = 1 << N4 if narrow else 7
    defines = {"ROW_TILES": 1, "FULL": full, "NEXT": 0, "KINDS": kinds, "NARROW": narrow}
    known = {**COMMON, **defines, "PARTS": parts, "K_SIZE": k}
    runner.probe(PROBES, kernel, *arguments, blocks=grid, threads=threads, **known)


def requested(plan: PackedLayout, cut: Partition, rows: int, first: int = 0) -> tuple[Array, Array]:
    """How often each UNIT of a packed weight, from byte `first` on, is requested by the clusters
    whose pieces lie there, as data read once and as data that others read too; and of the rows, by
    each cluster.
    """
    table = np.ascontiguousarray(cut.item_table())
    counts = np.zeros(plan.nbytes - first, np.uint8)
    slabs = np.zeros((len(table), *decode_launch.slabs(rows, plan.k)), np.uint16).view(np.uint8)
    probe(
        "requested", len(table) * cut.parts, 32,
        counts, slabs, table, cut.most_items, rows, first // 512,
        parts=cut.parts, narrow=int(bool(plan.narrow)), full=int(rows == 16), k=plan.k,
    )  # fmt: skip
    weights, given = (x.reshape(-1, UNIT)[:, :2] for x in (counts, slabs))
    return weights, given.reshape(len(table), -1, 2)


MIXED = 1152, (N4, FP8, BF16), (320, 192, 64), False
GATE_UP = 128, (N4, N4), (17_408, 17_408), True
Product = tuple[int, tuple[WeightKind, ...], tuple[int, ...], bool]


@pytest.mark.parametrize(
    ("shape", "multiprocessors", "rows"), [(MIXED, 2, 16), (MIXED, 20, 5), (GATE_UP, 20, 16)]
)  # fmt: skip
def test_weights_are_requested_once_and_rows_kept_for_every_item(
    shape: Product, multiprocessors: int, rows: int
) -> None:
    """Of n-tiles of every kind, of halves of bf16 ones, of narrow tiles."""
    plan = _layout(*shape)
    cut = partition(plan, multiprocessors)
    weights, given = requested(plan, cut, rows)
    assert (weights == (1, 0)).all()
    assert all((x == (0, len(items))).all() for x, items in zip(given, cut.clusters, strict=True))


TWO_RUNS = 400, (N4, FP8, N4), (1600, 64, 832), False


@pytest.mark.parametrize(
    ("shape", "multiprocessors", "loaded", "kinds"),
    [
        (SHAPES["in_proj"], 132, 3, {BF16}), (SHAPES["in_proj"], 264, 3, {BF16}),
        (SHAPES["out_proj"], 20, 0, set()), (SHAPES["down"], 60, 0, set()),
        (SHAPES["down"], 132, 0, set()), (SHAPES["qkv"], 132, 0, set()),
        (SHAPES["nano"], 8, 1, {BF16}), (SHAPES["nano"], 132, 1, {BF16}),
        ((144, (N4,), (1664,), False), 12, 0, set()), (TWO_RUNS, 40, 14, {FP8, N4}),
    ],
)  # fmt: skip
def test_first_items_are_computed_as_the_table_has_them(
    shape: Product, multiprocessors: int, loaded: int, kinds: set[WeightKind]
) -> None:
    """Full groups and shorter ones, after clusters with other items."""
    plan = _layout(*shape)
    cut = partition(plan, multiprocessors)
    first, table = first_tiles(plan, cut), cut.item_table()[:, 0, 0]
    assert first.loaded == loaded
    assert {c[0].piece.group.kind for c in cut.clusters[:loaded]} == kinds
    found = np.zeros((len(cut.clusters) - loaded, 4), np.int32)
    known = {**COMMON, "TILES": cut.tiles, "MANY": 0, "ROW_TILES": 1, "FULL": 1, "NEXT": 0}
    defines = {**known, "KINDS": 7, "NARROW": 0, "K_SIZE": plan.k}
    runner.probe(PROBES, "computed", found, loaded, first.tiles, threads=len(found), **defines)
    np.testing.assert_array_equal(found, table[loaded:])


def test_items_are_loaded_where_they_do_not_follow_from_the_cluster() -> None:
    """Where others follow, where no n-tile of the first group is NVFP4, where some are narrow."""
    for shape in (SHAPES["head"], (384, (FP8, N4), (128, 1600), False), SHAPES["gate_up"]):
        plan = _layout(*shape)
        cut = partition(plan, 132)
        assert first_tiles(plan, cut).loaded == len(cut.clusters)
    without = tuple((WorkTile(items[0].piece),) for items in cut.clusters)
    assert first_tiles(plan, replace(cut, clusters=without)).loaded == len(without)


@pytest.mark.parametrize("kind", WeightKind)
def test_a_weight_may_have_more_bytes_than_an_int32_can_count(kind: WeightKind) -> None:
    plan = _layout(5120, (kind,), (7 * 248_320 >> kind,), False)
    last = plan.groups[-1]
    assert 2**32 < last.offset < plan.nbytes
    items = tuple(WorkTile(piece) for piece in last.pieces(1))
    weights, _ = requested(plan, Partition(8, 2, 2, (items,)), 16, last.offset)
    assert (weights == (1, 0)).all()


def test_an_output_may_have_more_columns_than_an_int16_can_count() -> None:
    plan = _layout(*SHAPES["head"])
    width = plan.widths[0]
    found = np.zeros((8 * 4, 2), np.int32)
    probe("placed", 1, 8 * 4, decode_launch.strip_table(plan)[-8:].copy(), found)
    columns = np.arange(width - 64, width, 2)
    np.testing.assert_array_equal(found, np.stack([columns, 31 * width + columns], axis=1))


@pytest.mark.parametrize(("warps", "parts", "tiles"), [(8, 2, 4), (4, 8, 2)])
def test_two_stages_are_on_their_way_and_rows_wait_for_nothing_else(
    warps: int, parts: int, tiles: int
) -> None:
    """With fewer, memory would be idle; with more, others would wait. Both only cost time, as do
    rows that are not requested as soon as the previous kernel has ended.
    """
    plan = _layout(5120, (N4,), (64 * tiles,), False)
    (item,) = (WorkTile(piece) for piece in plan.groups[0].pieces(tiles))
    table = Partition(warps, 2, parts, ((item,),)).item_table()
    events = np.zeros((200, 3), np.int32)
    known = {**COMMON, "WARPS": warps, "PARTS": parts, "MANY": 0, "TILES": tiles, "NEXT": 0}
    defines = {**known, "LANES": warps // 2, "ROW_TILES": 1, "FULL": 1, "KINDS": 1, "NARROW": 0}
    defines["K_SIZE"] = plan.k
    runner.probe("order_probes.cu", "order", events, table, **defines)
    end, weights, rows, wait, previous = range(5)
    requests = [tuple(map(int, event)) for event in events if event[0] != end]
    step = tiles * WeightKind.NVFP4.step_bytes
    coming: dict[int, int] = {}
    most = []
    for what, barrier, size in requests:
        if what == weights:
            coming[barrier] = coming.get(barrier, 0) + size
            most.append(sum(coming.values()))
        elif what == wait:
            coming.pop(barrier, None)
    stages = plan.steps // parts
    # The fourth is requested when the first three have come and been announced as filled.
    assert most == [step, 2 * step, 2 * step, step, *[2 * step] * (stages - 4)]
    after = [what for what, _, _ in requests[requests.index((previous, 0, 0)) + 1 :]]
    assert after[:3] == [rows] * 3
    assert after.count(rows) == stages
    assert rows not in [what for what, _, _ in requests[: len(requests) - len(after)]]


@pytest.mark.parametrize(("count", "blocks"), [(94, 40), (200, 3), (5, 40)])
def test_every_piece_of_the_next_weight_is_fetched_once(count: int, blocks: int) -> None:
    """Pieces of two units each, in any part of the weight, with a gap after each."""
    first = 2**23 + 5
    pieces = np.array([(first + 3 * i, 2) for i in range(count)], np.int32)
    counts = np.zeros((count, 3, 512), np.uint8)
    probe("fetched", blocks, 32, counts, pieces, count, first)
    assert (counts[:, :2, ::UNIT] == 1).all()
    assert not counts[:, 2].any()


@pytest.mark.parametrize("name", ["more_residual_nvfp4_16_of_640", "more_norm_5_of_640"])
def test_weights_are_requested_before_the_previous_kernel_has_ended(name: str) -> None:
    """So there is a fault if weights are something that the previous kernel may have written."""

    def written(
        buffers: Sequence[kernel_runner.Buffer], steps: Sequence[kernel_runner.Step]
    ) -> None:
        for buffer in buffers:
            buffer.from_kernels |= buffer.name == "packed"
        Emulator(0)(buffers, steps)

    call = kernel_runner.call_of(LINEAR, cases_of(LINEAR)[name])
    kernel_runner.launch(call, Emulator(0), THOR)
    with pytest.raises(EmulatorFault, match=r"copy_bulk: .* before wait_for_previous"):
        kernel_runner.launch(call, written, THOR)


@pytest.mark.parametrize(
    ("kernel", "row_tiles", "loads"),
    [
        ("packed_nvfp4", 0, 2), ("packed_fp8", 0, 1), ("packed_bfloat16", 0, 2),
        ("packed_narrow", 0, 4), ("quarter", 1, 2), ("quarter", 2, 4), ("narrow", 1, 3),
        ("ends", 1, 5), ("ends", 2, 9), ("sums", 1, 4), ("sums", 2, 8),
    ],
)  # fmt: skip
def test_what_stands_for_loads_depends_on_each(kernel: str, row_tiles: int, loads: int) -> None:
    """Otherwise memory could be released, and overwritten, before its content has arrived. For more
    than 32 rows, `row_tiles` is 0 here. If it is 1, a lane has two of the four strips; if it is 2,
    all of them, and the next norm has float32 weights.
    """
    memory = np.linspace(1, 2, 4096, dtype=np.float32).view(np.int32)
    if kernel == "ends":  # strips of a segment of 2^26 columns
        memory[32:40:2], memory[33:41:2] = range(0, 32, 8), 2**26
    found = np.zeros((32, 2), np.int32)
    known = {"ROW_TILES": row_tiles, "FULL": 1, "NEXT": row_tiles, "KINDS": 1 << N4, "NARROW": 0}
    defines = {"PREFILL": int(not row_tiles), **(known | COMMON if row_tiles else {})}
    runner.probe("load_probes.cu", kernel, memory, found, shared=16_384, **defines)
    assert found.tolist() == [[loads, 0]] * 32
