"""linear with more than 32 rows: the ring of stages, and a row's bits wherever it lies."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from emulator import runner
from emulator.compiler import COMPILER, MACHINE, EmulatorFault
from emulator.runner import Emulator
from support.coverings import pairwise, some
from support.kernel_cases import cases_of
from support.kernel_runner import (
    SLAB,
    Buffer,
    Call,
    Step,
    buffer,
    call_of,
    compare,
    launch,
    slabs,
)
from support.op_cases import OpCase, weight_case

from thor_dflash.core.tensors import Array, DType
from thor_dflash.plugins import LINEAR
from thor_dflash.plugins.contract import Attribute
from thor_dflash.plugins.launch import CallSite, Device, Launch
from thor_dflash.plugins.linear.launch import launches
from thor_dflash.plugins.linear.layout import WeightKind

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++ (Debian package g++)")
PROBES = MACHINE / "prefill_probes.cu"


def device(multiprocessors: int) -> Device:
    return Device((9, 0), multiprocessors)


def rows(rng: np.random.Generator, t: int, width: int, scale: float = 1.0) -> Array:
    return (rng.standard_normal((t, width)) * scale).astype(DType.BF16.numpy)


def three_kinds(t: int, k: int = 352) -> OpCase:
    """Pieces of four, two and one n-tiles, segments that end inside a strip, a norm. Rows are the
    same for every T.
    """
    rng = np.random.default_rng(4)
    x = {"x": rows(rng, 300, k, 30)[:t], "norm_weight": rows(rng, 1, k)[0]}
    for i, (kind, n) in enumerate((("nvfp4", 354), ("fp8", 42), ("bfloat16", 250))):
        x |= weight_case(rng, kind, n, k, i)
    return OpCase(f"{t}_rows", x, {"segments": 3, "norm_offset": 1.0})


def run(call: Call, on: Device, seed: int = 0) -> dict[str, Array]:
    got = launch(call, Emulator(seed), on)
    compare(LINEAR, got, call.want)
    return got


def product(site: CallSite, on: Device) -> Launch:
    one = launches(site, on)[-1]
    assert one.source == "prefill.cu"
    return one


@pytest.mark.parametrize(
    ("t", "multiprocessors"),
    some([(33, 1), (64, 3), (65, 132), (130, 4), (300, 8), (300, 5)], [(65, 132), (130, 4)]),
)
def test_a_row_is_the_same_among_any_number_of_rows_and_blocks(
    t: int, multiprocessors: int
) -> None:
    alone = run(call_of(LINEAR, three_kinds(33)), device(2))
    among = run(call_of(LINEAR, three_kinds(t)), device(multiprocessors), seed=t)
    for name, want in alone.items():
        np.testing.assert_array_equal(among[name][:33].view(np.uint16), want.view(np.uint16))


@pairwise(
    quick=2,
    kind=["nvfp4", "fp8", "bfloat16"],
    k=[16, 64, 80, 128, 208, 1040],
    shared=[232448, 101376],
)
def test_any_number_of_steps_goes_through_the_ring(kind: str, k: int, shared: int) -> None:
    rng = np.random.default_rng(k)
    case = OpCase(kind, {"x": rows(rng, 70, k), **weight_case(rng, kind, 336, k)}, {})
    run(call_of(LINEAR, case), Device((9, 0), 1, shared), seed=k)


@pairwise(quick=1, k=[16, 80, 352], t=[33, 130])
def test_a_row_is_the_same_with_any_ring(t: int, k: int) -> None:
    """Items of one, two and six half steps of K; several items to a block and a single one."""
    call = call_of(LINEAR, three_kinds(t, k))
    one = product(call.site, device(1))
    stage = one.shared // one.defines["STAGES"]
    want = run(call, device(132))
    for stages in range(2, one.defines["STAGES"] + 1):
        small = Device((9, 0), 1 + stages % 2, stages * stage)
        assert product(call.site, small).defines["STAGES"] == stages
        for name, got in run(call, small, stages).items():
            np.testing.assert_array_equal(got.view(np.uint16), want[name].view(np.uint16))


@pairwise(
    quick=3, t=[40, 140], gate=["none", "sigmoid", "silu"], head_dim=[0, 8, 64, 128, 256, 768]
)
def test_every_prologue_is_rounded_once(t: int, gate: str, head_dim: int) -> None:
    rng = np.random.default_rng(9)
    k, n = 768, 72
    norm = rng.standard_normal(head_dim or k)
    x = {"x": rows(rng, t, k, 9), "residual": rows(rng, t, n), "gate": rows(rng, t, k, 4)}
    x["norm_weight"] = norm.astype(np.float32 if t == 40 else DType.BF16.numpy)
    a: dict[str, Attribute] = {"epilogue": "residual", "gate": gate, "head_dim": head_dim}
    run(call_of(LINEAR, OpCase("prologue", x | weight_case(rng, "nvfp4", n, k), a)), device(2), t)


@pairwise(quick=1, kind=["nvfp4", "fp8", "bfloat16"], n=[8, 136, 296])
def test_swiglu_of_any_kind_and_width(kind: str, n: int) -> None:
    rng = np.random.default_rng(n)
    x = {"x": rows(rng, 130, 128), **weight_case(rng, kind, n, 128, 0)}
    x |= weight_case(rng, kind, n, 128, 1)
    call = call_of(LINEAR, OpCase("swiglu", x, {"segments": 2, "epilogue": "swiglu"}))
    run(call, device(3), n)


@pytest.mark.parametrize(
    ("kernel", "port"), [("linear_rows", "norm_weight"), ("linear_prefill", "packed")]
)
def test_weights_are_requested_before_the_previous_kernel_has_ended(
    kernel: str, port: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be a fault if another kernel wrote them."""
    monkeypatch.setattr(runner, "_placed", lambda message, *_: message)

    def backend(buffers: Sequence[Buffer], steps: Sequence[Step]) -> None:
        for held in buffers:
            held.from_kernels |= held.name == port
        Emulator()(buffers, [step for step in steps if step.launch.kernel == kernel])

    with pytest.raises(EmulatorFault, match=f"{kernel}: .* before wait_for_previous"):
        launch(call_of(LINEAR, cases_of(LINEAR)["more_gated_48_of_640"]), backend, device(2))


