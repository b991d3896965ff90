"""gdn's kernels against the reference, and laws that must hold bit for bit."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
from emulator import runner
from emulator.compiler import EmulatorFault
from emulator.runner import EARLY, Emulator
from support.coverings import some
from support.gdn_cases import case_of, poisoned, prefill
from support.kernel_runner import call_of, compare, launch
from support.op_cases import OpCase

from thor_dflash.core.tensors import Array
from thor_dflash.plugins.gdn import OP
from thor_dflash.plugins.launch import H100, THOR, Device

FLOAT_ERROR = 2e-6
"""Largest error of the float32 outputs of a verify, relative to the largest value."""
CHUNK_ERROR = 5e-5
"""The same of a prefill, whose products take each factor as a pair of bf16: an error of 2^-16."""


def outputs(case: OpCase, device: Device = THOR, seed: int = 0) -> Mapping[str, Array]:
    with np.errstate(invalid="ignore"):  # the reference of poisoned rows
        call = call_of(OP, case)
    return launch(call, Emulator(seed=seed), device)


def check(case: OpCase, device: Device = THOR, seed: int = 0) -> Mapping[str, Array]:
    """Run a case, poisoned, and compare with the reference; float32 outputs more closely."""
    got = outputs(poisoned(case), device, seed)
    want = OP.reference(case.inputs, OP.complete(case.attributes))
    compare(OP, got, want)
    for name, value in want.items():
        if value.dtype == np.float32:
            error = np.abs(got[name] - value).max() / np.abs(value).max()
            assert error < (CHUNK_ERROR if "valid" in case.inputs else FLOAT_ERROR), (name, error)
    return got


@pytest.mark.parametrize(
    ("rows", "held", "accepted"),
    some(
        [(16, 16, 0), (16, 16, 3), (16, 16, 16), (1, 16, 7), (16, 1, 1), (32, 32, 31), (7, 5, 4)],
        [(16, 16, 3), (32, 32, 31), (7, 5, 4)],
    ),
)
def test_a_block_is_the_reference_whatever_is_folded(rows: int, held: int, accepted: int) -> None:
    check(case_of(accepted, rows, held, accepted), seed=accepted)


@pytest.mark.parametrize("heads", [(3, 9), (1, 5)], ids=str)
def test_value_heads_of_any_ratio_to_key_heads(heads: tuple[int, int]) -> None:
    check(case_of(3, 5, 4, 3, heads))


@pytest.mark.parametrize("accepted", some([0, 1, 6], [6]))
def test_a_state_is_saved_after_every_row(accepted: int) -> None:
    check(case_of(accepted, 6, 6, accepted, saves="states"))


def records_of(got: Mapping[str, Array], keep: slice) -> dict[str, Array]:
    """Records among the outputs of a call, as inputs of a later call."""
    return {n.removeprefix("next_"): v[keep] for n, v in got.items() if n.startswith("next_record")}


def after(case: OpCase, more: Mapping[str, Array], accepted: int) -> OpCase:
    """The case with other states and records, and another number of records to fold."""
    count = np.array([accepted], np.int32)
    return OpCase(case.name, {**case.inputs, **more, "accepted": count}, case.attributes)


def test_rows_folded_at_once_one_by_one_or_in_their_block_give_the_same_bits() -> None:
    rows = 5
    case = case_of(21, rows, rows, 2)
    block = outputs(case)
    once = outputs(after(case, {**_state(block), **records_of(block, slice(None))}, rows))
    now = case
    alone: list[Array] = []
    for t in range(rows):
        row = {n: case.inputs[n][t : t + 1] for n in ("qkv", "b", "a")}
        got = outputs(OpCase("", {**now.inputs, **row}, case.attributes))
        alone.append(got["o"])
        now = after(case, {**_state(got), **records_of(got, slice(None))}, 1)
    step = outputs(now)
    np.testing.assert_array_equal(block["o"], np.concatenate(alone))
    for name in ("next_state", "next_tail"):
        assert once[name].tobytes() == step[name].tobytes(), name
    saved = case_of(21, rows, rows, 0, saves="states")
    start = {n: v for n, v in block.items() if n in ("next_state", "next_tail")}
    inputs = {**case.inputs, "states": saved.inputs["states"]} | {
        n.removeprefix("next_"): v for n, v in start.items()
    }
    inputs = {n: v for n, v in inputs.items() if n not in ("record_k", "record_d", "record_decay")}
    states = outputs(after(OpCase("", inputs, saved.attributes), {}, 0))["next_states"]
    assert states[-1].tobytes() == once["next_state"].tobytes()


def _state(got: Mapping[str, Array]) -> dict[str, Array]:
    return {"state": got["next_state"].copy(), "tail": got["next_tail"].copy()}


def test_bits_depend_neither_on_the_device_nor_on_the_order_of_threads() -> None:
    case = case_of(5, 4, 3, 2, (2, 6))
    want = outputs(case, THOR)
    for device, seed in ((H100, 1), (Device((9, 0), 1), 2), (Device((9, 0), 3), 3)):
        got = outputs(case, device, seed)
        for name, value in want.items():
            assert got[name].tobytes() == value.tobytes(), (name, device)


@pytest.mark.parametrize(
    ("rows", "accepted", "valid"),
    some(
        [(64, 0, 64), (64, 3, 1), (64, 5, 2), (96, 1, 33), (70, 2, 69), (5, 4, 3), (160, 0, 97)],
        [(64, 3, 1), (160, 0, 97)],
    ),
)
def test_a_prefill_is_the_reference_wherever_it_ends(rows: int, accepted: int, valid: int) -> None:
    check(prefill(case_of(valid, rows, 16, accepted, mode="prefill"), valid))


def test_a_prefill_of_keys_that_are_alike_and_states_that_never_fade() -> None:
    """The hardest case for a chunk's triangular system: every row depends strongly on all rows
    before it.
    """
    case = prefill(case_of(1, 128, 4, 0, mode="prefill"), 128)
    qkv = case.inputs["qkv"].copy()
    qkv[:, 128:256] = (3 + 0.3 * qkv[:, 128:256].astype(np.float32)).astype(qkv.dtype)
    slow = {"a_log": np.full(2, -9, np.float32), "b": np.full_like(case.inputs["b"], 5)}
    check(OpCase(case.name, {**case.inputs, **slow, "qkv": qkv}, case.attributes))


def test_a_prefill_of_decays_from_none_to_all() -> None:
    """A row may decay the state to nothing. Decays between rows after it must still be right, not
    the quotient of two cumulative decays that are 0.
    """
    case = prefill(case_of(2, 64, 4, 1, (1, 3), mode="prefill"), 64)
    steep = case.inputs["a"].astype(np.float32) * 40 - 20
    a = steep.astype(case.inputs["a"].dtype)
    check(OpCase(case.name, {**case.inputs, "a": a}, case.attributes))


@pytest.mark.parametrize("accepted", [0, 2])
def test_a_prefill_starts_from_a_saved_state(accepted: int) -> None:
    check(prefill(case_of(3, 40, 4, accepted, mode="prefill", saves="states"), 37))


def test_a_prefill_folds_with_the_same_bits_as_a_verify() -> None:
    """Its only row has decay 1 and beta 0, which leave the folded state as it is."""
    states = []
    for mode in ("verify", "prefill"):
        case = prefill(case_of(6, 1, 5, 4, mode=mode), 1)
        still = {n: np.full_like(case.inputs[n], -1e4) for n in "ab"}
        x = {n: v for n, v in case.inputs.items() if mode == "prefill" or n != "valid"}
        states.append(outputs(OpCase("", x | still, case.attributes))["next_state"])
    assert states[0].tobytes() == states[1].tobytes()


@pytest.mark.parametrize(
    ("kernel", "port"), [(k, p) for k in ("gdn_rows", "gdn_prefill") for p in sorted(EARLY[k])]
)
def test_states_are_read_before_the_previous_kernel_has_ended(
    kernel: str, port: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mode = "prefill" if kernel == "gdn_prefill" else "verify"
    case = case_of(1, 2, 2, 1, mode=mode, saves="states" if port == "states" else "records")
    monkeypatch.setitem(EARLY, kernel, EARLY[kernel] - {port})
    monkeypatch.setattr(runner, "_placed", lambda message, *_: message)
    with pytest.raises(EmulatorFault, match=f"{kernel}: .* before wait_for_previous"):
        outputs(prefill(case, 1) if mode == "prefill" else case)


def test_rows_of_a_prefill_do_not_depend_on_later_ones() -> None:
    long = prefill(case_of(8, 160, 4, 2, mode="prefill"), 150)
    want = outputs(long)["o"]
    short = {n: long.inputs[n][:70] for n in ("qkv", "b", "a")}
    got = outputs(prefill(OpCase("", {**long.inputs, **short}, long.attributes), 66))["o"]
    assert got[:66].tobytes() == want[:66].tobytes()
    assert not got[66:].any()
