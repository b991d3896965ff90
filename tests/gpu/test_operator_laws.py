"""Laws of the operators' kernels on the GPU: results do not depend on other rows or on the run,
weights are decoded exactly, sizes may be extreme.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from support import gdn_cases
from support.gdn_epilogue_calls import check_left, finishing, normed_case, taking
from support.gpu_backend import Gpu
from support.kernel_cases import cases_of, every_code
from support.kernel_runner import Refused, call_of, compare, in_kernel_types, launch
from support.linear_shapes import BF16
from support.op_cases import OpCase
from support.row_law import cut, outputs_by_row, prefixes, rows_of, same_bits, served_apart
from support.verify_attention_cases import case_of

from thor_dflash.core.tensors import DType
from thor_dflash.plugins import GDN, LINEAR, OPS, VERIFY_ATTENTION
from thor_dflash.plugins.contract import Op
from thor_dflash.plugins.launch import Device

pytestmark = pytest.mark.gpu
TIMES = 20
"""Runs of each call, since a race shows only now and then."""
FEW = 32
"""Most rows of a block; calls with more rows have kernels of their own."""
LONGEST = 262_144
"""Largest context of Qwen3.6-27B, positions."""

every_case = pytest.mark.parametrize(
    ("op", "name"),
    [pytest.param(op, name, id=f"{op.name}-{name}") for op in OPS for name in cases_of(op)],
)
every_prefix = pytest.mark.parametrize(
    ("op", "name"),
    [pytest.param(op, name, id=f"{op.name}-{name}") for op in OPS for name in prefixes(op)],
)


@pytest.fixture(scope="module")
def gpu(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gpu]:
    made = Gpu(tmp_path_factory.mktemp("cubins"))
    yield made
    made.close()


@pytest.mark.parametrize("rows", [16, 48])
def test_every_fp4_code_times_every_scale_is_exact(gpu: Gpu, rows: int) -> None:
    call = call_of(LINEAR, every_code(rows))
    y = launch(call, gpu, gpu.driver.info.device)["y0"].astype(np.float64)
    np.testing.assert_array_equal(y, call.want["y0"].astype(np.float64))


@every_case
def test_the_same_call_gives_the_same_bits_every_time(gpu: Gpu, op: Op, name: str) -> None:
    try:
        call = call_of(op, cases_of(op)[name])
    except Refused:
        return
    device = gpu.driver.info.device
    first = {n: x.copy() for n, x in launch(call, gpu, device).items()}
    for n in range(TIMES):
        same_bits(launch(call, gpu, device, poison=(0x5A, 0xFF)[n % 2]), first)


@every_prefix
def test_a_row_does_not_depend_on_the_rows_after_it(gpu: Gpu, op: Op, name: str) -> None:
    case = in_kernel_types(op, cases_of(op)[name])
    rows, device = rows_of(op, case), gpu.driver.info.device
    try:
        call = call_of(op, case)
    except Refused:
        return
    whole = outputs_by_row(op, launch(call, gpu, device), call)
    same, choice = served_apart(op, rows), device.choice(call.site)
    for count in {max(same + 1, rows // 2), same + 1} - {rows}:
        if count > rows:
            continue
        part = call_of(op, cut(op, case, slice(count)))
        # Another choice may cut K otherwise, and so round sums otherwise.
        alike = device.choosing(part.site, choice) if choice else device
        got = outputs_by_row(op, launch(part, gpu, alike), part)
        same_bits(got, {n: x[:count] for n, x in whole.items()})


@pytest.mark.parametrize("op", [op for op in OPS if op.name in ("linear", "head")],
                         ids=lambda op: op.name)  # fmt: skip
def test_a_row_does_not_depend_on_its_place_or_its_neighbours(gpu: Gpu, op: Op) -> None:
    device = gpu.driver.info.device
    for name in cases_of(op):
        case = in_kernel_types(op, cases_of(op)[name])
        try:
            call = call_of(op, case)
        except Refused:
            continue
        forward = outputs_by_row(op, launch(call, gpu, device), call)
        turned = call_of(op, cut(op, case, slice(None, None, -1)))
        backward = outputs_by_row(op, launch(turned, gpu, device), turned)
        same_bits({n: np.ascontiguousarray(x[::-1]) for n, x in backward.items()}, forward)


@pytest.mark.parametrize("rows", [1, 13, 16, 29, 32])
@pytest.mark.parametrize("saves", ["records", "states"])
def test_gdn_leaves_rows_for_the_next_product(gpu: Gpu, rows: int, saves: str) -> None:
    """With the results of a call that leaves none, and the same bits every time."""
    device = gpu.driver.info.device
    plain = call_of(GDN, gdn_cases.case_of(rows, rows, 16, 11, (16, 48), saves=saves))
    call = finishing(plain, np.random.default_rng(rows).normal(1, 0.2, 128).astype(BF16))
    first = launch(call, gpu, device)
    same_bits(first, launch(plain, gpu, device))
    check_left(call, first, 0.0)
    for _ in range(TIMES):
        same_bits(launch(call, gpu, device), first)


@pytest.mark.parametrize("rows", [1, 13, 16, 29, 32])
@pytest.mark.parametrize(("heads", "columns"), [(48, 5120), (7, 640), (1, 128)])
def test_a_product_applies_the_factors_of_heads(
    gpu: Gpu, rows: int, heads: int, columns: int
) -> None:
    real = gpu.driver.info.device
    call = taking(normed_case(rows, heads, columns))
    for device in (real, Device(real.capability, 20, real.shared), Device(real.capability, 3)):
        first = launch(call, gpu, device)
        compare(LINEAR, first, call.want, nearest=False)
        for _ in range(TIMES):
            same_bits(launch(call, gpu, device), first)


@pytest.mark.parametrize(("rows", "heads", "kv"), [(16, 4, 2), (FEW + 1, 2, 1)])
def test_attention_at_the_end_of_the_longest_context(
    gpu: Gpu, rows: int, heads: int, kv: int
) -> None:
    """Keys are scaled so that scores have a standard deviation of about 3. Then about thirty of all
    the positions have most of the weight.
    """
    case = case_of(rows, LONGEST - rows, DType.FP8, LONGEST, heads, kv)
    wide = {"scale_k": case.inputs["scale_k"] * np.float32(3)}
    call = call_of(VERIFY_ATTENTION, OpCase(case.name, {**case.inputs, **wide}, case.attributes))
    compare(VERIFY_ATTENTION, launch(call, gpu, gpu.driver.info.device), call.want)
