"""The other programs on the CPU, as in test_cuda_programs.py: a prompt, and a narrower block."""

from __future__ import annotations

from pathlib import Path

import emulation
import pytest
from paired import packages, paired

pytestmark = pytest.mark.skipif(emulation.COMPILER is None, reason="needs g++")


def test_a_prompt_and_blocks_of_another_width(tmp_path: Path) -> None:
    """A whole block is folded by a block, a part of one by a prompt of 37 rows and 11 for show."""
    with paired(packages(tmp_path), 8) as pair:
        pair.cycle([5, 6, 7, 8, 9, 10, 11])
        pair.cycle([12, 13])
        pair.prefill(list(range(100, 137)))
        kernels = {work.kernel for work in pair.device.ran}
        assert {"linear", "linear_prefill", "gdn_prefill", "attend_dense"} <= kernels
