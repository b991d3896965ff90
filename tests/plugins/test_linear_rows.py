"""The launch that prepares the rows of a product of few rows, where part of its input is complete
before the previous launch has ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import kernels
import numpy as np
import pytest
from emulation import Emulator
from emulator_code import COMPILER, EmulatorFault
from products import BF16, nvfp4

from thor_dflash.plugins import LINEAR
from thor_dflash.plugins.launch import Device
from thor_dflash.plugins.linear import launch
from thor_dflash.plugins.op import Case
from thor_dflash.tensors import Array

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++ (Debian package g++)")
SMALL = Device((9, 0), 12)


@pytest.mark.parametrize(("gate", "head"), [("silu", 128), ("sigmoid", 0)])
@pytest.mark.parametrize("k", [384, 5120])
def test_a_settled_gate_is_read_before_the_previous_kernel_has_ended(
    gate: str, head: int, k: int
) -> None:
    """With the same results. Of 5,120 columns, a thread of a norm over the whole row has several
    groups, and only the gate of the first is read early.
    """
    rng = np.random.default_rng(k)
    inputs: dict[str, Array] = {
        "x": rng.normal(0, 1, (5, k)).astype(BF16),
        "gate": rng.normal(0, 2, (5, k)).astype(BF16),
        "norm_weight": rng.normal(1, 0.2, head or k).astype(np.float32),
    }
    inputs |= {f"{name}0": value for name, value in nvfp4(rng, 64, k).items()}
    attributes = {"gate": gate, "head_dim": head} if head else {"gate": gate}
    call = kernels.call_of(LINEAR, Case("settled", inputs, attributes))
    want = kernels.launch(call, Emulator(0), SMALL)
    early = replace(call, site=replace(call.site, settled=frozenset({"gate"})))
    assert [one.defines.get("SETTLED") for one in launch.launches(early.site, SMALL)] == [1, None]
    got = kernels.launch(early, Emulator(0), SMALL)
    np.testing.assert_array_equal(got["y0"].view(np.uint16), want["y0"].view(np.uint16))

    def written(buffers: Sequence[kernels.Buffer], steps: Sequence[kernels.Step]) -> None:
        for buffer in buffers:
            buffer.from_kernels |= buffer.name == "gate"
        Emulator(0)(buffers, steps)

    with pytest.raises(EmulatorFault, match="memory that other kernels use"):
        kernels.launch(early, written, SMALL)
