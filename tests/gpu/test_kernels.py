"""Every operator's kernels on the GPU against the reference, on the emulator's cases."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from support.gpu_backend import Gpu
from support.kernel_cases import LEANING, cases_of
from support.kernel_runner import Refused, call_of, compare, launch

from thor_dflash.plugins import OPS
from thor_dflash.plugins.contract import Op

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def gpu(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gpu]:
    made = Gpu(tmp_path_factory.mktemp("cubins"))
    yield made
    made.close()


@pytest.mark.parametrize(
    ("op", "name"),
    [pytest.param(op, name, id=f"{op.name}-{name}") for op in OPS for name in cases_of(op)],
)
def test_kernels_on_the_gpu_equal_the_reference(gpu: Gpu, op: Op, name: str) -> None:
    try:
        call = call_of(op, cases_of(op)[name])
    except Refused:
        return  # the message is tested on the CPU
    device = gpu.driver.info.device
    got = launch(call, gpu, device)
    compare(op, got, call.want, nearest=name not in LEANING)
    for poison in (0x5A, 0xFF):
        again = launch(call, gpu, device, poison=poison)
        for port, value in got.items():
            np.testing.assert_array_equal(again[port].view(np.uint8), value.view(np.uint8), port)
