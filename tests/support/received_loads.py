"""What a kernel gives to `received` on the emulator: it must depend on all loads from memory that
is then released.
"""

from __future__ import annotations

import ctypes
from dataclasses import replace

import numpy as np
from emulator.compiler import library_of
from emulator.runner import Emulator
from support.kernel_runner import Call, launch, rule_of, source_of

from thor_dflash.plugins.launch import Device


def received(call: Call, device: Device) -> int:
    """A checksum of all values that the last launch of a call gives to `received`."""
    op = call.site.op
    one = rule_of(op).launches(call.site, device)[-1]
    launch(call, Emulator(), device)
    library = library_of(source_of(op, one), tuple(sorted(one.defines.items())))
    return ctypes.c_uint64.in_dll(library, "emulated_received").value


def tells(call: Call, device: Device, port: str, byte: int) -> bool:
    """Whether what is given to `received` depends on a byte of an input."""
    changed = call.inputs[port].copy()
    changed.reshape(-1).view(np.uint8)[byte] ^= 1
    other = replace(call, inputs={**call.inputs, port: changed})
    return received(other, device) != received(call, device)
