"""Tests that all operators share: their kernels, on a CPU, against their references."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from emulator.compiler import COMPILER, FLAGS, signatures
from emulator.runner import LATE, Emulator
from support.kernel_cases import (
    LEANING,
    call_site,
    cases_by_operator,
    cases_of,
    every_code,
    taken_of,
)
from support.kernel_runner import (
    Call,
    call_of,
    compare,
    in_kernel_types,
    launch,
    packed,
    rule,
    rule_of,
    site_of,
    source_of,
    squares,
)
from support.kernel_usage import usage_of
from support.row_law import cut, outputs_by_row, prefixes, rows_of, same_bits, served_apart
from support.sites_27b import sites as model_sites

from thor_dflash.core.tensors import Array
from thor_dflash.plugins import LINEAR, OPS
from thor_dflash.plugins.contract import Op
from thor_dflash.plugins.cuda.compile import OPTIONS, architecture
from thor_dflash.plugins.launch import (
    H100,
    THOR,
    BufferOffset,
    CallSite,
    Device,
    Int,
    Launch,
    Pointer,
    PointerTable,
    Real,
    Scratch,
    Table,
)

OPERATORS = [op for op in OPS if rule(op) is not None]
every_operator = pytest.mark.parametrize("op", OPERATORS, ids=lambda op: op.name)
emulated = pytest.mark.skipif(COMPILER is None, reason="needs g++ (Debian package g++)")
DEVICES = {"thor": THOR, "h100": H100}
WITHOUT_PART = ("more_mixed_16_of_640", "more_segments_16", "more_bfloat16_16_rows")
"""Cases of linear and head in which some warps of a block have no part of an item."""
SMALL = Device((9, 0), 12)
"""Each block has more to do, and there are fewer to emulate, than on an H100."""
SLOW_TO_COMPILE = ("gdn", "verify_attention", "draft_attention", "sample")
FEW = ("fp8", "nan_row", "reduced_vocabulary")
"""Cases in whose launches rows are as far apart as in "more_equals_far_and_near" (head) and
"mixed_segments" (linear).
"""
FORWARD, BACKWARDS, SHUFFLED = 0, 1, 2
"""Seeds of the emulator: the order of threads and blocks."""
Defines = tuple[tuple[str, int], ...]


def taken(op: Op) -> list[str]:
    """Names of the cases that the kernels do not refuse."""
    return [name for name, _ in taken_of(op)]


every_case = cases_by_operator(OPERATORS, taken)


@cache
def forward(operator: str, name: str) -> tuple[Call, dict[str, Array]]:
    """The call and outputs of a case, run once for all tests that need it."""
    (op,) = (op for op in OPS if op.name == operator)
    call = call_of(op, cases_of(op)[name])
    got = launch(call, Emulator(FORWARD), THOR)
    for x in got.values():
        x.flags.writeable = False
    return call, got


# ---- results -------------------------------------------------------------------------------------
@emulated
@every_case
def test_kernels_equal_the_reference(op: Op, name: str) -> None:
    call, got = forward(op.name, name)
    assert dict(call.site.ports) == dict(call_site(op, cases_of(op)[name]).ports)
    nearest = name not in LEANING
    compare(op, got, call.want, nearest)
    # If the bits depend on the order of threads or on what memory held before, a barrier is
    # missing, an element is never written, or something is read that was never written.
    same_bits(launch(call, Emulator(SHUFFLED), THOR, poison=0x5A), got)
    compare(op, launch(call, Emulator(BACKWARDS), SMALL), call.want, nearest)


@emulated
@pytest.mark.emulator
@every_operator
def test_any_warp_may_be_late(op: Op) -> None:
    """None may miss the end of a barrier's phase, or give other bits, if all others run first. With
    one multiprocessor, each block has most to do.
    """
    alone = Device((9, 0), 1)
    for name in (n for i, n in enumerate(taken(op)) if i % 25 == 0 or n in WITHOUT_PART):
        call = call_of(op, cases_of(op)[name])
        got = launch(call, Emulator(FORWARD), alone)
        most = max(one.threads for one in rule_of(op).launches(call.site, alone))
        for warp in range(most // 32):
            same_bits(launch(call, Emulator(LATE + warp), alone), got)


@emulated
@cases_by_operator([LINEAR], taken)
def test_linear_takes_and_leaves_sums_of_squares(op: Op, name: str) -> None:
    case = cases_of(op)[name]
    few = len(case.inputs["x"]) <= 32
    takes = few and "norm_weight" in case.inputs
    leaves = few and case.attributes.get("segments", 1) == 1
    if not (takes or leaves):
        return
    call = call_of(op, case, takes, leaves)
    got = launch(call, Emulator(FORWARD), THOR)
    compare(op, got, call.want, name not in LEANING)
    if leaves:  # of the rows as stored, which the next norm reads
        np.testing.assert_allclose(got["y0_squares"], squares(got["y0"]), rtol=1e-6)


@emulated
@pytest.mark.parametrize("rows", [16, 48])
def test_every_fp4_code_times_every_scale_is_exact(rows: int) -> None:
    op = LINEAR
    call = call_of(op, every_code(rows))
    y = launch(call, Emulator(FORWARD), THOR)["y0"].astype(np.float64)
    np.testing.assert_array_equal(y, call.want["y0"].astype(np.float64))


@emulated
@cases_by_operator(
    OPERATORS,
    lambda op: [name for name in prefixes(op) if name in taken(op)],
    further=(*FEW, "more_cancelled", "more_segments_16", "gated_head_norm"),
)
def test_a_row_does_not_depend_on_the_rows_after_it(op: Op, name: str) -> None:
    case = in_kernel_types(op, cases_of(op)[name])
    call, got = forward(op.name, name)
    rows, whole = rows_of(op, case), outputs_by_row(op, got, call)
    same = served_apart(op, rows)
    for count in {max(same + 1, rows // 2), same + 1} & set(range(1, rows)):
        part_call = call_of(op, cut(op, case, slice(count)))
        part = outputs_by_row(op, launch(part_call, Emulator(FORWARD), THOR), part_call)
        same_bits(part, {n: x[:count] for n, x in whole.items()})


@emulated
@cases_by_operator([op for op in OPERATORS if op.name in ("linear", "head")], taken)
def test_a_row_does_not_depend_on_its_place_or_its_neighbours(op: Op, name: str) -> None:
    case = in_kernel_types(op, cases_of(op)[name])
    call, got = forward(op.name, name)
    turned = call_of(op, cut(op, case, slice(None, None, -1)))
    backward = outputs_by_row(op, launch(turned, Emulator(FORWARD), THOR), turned)
    same_bits(
        {n: np.ascontiguousarray(x[::-1]) for n, x in backward.items()},
        outputs_by_row(op, got, call),
    )


# ---- geometry ------------------------------------------------------------------------------------
def sites(op: Op) -> Iterator[tuple[str, CallSite]]:
    """Every call that the kernels do not refuse: of the cases, and of the full model."""
    yield from taken_of(op)
    for name, attributes, inputs in model_sites(op.name):
        yield name, packed(site_of(op, attributes, inputs), {})[0]


@cache
def launches(operator: str) -> tuple[tuple[str, Launch], ...]:
    (op,) = (op for op in OPS if op.name == operator)
    return tuple(
        (f"{name} on {where}", one)
        for name, site in sites(op)
        for where, device in DEVICES.items()
        for one in rule_of(op).launches(site, device)
    )


KINDS = {
    Pointer: "pointer", PointerTable: "pointer", Scratch: "pointer", BufferOffset: "pointer",
    Table: "pointer", Int: "int", Real: "real",
}  # fmt: skip


@every_operator
def test_the_geometry_of_every_launch_is_legal(op: Op) -> None:
    for name, one in launches(op.name):
        x, y, z = one.grid
        assert 1 <= x < 2**31, name
        assert 1 <= y <= 65535, name
        assert 1 <= z <= 65535, name
        assert 32 <= one.threads <= 1024, name
        assert one.threads % 32 == 0, name
        assert 0 <= one.shared <= THOR.shared, name
        assert 1 <= one.cluster <= 8, name
        assert x % one.cluster == 0, name
        for argument in one.arguments:
            if isinstance(argument, Int):
                assert -(2**31) <= argument.value < 2**31, name
            elif isinstance(argument, Scratch):
                assert argument.nbytes > 0, name
            elif isinstance(argument, Table):
                assert argument.values.flags.c_contiguous, name


@emulated
@every_operator
def test_arguments_are_those_of_the_kernel(op: Op) -> None:
    seen = set()
    for name, one in launches(op.name):
        kinds = tuple(KINDS[type(argument)] for argument in one.arguments)
        key = (one.source, one.kernel, frozenset(one.defines), kinds)  # no value changes them
        if key in seen:
            continue
        seen.add(key)
        known = signatures(source_of(op, one), one.defines)
        assert one.kernel in known, name
        assert kinds == known[one.kernel], f"{one.kernel}, {name}"


# ---- compilation ---------------------------------------------------------------------------------
def test_the_compiler_may_not_fuse_a_product_and_a_sum() -> None:
    """NVRTC would fuse them in some rows of an unrolled loop and not in others. Nor may g++."""
    assert "--fmad=false" in OPTIONS
    assert "-ffp-contract=off" in FLAGS


def compiled(op: Op, arch: str) -> dict[tuple[Path, Defines], dict[str, int]]:
    """Source and constants of an operator's launches -> kernel -> dynamic shared memory, bytes."""
    wanted: dict[tuple[Path, Defines], dict[str, int]] = {}
    where = next(n for n, d in DEVICES.items() if architecture(d.capability) == arch)
    for name, one in launches(op.name):
        if name.endswith(f" on {where}"):
            defines = tuple((name, int(value)) for name, value in sorted(one.defines.items()))
            dynamic = wanted.setdefault((source_of(op, one), defines), {})
            dynamic[one.kernel] = max(dynamic.get(one.kernel, 0), one.shared)
    return wanted


def check_compiled(source: Path, defines: Defines, kernels: Mapping[str, int], arch: str) -> None:
    usage = usage_of(source, dict(defines), arch)
    for kernel, shared in kernels.items():
        found = usage[kernel]
        assert found.shared + shared <= THOR.shared, f"{source.name} {defines} {kernel}"
        assert not found.spilled, f"{source.name} {defines} {kernel}: {found}"


@pytest.mark.parametrize(
    "op",
    [
        pytest.param(op, marks=pytest.mark.slow if op.name in SLOW_TO_COMPILE else ())
        for op in OPERATORS
    ],
    ids=lambda op: op.name,
)
def test_every_kernel_compiles_for_a_thor(op: Op) -> None:
    """With the constants of one call of the full model, or of a case where it has none."""
    pytest.importorskip("cuda.bindings.nvrtc", reason="needs NVRTC (the extra [cuda])")
    last = {tuple(kernels): key for key, kernels in compiled(op, "sm_110").items()}
    for key in last.values():
        check_compiled(*key, compiled(op, "sm_110")[key], "sm_110")
