"""The emulator on the order of kernels and copies: what a launch must have done when it ends."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from emulator.compiler import COMPILER, MACHINE, EmulatorFault
from emulator.runner import Memory, run

pytestmark = [
    pytest.mark.emulator,
    pytest.mark.skipif(COMPILER is None, reason="needs g++ (Debian package g++)"),
]


def probe(kernel: str, *numbers: int, reads: bool = True, early: bool = False) -> None:
    """Run two blocks of a kernel of probes.cu, whose first argument, if it `reads`, is 32 times 16
    bytes of ones, and all others are integers.
    """
    raw = np.ones(132, np.float32)
    x = raw[-raw.ctypes.data // 4 % 4 :][:128]
    arguments: list[ctypes.c_void_p | ctypes.c_int32 | ctypes.c_float]
    arguments = [ctypes.c_void_p(x.ctypes.data)] if reads else []
    arguments += [ctypes.c_int32(n) for n in numbers]
    memory = [Memory(x.ctypes.data, x.nbytes, False, early, early)]
    run(MACHINE / "probes.cu", {}, kernel, (2, 1, 1), 32, 512, arguments, memory)


@pytest.mark.parametrize("valid", [0, 1])
def test_a_copy_that_outlives_its_thread_is_reported(valid: int) -> None:
    probe("wrong_end", -1, valid)
    with pytest.raises(EmulatorFault, match="the thread ended without waiting"):
        probe("wrong_end", 31, valid)


def test_every_block_that_waits_lets_the_next_kernel_start() -> None:
    probe("wrong_no_let", -1, reads=False)
    with pytest.raises(EmulatorFault, match=r"block .1, 0, 0. ended without let_next_start"):
        probe("wrong_no_let", 1, reads=False)


def test_what_is_read_early_is_requested_before_the_next_kernel_may_start() -> None:
    probe("wrong_let", 0, early=True)
    probe("wrong_let", 1)
    with pytest.raises(EmulatorFault, match="read early, after let_next_start"):
        probe("wrong_let", 1, early=True)
