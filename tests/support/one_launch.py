"""Runs a single launch of plugins/standard on the emulator."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from emulator.runner import Emulator
from support.kernel_runner import CANARY, GUARD, IMMUTABLE, Buffer, Pointers, Step, Value, buffer

from thor_dflash.core.tensors import Array
from thor_dflash.plugins import standard
from thor_dflash.plugins.launch import Argument, Launch, Pointer, PointerTable, Scratch, Table

FOLDER = Path(standard.__file__).parent


def _value(argument: Argument, ports: Mapping[str, Buffer]) -> Value:
    """An argument as a backend gets it."""
    match argument:
        case Pointer(port):
            return ports.get(port)
        case PointerTable(names):
            return Pointers(tuple(ports[name] for name in names))
        case Table(values):
            return buffer("table", values, writable=False, kernels=False)
        case Scratch():
            raise AssertionError("these launches have no scratch")
        case _:
            return argument


def execute(
    one: Launch,
    inputs: Mapping[str, Array],
    outputs: Mapping[str, Array],
    seed: int = 0,
    fixed: frozenset[str] = IMMUTABLE,
) -> None:
    """Run a launch and put its results into `outputs`, whose memory is poisoned before. The inputs
    that are not `fixed` may have been written by the previous kernel.
    """
    ports = {n: buffer(n, x, writable=False, kernels=n not in fixed) for n, x in inputs.items()}
    ports |= {n: buffer(n, x.nbytes) for n, x in outputs.items()}
    arguments = tuple(_value(x, ports) for x in one.arguments)
    tables = [x for x in arguments if isinstance(x, Buffer) and x.name == "table"]
    Emulator(seed=seed)([*ports.values(), *tables], [Step(FOLDER / one.source, one, arguments)])
    for name, x in outputs.items():
        memory = ports[name].memory
        assert np.all(memory[:GUARD] == CANARY), name
        assert np.all(memory[-GUARD:] == CANARY), name
        x.reshape(-1).view(np.uint8)[:] = ports[name].data