@pytest.mark.parametrize("t", some([64, 128], [128]))
def test_a_stage_is_released_when_all_of_its_last_16_of_k_are_there(t: int) -> None:
    """The release waits for what a value depends on, so that must change with every load of rows,
    and with the weights.
    """
    nbytes = 2 * t * SLAB + 4 * WeightKind.NVFP4.step_bytes // 2
    defines = {"TILE_ROWS": t, "STAGES": 2, "KINDS": 1, "EPILOGUE": 0}
    one = Launch("released", (1, 1, 1), 32, (), shared=nbytes + 136, defines=defines, overlap=False)
    given = np.random.default_rng(t).integers(0, 2**16, (t, SLAB), dtype=np.uint16)

    def released(rows: Array, code: int = 0) -> Array:
        stage = np.zeros(nbytes, np.uint8)
        stage[: 2 * t * SLAB] = slabs(rows.view(DType.BF16.numpy)).reshape(-1).view(np.uint8)
        stage[2 * t * SLAB :][:2048] = code  # of the first n-tile; its scales follow
        held, out = buffer("stage", stage, writable=False), buffer("released", 4 * 32)
        Emulator()([held, out], [Step(PROBES, one, (held, out))])
        return out.data.view(np.uint32)

    before = released(given)
    assert (released(given, code=1) != before).all()
    for row in range(0, t, 16):
        other = given.copy()
        other[row : row + 16, -16:] ^= 1
        assert (released(other) != before).all(), row
