"""The drafter's kernels on the emulator, with hard shapes of blocks and rings."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from emulator.runner import Emulator
from support.coverings import pairwise, some
from support.kernel_runner import call_of, launch, rule_of, run, site_of, slabs
from support.op_cases import OpCase
from support.received_loads import received
from support.sites_27b import sites
from support.slab_outputs import leaving

from thor_dflash.core.tensors import Array, DType
from thor_dflash.plugins.context_kv import OP as CONTEXT_KV
from thor_dflash.plugins.contract import Attribute
from thor_dflash.plugins.draft_attention import OP as DRAFT_ATTENTION
from thor_dflash.plugins.draft_attention.launch import STRETCHES
from thor_dflash.plugins.launch import H100, THOR, Device
from thor_dflash.plugins.linear.prologue_launch import SLAB
from thor_dflash.plugins.registry import KERNELS

BF16 = DType.BF16.numpy


def bits(rows: Array) -> Array:
    return rows.view(np.uint16)


def normal(rng: np.random.Generator, *shape: int) -> Array:
    return rng.standard_normal(shape).astype(BF16)


# ---- draft_attention ---------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("multiprocessors", "stretches"), [(16, 2), (20, 5), (24, 3), (114, 7), (132, 8)]
)
def test_a_full_model_shares_the_context_evenly(multiprocessors: int, stretches: int) -> None:
    """Sixteen groups of rows; on 24 multiprocessors, 32 blocks leave a third of a round idle."""
    device = Device((9, 0), multiprocessors)
    for _, attributes, inputs in sites("draft_attention"):
        (one,) = rule_of(DRAFT_ATTENTION).launches(
            site_of(DRAFT_ATTENTION, attributes, inputs), device
        )
        assert one.grid == (stretches, 16, 1)


def test_every_choice_is_another_launch_that_registers_hold_on_any_device() -> None:
    rule = KERNELS[DRAFT_ATTENTION.name]
    _, attributes, inputs = next(iter(sites("draft_attention")))
    site = site_of(DRAFT_ATTENTION, attributes, inputs)
    for multiprocessors in range(1, 161):
        device = Device((9, 0), multiprocessors)
        choices = rule.candidates(site, device, None)
        made = [rule.launches(site, device.choosing(site, one))[0].grid[0] for one in choices]
        assert made[0] == rule.launches(site, device)[0].grid[0]
        assert len(set(made)) == len(made) > 1
        assert set(made) <= set(range(2, STRETCHES + 1))


def block(
    rows: int,
    heads: int,
    kv: int,
    dim: int,
    slots: int,
    length: int,
    window: int,
    causal: int,
    first: int = 0,
    rotary: int = 0,
    plain: DType = DType.F32,
) -> OpCase:
    """A case of draft_attention. Slots of the rings that hold no context row are NaN."""
    rng = np.random.default_rng(length)
    x: dict[str, Array] = {
        "q": normal(rng, rows, heads * dim),
        "k": normal(rng, rows, kv * dim),
        "v": normal(rng, rows, kv * dim),
        "q_norm": (1 + rng.standard_normal(dim) / 3).astype(plain.numpy),
        "k_norm": (1 + rng.standard_normal(dim) / 3).astype(plain.numpy),
        "length": np.array([length], np.int32),
        "window": np.array([window], np.int32),
        "first": np.array([first], np.int32),
    }
    live = np.arange(max(first, length - slots, 0), length) % slots
    for name in ("ring_k", "ring_v"):
        x[name] = np.full((kv, slots, dim), np.nan, BF16)
        x[name][:, live] = normal(rng, kv, len(live), dim)
    a: dict[str, Attribute] = {
        "heads": heads,
        "kv_heads": kv,
        "head_dim": dim,
        "rotary_dim": rotary or dim,
        "causal": causal,
    }
    return OpCase("", x, a)


# rows, heads, kv heads, head dim, ring slots, length, window, causal[, first, rotary, norm's type]
BLOCKS = {
    "sliding": (16, 4, 2, 128, 272, 500, 256, 1),
    "full": (16, 4, 2, 128, 2048, 1000, 0, 0),
    "bidirectional_window": (16, 4, 2, 128, 300, 500, 7, 0),
    "no_context": (16, 4, 2, 128, 272, 0, 256, 1),
    "three_positions": (16, 4, 2, 128, 272, 3, 256, 1),
    "late_first": (16, 4, 2, 128, 272, 900, 256, 1, 880),
    "first_is_length": (16, 4, 2, 128, 272, 900, 256, 1, 900),
    "one_tile": (16, 4, 2, 128, 272, 64, 0, 0),
    "one_tile_and_one": (16, 4, 2, 128, 272, 65, 0, 0),
    "ring_just_full": (16, 4, 2, 128, 272, 272, 0, 0),
    "four_heads_share_keys": (16, 8, 2, 128, 300, 299, 0, 0),
    "three_heads_share_keys": (16, 3, 1, 32, 100, 70, 20, 0),
    "five_rows": (5, 8, 2, 128, 300, 299, 0, 0),
    "one_row": (1, 4, 1, 256, 200, 150, 0, 0),
    "24_rows": (24, 6, 2, 64, 300, 1234, 100, 0),
    "32_rows": (32, 3, 1, 64, 500, 499, 0, 1),
    "far": (16, 8, 1, 128, 2064, 200_000, 2048, 1),
    "partly_rotary": (16, 4, 4, 128, 100, 64, 0, 1, 0, 64, DType.BF16),
}
HARD = ("bidirectional_window", "late_first", "three_heads_share_keys", "32_rows", "far")


@pairwise(quick=6, shape=sorted(BLOCKS, key=lambda name: name not in HARD), device=[THOR, H100])
def test_a_block_attends_as_the_reference_says(shape: str, device: Device) -> None:
    run(DRAFT_ATTENTION, block(*BLOCKS[shape]), Emulator(seed=3), device)


WHOLE = [name for name, shape in BLOCKS.items() if shape[1] * shape[3] % SLAB == 0]
"""Only rows that fill whole slabs are left for the next product."""


@pairwise(quick=1, shape=WHOLE, device=[H100, THOR])
def test_rows_can_be_left_for_the_next_product(shape: str, device: Device) -> None:
    """The slabs hold the very rows, whether a row's context is cut into several pieces or not."""
    call = call_of(DRAFT_ATTENTION, block(*BLOCKS[shape]))
    got = launch(leaving(call, "o"), Emulator(seed=5), device)
    np.testing.assert_array_equal(bits(got["y0_slabs"]), bits(slabs(got["o"])))
    same = launch(call, Emulator(seed=5), device)["o"]
    np.testing.assert_array_equal(bits(got["o"]), bits(same))


