"""A stand-in for the module `tensorrt`, as far as plugins and the runtime use it.

It calls a plugin's methods in TensorRT's order, and "runs" an engine by calling the enqueue of its
plugins one after the other. An engine's file holds a program as JSON. PluginField has the defect of
10.13.3 with numpy 2: every element read is the first one.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import ModuleType
from typing import Any

import numpy as np

from thor_dflash.builders.tensorrt.deployment_graph import deploy
from thor_dflash.core import strict_records
from thor_dflash.core.errors import PackageError
from thor_dflash.core.tensors import DType
from thor_dflash.package.launch_program import Program
from thor_dflash.plugins.contract import DOMAIN, VERSION
from thor_dflash.plugins.cuda.enqueue import ALIGNMENT
from thor_dflash.plugins.launch import Shaped
from thor_dflash.plugins.tensorrt.node import KEYS, PluginNode, tensor_of

__version__ = "10.13.3.9"
USERS = (
    "thor_dflash.plugins.tensorrt.plugin",
    "thor_dflash.plugins.tensorrt.host",
    "thor_dflash.runtime.engines.tensorrt.engine",
)
"""Modules that import tensorrt and must therefore be imported anew."""


def _enum(name: str, words: str) -> Any:
    return Enum(name, words.split())


DataType = _enum("DataType", "FLOAT HALF BF16 INT8 INT32 INT64 BOOL UINT8 FP8 INT4 FP4 E8M0")
TensorFormat = _enum("TensorFormat", "LINEAR CHW2 HWC8 CHW32")
PluginFieldType = _enum("PluginFieldType", "INT32 FLOAT32 CHAR")
PluginCapabilityType = _enum("PluginCapabilityType", "CORE BUILD RUNTIME")
TensorRTPhase = _enum("TensorRTPhase", "BUILD RUNTIME")
SeekPosition = _enum("SeekPosition", "SET CUR END")
ExecutionContextAllocationStrategy = _enum("Strategy", "STATIC ON_PROFILE_CHANGE USER_MANAGED")
TYPES = {
    DType.F32: DataType.FLOAT,
    DType.F16: DataType.HALF,
    DType.BF16: DataType.BF16,
    DType.FP8: DataType.FP8,
    DType.I32: DataType.INT32,
}


class _Plain:
    def __init__(self) -> None: ...


class IPluginV3(_Plain): ...


class IPluginV3OneCore(_Plain): ...


class IPluginV3OneBuild(_Plain): ...


class IPluginV3OneRuntime(_Plain): ...


class IPluginCreatorV3One(_Plain): ...


class IPluginResourceContext(_Plain): ...


class IStreamReaderV2(_Plain): ...


class ILogger(_Plain):
    Severity = _enum("Severity", "INTERNAL_ERROR ERROR WARNING INFO VERBOSE")


class PluginField:
    def __init__(self, name: str, data: Any, type: Any) -> None:
        self.name, self.type = name, type
        self._array = np.asarray(data)

    @property
    def data(self) -> Any:
        return np.full_like(self._array, self._array.flat[0])


PluginFieldCollection = list


class DimsExprs(list[Any]): ...


@dataclass(frozen=True)
class Expression:
    """A size: a number, or the symbol of one that is not known yet."""

    value: int | str


class IExprBuilder:
    def constant(self, number: int) -> Expression:
        return Expression(number)


@dataclass
class PluginTensorDesc:
    dims: tuple[int, ...]
    type: Any
    format: Any = TensorFormat.LINEAR


@dataclass
class DynamicPluginTensorDesc:
    desc: PluginTensorDesc
    min: tuple[int, ...]
    opt: tuple[int, ...]
    max: tuple[int, ...]


class IPluginRegistry:
    def __init__(self) -> None:
        self.creators: dict[tuple[str, str, str], Any] = {}

    def register_creator(self, creator: Any, plugin_namespace: str = "") -> bool:
        key = creator.name, creator.plugin_version, plugin_namespace
        taken = key in self.creators
        self.creators.setdefault(key, creator)
        return not taken

    def deregister_creator(self, creator: Any) -> bool:
        key = creator.name, creator.plugin_version, creator.plugin_namespace
        return self.creators.pop(key, None) is not None

    def get_creator(self, type: str, version: str, plugin_namespace: str = "") -> Any:
        return self.creators.get((type, version, plugin_namespace))


_REGISTRY = IPluginRegistry()


def get_plugin_registry() -> IPluginRegistry:
    return _REGISTRY


# ---- what TensorRT asks of a plugin ------------------------------------------------------------
def desc(shaped: Shaped) -> PluginTensorDesc:
    """Returns the descriptor of a tensor."""
    return PluginTensorDesc(shaped.shape, TYPES[shaped.dtype])


def dynamic(shaped: Shaped) -> DynamicPluginTensorDesc:
    """Returns a descriptor whose least, usual and largest sizes are the same."""
    return DynamicPluginTensorDesc(desc(shaped), shaped.shape, shaped.shape, shaped.shape)


def creator_of(node: PluginNode) -> Any:
    """Returns the registered creator for a node, found by type, version and namespace."""
    return _REGISTRY.get_creator(node.kernels.op.type, str(VERSION), DOMAIN)


def fields(values: Mapping[str, int]) -> list[PluginField]:
    """Returns plugin fields of one int32 each."""
    kind = PluginFieldType.INT32
    return [PluginField(n, np.array([v], np.int32), kind) for n, v in values.items()]


def made(node: PluginNode, name: str = "layer") -> Any:
    """Returns the plugin of a node as an engine has it: made for a network, serialised, made again
    from the serialised fields, attached to a context.
    """
    reported = node.fields()
    given = {name: int(reported[name]) for name in KEYS}
    plugin = creator_of(node).create_plugin(name, fields(given), TensorRTPhase.BUILD)
    kept = plugin.clone().get_fields_to_serialize()
    again = creator_of(node).create_plugin(name, kept, TensorRTPhase.RUNTIME)
    return again.attach_to_context(IPluginResourceContext())


def outputs(plugin: Any, inputs: Sequence[Shaped]) -> list[PluginTensorDesc]:
    """Returns the types and shapes that a plugin tells of its outputs."""
    types = plugin.get_output_data_types([TYPES[x.dtype] for x in inputs])
    reported = [DimsExprs(map(Expression, x.shape)) for x in inputs]
    shapes = plugin.get_output_shapes(reported, [], IExprBuilder())
    return [
        PluginTensorDesc(tuple(size.value for size in shape), kind)
        for shape, kind in zip(shapes, types, strict=True)
    ]


# ---- engines -----------------------------------------------------------------------------------
def _shaped(program: Program, name: str, rows: int) -> Shaped:
    for table in (program.weights, program.values, program.inputs, program.outputs):
        if name in table:
            value = table[name]
            shape = tuple(rows if isinstance(d, str) else d for d in value.shape)
            return tensor_of(Shaped(DType(value.dtype), shape))
    raise AssertionError(name)


class Runtime:
    def __init__(self, logger: Any) -> None:
        self.logger = logger

    def deserialize_cuda_engine(self, reader: Any) -> ICudaEngine:
        text = b""
        while piece := reader.read(4096, 0):
            text += piece
        table = json.loads(text)
        return ICudaEngine(strict_records.decode(Program, table, "", PackageError), self)


class ICudaEngine:
    def __init__(self, program: Program, runtime: Runtime) -> None:
        self.program = program
        self._runtime = runtime  # an engine keeps it
        self.logger = runtime.logger
        steps = zip(deploy(program).plugins, program.steps, strict=True)
        self.nodes = [(node, step.ports, made(node, name)) for (name, node), step in steps]
        read = {ports[port] for node, ports, _ in self.nodes for port in node.inputs}
        weights = [name for name in program.weights if name in read]
        self.tensors = [*program.inputs, *weights, *program.outputs]

    def get_device_memory_size_for_profile_v2(self, profile_index: int) -> int:
        assert profile_index == 0
        return self.program.scratch + max(self._workspaces())

    def _workspaces(self) -> Iterator[int]:
        for node, ports, plugin in self.nodes:
            tensors = [_shaped(self.program, ports[p], MOST) for p in _order(node)]
            count = len(node.inputs)
            ins, outs = tensors[:count], tensors[count:]
            yield plugin.get_workspace_size([*map(dynamic, ins)], [*map(dynamic, outs)])

    def create_execution_context(self, strategy: Any) -> IExecutionContext:
        assert strategy is ExecutionContextAllocationStrategy.USER_MANAGED
        return IExecutionContext(self)


MOST = 8192
"""Largest of the sizes that a session decides, in every profile."""


def _order(node: PluginNode) -> tuple[str, ...]:
    return (*node.inputs, *node.outputs)


@dataclass
class IExecutionContext:
    engine: ICudaEngine
    name: str | None = None
    ran: int = 0
    """How many times it was executed."""
    _memory: int = 0
    _shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    _at: dict[str, int] = field(default_factory=dict)
    _plugins: list[Any] = field(default_factory=list)

    def set_device_memory(self, memory: int, size: int) -> None:
        assert memory % ALIGNMENT == 0
        assert size >= self.engine.get_device_memory_size_for_profile_v2(0)
        self._memory = memory

    def set_optimization_profile_async(self, profile_index: int, stream_handle: int) -> bool:
        del stream_handle
        return profile_index == 0

    def set_input_shape(self, name: str, shape: Sequence[int]) -> bool:
        self._shapes[name] = tuple(shape)
        return True

    def set_tensor_address(self, name: str, memory: int) -> bool:
        self._at[name] = memory
        return memory > 0 and memory % ALIGNMENT == 0

    def infer_shapes(self) -> list[str]:
        program = self.engine.program
        given = {*self._shapes, *program.outputs} & self._at.keys()
        return sorted({*self.engine.tensors} - given)

    def execute_async_v3(self, stream_handle: int) -> bool:
        engine = self.engine
        self.ran += 1
        shapes = dict(self._shapes)
        first = not self._plugins
        if first:
            resources = IPluginResourceContext()
            self._plugins = [p.attach_to_context(resources) for *_, p in engine.nodes]
        for (node, ports, _), plugin in zip(engine.nodes, self._plugins, strict=True):
            ins = [self._reported(ports[p], shapes) for p in node.inputs]
            outs = outputs(plugin, ins)
            shapes |= {ports[p]: d.dims for p, d in zip(node.outputs, outs, strict=True)}
            in_descs = [desc(shaped) for shaped in ins]
            if first:
                plugin.on_shape_change(in_descs, outs)
            at = [self._address(ports[p]) for p in _order(node)]
            work = self._memory + engine.program.scratch
            count = len(node.inputs)
            plugin.enqueue(in_descs, outs, at[:count], at[count:], work, stream_handle)
        return True

    def _reported(self, name: str, shapes: Mapping[str, tuple[int, ...]]) -> Shaped:
        return Shaped(_shaped(self.engine.program, name, 1).dtype, shapes[name])

    def _address(self, name: str) -> int:
        if name in self._at:
            return self._at[name]
        return self._memory + self.engine.program.values[name].offset


def stand_in(monkeypatch: Any) -> ModuleType:
    """Make `import tensorrt` give this module during one test, and return it."""
    here = sys.modules[__name__]
    _REGISTRY.creators.clear()
    monkeypatch.setitem(sys.modules, "tensorrt", here)
    for name in USERS:
        monkeypatch.setitem(sys.modules, name, None)
        del sys.modules[name]
    return here
