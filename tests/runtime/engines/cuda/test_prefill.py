"""More programs on the CPU, as in test_programs.py: prefill, and blocks of another width."""

from __future__ import annotations

from pathlib import Path

import pytest
from emulator import compiler
from support.engine_pair import packages, paired

from thor_dflash.runtime.engines.cuda.binding import cuda

pytestmark = pytest.mark.skipif(compiler.COMPILER is None, reason="needs g++")


@pytest.mark.slow
def test_a_prompt_and_blocks_of_another_width(tmp_path: Path) -> None:
    """A prefill step of 48 rows, 37 of them valid, folds a whole block. It updates the convolution
    tails but not the records, so these two are at different places for the next block.
    """
    with paired(packages(tmp_path), 8) as pair:
        pair.cycle([5, 6, 7, 8, 9, 10, 11])
        pair.prefill(list(range(100, 137)))
        pair.cycle([12, 13])
        tensors = {n: cuda(t) for n, t in pair.ours.state.tensors.items()}
        places = {n: t.buffer.current for n, t in tensors.items() if t.buffer}
        assert places == {n: n.endswith(".tail") for n in tensors if n in pair.moved()}
        assert len(pair.device.graphs) == 2  # a prefill step and a cycle
        kernels = {work.kernel for work in pair.device.ran}
        assert {"linear", "linear_prefill", "gdn_prefill", "attend_dense"} <= kernels


@pytest.mark.slow
def test_the_rest_of_a_prompt_is_read_by_the_kernels_of_few_rows(tmp_path: Path) -> None:
    with paired(packages(tmp_path), 8) as pair:
        for count in (9, 17, 32):
            pair.device.ran.clear()
            pair.prefill(list(range(100, 100 + count)))
            kernels = {work.kernel for work in pair.device.ran}
            assert {"linear", "gdn_prefill", "attend_split"} <= kernels
            assert "linear_prefill" not in kernels
            pair.cycle([5, 6, 7])
