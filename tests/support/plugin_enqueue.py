"""Runs a call as TensorRT would, through its plugin's enqueue, on memory of the tests."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np
import pytest
from emulator import runner
from stand_ins import tensorrt_module as trt
from support.kernel_runner import GUARD, Call, rule_of

from thor_dflash.core.tensors import Array
from thor_dflash.plugins.cuda import op_call as calls
from thor_dflash.plugins.launch import Device, Launch
from thor_dflash.plugins.tensorrt.node import describe, tensor_of

POISON = 0xFF


class Machine(Protocol):
    """What a plugin needs to run: device memory, kernels and a stream."""

    kernels: Any
    stream: int

    def allocate(self, nbytes: int) -> int: ...

    def put(self, address: int, content: Array) -> None: ...

    def get(self, address: int, nbytes: int) -> Array: ...


class Ready:
    """A call's plugin with memory for its tensors and workspace. A state that is updated in place
    has one buffer for its old and new value; with `apart` it has two.
    """

    def __init__(self, machine: Machine, call: Call, *, apart: bool) -> None:
        from thor_dflash.plugins.tensorrt.host import Messages
        from thor_dflash.plugins.tensorrt.plugin import register

        self.machine, self.call = machine, call
        self.node = describe(call.site, set(call.want))
        registry: Any = trt.get_plugin_registry()
        registry.creators.clear()
        kernels = machine.kernels
        register(registry, kernels.device, kernels, [self.node], Messages())
        self.plugin = trt.made(self.node)
        self.ins = [trt.desc(tensor_of(call.site.ports[port])) for port in self.node.inputs]
        self.outs = [trt.desc(tensor_of(call.site.ports[port])) for port in self.node.outputs]
        # A driver refuses to allocate 0 bytes, which is the size of `kinds`.
        self.at = {p: machine.allocate(max(1, x.nbytes)) for p, x in call.inputs.items()}
        for port, x in call.want.items():
            source = call.site.op.alias_of(port) or port.replace("next_", "", 1)
            shared = port in rule_of(call.site.op).in_place and not apart
            self.at[port] = self.at[source] if shared else machine.allocate(x.nbytes)
        each = [
            [trt.DynamicPluginTensorDesc(d, d.dims, d.dims, d.dims) for d in descs]
            for descs in (self.ins, self.outs)
        ]
        self.size = self.plugin.get_workspace_size(*each)
        self.workspace = machine.allocate(max(1, self.size))
        self.plugin.on_shape_change(self.ins, self.outs)

    def fill(self) -> None:
        """Fill outputs and workspace with POISON, then write the inputs."""
        put = self.machine.put
        put(self.workspace, np.full(self.size, POISON, np.uint8))
        for port, x in self.call.want.items():
            put(self.at[port], np.full(x.nbytes, POISON, np.uint8))
        for port, x in self.call.inputs.items():
            put(self.at[port], x)

    def enqueue(self) -> None:
        """Call the plugin's enqueue as TensorRT does."""
        ins = [self.at[port] for port in self.node.inputs]
        outs = [self.at[port] for port in self.node.outputs]
        self.plugin.enqueue(self.ins, self.outs, ins, outs, self.workspace, self.machine.stream)

    def outputs(self) -> dict[str, Array]:
        """Returns the contents of the outputs' memory."""
        return {
            port: self.machine.get(self.at[port], x.nbytes).view(x.dtype).reshape(x.shape)
            for port, x in self.call.want.items()
        }


# ---- on the CPU --------------------------------------------------------------------------------
class Emulated:
    """Stands in for the CUDA driver: device memory is host memory, kernels are emulated."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, device: Device) -> None:
        self.cu = SimpleNamespace(CUstream=int)
        self.stream = 7
        self.kernels: Any = SimpleNamespace(
            gate=self, device=device, overlap=True, function=lambda source, launch: source
        )
        self.capturing = False
        self.done: list[str] = []
        """Names of the kernels launched and of all other driver calls but queries, in order."""
        self.overlapped: list[bool] = []
        """Of each kernel launched: whether it may start before the previous one has ended."""
        self._held: dict[int, Array] = {}
        monkeypatch.setattr(calls, "enqueue", self._launch)

    def allocate(self, nbytes: int) -> int:
        raw = np.full(nbytes + 2 * GUARD, POISON, np.uint8)
        address = raw.ctypes.data + -raw.ctypes.data % GUARD
        self._held[address] = raw
        return int(address)

    def free(self, address: int) -> None:
        self.done.append("cuMemFree")
        del self._held[address]

    def put(self, address: int, content: Array) -> None:
        data = np.ascontiguousarray(content)
        ctypes.memmove(address, data.ctypes.data, data.nbytes)

    def get(self, address: int, nbytes: int) -> Array:
        return np.frombuffer(ctypes.string_at(address, nbytes), np.uint8)

    def __call__(self, name: str, *given: Any) -> Any:
        if name == "cuStreamIsCapturing":
            return int(self.capturing)
        self.done.append(name)
        assert given[-1] == self.stream, name
        if name == "cuMemsetD8Async":
            ctypes.memset(*given[:3])
        else:
            assert name in ("cuMemcpyHtoDAsync", "cuMemcpyDtoDAsync"), name
            ctypes.memmove(*given[:3])
        return None

    def _launch(
        self,
        gate: Any,
        stream: int,
        source: Path,
        launch: Launch,
        arguments: Sequence[tuple[str, Any]],
        *,
        overlap: bool,
    ) -> None:
        assert gate is self
        assert stream == self.stream
        self.done.append(launch.kernel)
        self.overlapped.append(overlap)
        kinds = {"address": ctypes.c_void_p, "int": ctypes.c_int32, "real": ctypes.c_float}
        runner.run(
            source.resolve(),
            launch.defines,
            launch.kernel,
            launch.grid,
            launch.threads,
            launch.shared,
            [kinds[kind](value) for kind, value in arguments],
            [runner.Memory(address, raw.nbytes - 2 * GUARD) for address, raw in self._held.items()],
            cluster=launch.cluster,
        )
