"""The kernel that chooses the head's best ids against numpy, on logits that are hard to rank."""

from __future__ import annotations

import numpy as np
import pytest
from emulator.compiler import COMPILER
from emulator.runner import Emulator
from support.kernel_runner import Step, Value, buffer, shaped

from thor_dflash.core.tensors import Array, DType
from thor_dflash.plugins.head import OP
from thor_dflash.plugins.head.argmax_launch import SLICE, best_launches
from thor_dflash.plugins.launch import THOR, Argument, CallSite, Pointer, Scratch, Shaped

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++ (Debian package g++)")

WIDTHS = (1, 3, 96, 1280, SLICE - 1, SLICE, SLICE + 1, 2 * SLICE + 36)
"""Rows of one slice and of several; rows that are 16-byte aligned and rows that are not."""


def site(logits: Array, vocab: int, id_map: Array | None) -> CallSite:
    ports = {"sums": shaped(logits), "best": Shaped(DType.I32, (len(logits),))}
    if id_map is not None:
        ports["id_map"] = shaped(id_map)
    return CallSite(OP, OP.complete({"vocab": vocab}), ports)


def best(logits: Array, vocab: int = 0, id_map: Array | None = None, seed: int = 0) -> Array:
    """The kernel's choices. Its outputs and scratch are poisoned before."""
    (launch,) = best_launches(site(logits, vocab, id_map), THOR, "sums")
    buffers = {
        "sums": buffer("sums", logits, writable=False),
        "best": buffer("best", 4 * len(logits)),
    }
    if id_map is not None:
        buffers["id_map"] = buffer("id_map", id_map, writable=False, kernels=False)

    def value(argument: Argument) -> Value:
        match argument:
            case Pointer(port):
                return buffers.get(port)
            case Scratch(name, nbytes, zeroed):
                return buffers.setdefault(name, buffer(name, nbytes, 0 if zeroed else 0xFF))
            case _:
                return argument

    step = Step(OP.folder / launch.source, launch, tuple(map(value, launch.arguments)))
    Emulator(seed=seed)([*buffers.values()], [step])
    assert not buffers["best_arrivals"].data.any()
    return buffers["best"].data.view(np.int32)


def reference(logits: Array, vocab: int = 0, id_map: Array | None = None) -> Array:
    chosen = logits[:, : vocab or None]
    ids = chosen.argmax(axis=1)
    return np.where(np.isnan(chosen).any(axis=1), -1, ids if id_map is None else id_map[ids])


def any_logits(rng: np.random.Generator, width: int) -> Array:
    """Many ties; zeros, infinities and NaN of both signs."""
    rows = int(rng.integers(1, 33)) if width < SLICE else int(rng.integers(1, 4))
    logits = rng.standard_normal((rows, width))
    if rng.random() < 0.6:
        logits = np.round(logits)
    logits = np.where(rng.random(logits.shape) < 0.2, -0.0, logits)
    if rng.random() < 0.3:
        logits = np.where(rng.random(logits.shape) < 0.9, -np.inf, logits)
    for value in (np.nan, -np.nan, np.inf, np.inf):
        if rng.random() < 0.3:
            logits[rng.integers(rows), rng.integers(width)] = value
    return logits.astype(np.float32)


@pytest.mark.parametrize("seed", range(60))
def test_the_best_ids_are_numpys_whatever_the_logits(seed: int) -> None:
    rng = np.random.default_rng(seed)
    width = int(rng.choice(WIDTHS))
    logits = any_logits(rng, width)
    vocab = int(rng.choice([0, width, max(1, width - 5), width + 9]))
    id_map = rng.permutation(3 * width)[:width].astype(np.int32) if seed % 2 else None
    np.testing.assert_array_equal(
        best(logits, vocab, id_map, seed), reference(logits, vocab, id_map)
    )


def test_the_first_of_equals_wins_across_slices() -> None:
    logits = np.full((1, 2 * SLICE + 8), -1.0, np.float32)
    logits[0, [SLICE - 1, SLICE, 2 * SLICE]] = 2.0
    for seed in range(4):
        assert best(logits, seed=seed).tolist() == [SLICE - 1]


def test_a_row_may_have_more_slices_than_a_warp_has_lanes() -> None:
    logits = np.zeros((2, 33 * SLICE), np.float32)
    logits[0, 32 * SLICE + 9] = logits[1, SLICE] = 1.0
    logits[1, 9] = np.nan
    assert best(logits).tolist() == [32 * SLICE + 9, -1]