@pytest.mark.parametrize("length", [0, 30, 500])
def test_a_causal_row_does_not_know_how_many_follow(length: int) -> None:
    case = block(16, 4, 2, 128, 272, length, 256, 1)
    whole = launch(call_of(DRAFT_ATTENTION, case), Emulator(), H100)["o"]
    for rows in (1, 5, 15):
        inputs = {n: x[:rows] if n in ("q", "k", "v") else x for n, x in case.inputs.items()}
        call = call_of(DRAFT_ATTENTION, OpCase("", inputs, case.attributes))
        part = launch(call, Emulator(), H100)["o"]
        np.testing.assert_array_equal(bits(part), bits(whole[:rows]))


@pytest.mark.parametrize("name", ["v", "ring_v"])
def test_a_stage_is_free_only_when_every_value_in_it_has_been_loaded(name: str) -> None:
    """What is given to `received` depends on every load of values: on each 16 columns of them. It
    then depends on the keys too, because weights of all values are computed from these.
    """
    call = call_of(DRAFT_ATTENTION, block(16, 1, 1, 32, 300, 256, 0, 0))
    two = Device(H100.capability, 2)
    before = received(call, two)
    for column in (0, 16):
        changed = call.inputs[name].copy()
        changed[..., 3, column : column + 16] += 1
        assert received(replace(call, inputs={**call.inputs, name: changed}), two) != before


# ---- context_kv --------------------------------------------------------------------------------
SLOTS = [
    (16, 0, (272, 272, 2048), 2, 128),
    (16, 263, (272, 272, 2048), 2, 128),
    (100, 250, (272, 400), 8, 128),
    (70, 31, (64, 300), 3, 64),
    (3, 5000, (272,) * 8, 1, 256),
    (1, 200_000, (272,), 9, 32),
]


@pytest.mark.parametrize(
    ("rows", "length", "slots", "kv", "dim"), some(SLOTS, [SLOTS[i] for i in (0, 1, 3, 5)])
)
@pytest.mark.parametrize("plain", some([DType.F32, DType.BF16], [DType.BF16]), ids=str)
def test_context_rows_land_in_their_slots_and_nothing_else_moves(
    rows: int, length: int, slots: tuple[int, ...], kv: int, dim: int, plain: DType
) -> None:
    rng = np.random.default_rng(rows)
    x: dict[str, Array] = {"length": np.array([length], np.int32)}
    for i, n in enumerate(slots):
        for name in ("k", "v"):
            x[f"{name}{i}"] = normal(rng, rows, kv * dim)
            x[f"ring_{name}{i}"] = normal(rng, kv, n, dim)
        x[f"k_norm{i}"] = (1 + rng.standard_normal(dim) / 3).astype(plain.numpy)
    a: dict[str, Attribute] = {
        "layers": len(slots),
        "kv_heads": kv,
        "head_dim": dim,
        "rotary_dim": dim,
    }
    got = run(CONTEXT_KV, OpCase("", x, a), Emulator(seed=2))
    for i, n in enumerate(slots):
        untouched = np.setdiff1d(np.arange(n), np.arange(length, length + rows) % n)
        for name in (f"ring_k{i}", f"ring_v{i}"):
            after = got[f"next_{name}"][:, untouched].view(np.uint16)
            np.testing.assert_array_equal(after, x[name][:, untouched].view(np.uint16))


@pytest.mark.parametrize("position", [0, 1, 1000, 105_615, 200_000, 262_143])
def test_angles_are_right_far_out(position: int) -> None:
    # Only the pair with the largest frequency is not zero, so only its angle matters.
    k = np.zeros((1, 128), BF16)
    k[0, 0] = 1
    x: dict[str, Array] = {
        "length": np.array([position], np.int32),
        "k0": k,
        "v0": k,
        "k_norm0": np.ones(128, np.float32),
        "ring_k0": np.zeros((1, 64, 128), BF16),
        "ring_v0": np.zeros((1, 64, 128), BF16),
    }
    case = OpCase("", x, {"layers": 1, "kv_heads": 1})
    call = call_of(CONTEXT_KV, case)
    got = launch(call, Emulator())["next_ring_k0"].astype(np.float64)
    rounding = 2.0**-9 * np.sqrt(128)
    np.testing.assert_allclose(
        got, call.want["next_ring_k0"].astype(np.float64), rtol=0, atol=1.2 * rounding
    )
