"""The part of the recorder (trt_recorder.py) that both it and its parser need: enumerations, the
classes that our code derives from, descriptors, and the plugin registry.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

FAULTS: set[str] = set()
"""What goes wrong. "build": the engine is not built. "profile": a profile is refused. "empty": the
engine's file is empty. "shape", "extra": the parser gives an output another shape, or adds a layer.
"reformat", "layers", "fp4": the inspector shows a reformatting copy, misses the first layer, or
shows products that are not in FP4. "type": the engine's first tensor has another type."""


class DataType(IntEnum):
    FLOAT = 0
    HALF = 1
    INT8 = 2
    INT32 = 3
    BOOL = 4
    UINT8 = 5
    FP8 = 6
    BF16 = 7
    INT64 = 8
    INT4 = 9
    FP4 = 10


class TensorFormat(IntEnum):
    LINEAR = 0
    CHW32 = 5


class LayerType(IntEnum):
    CONSTANT = 0
    PLUGIN_V3 = 1
    MATRIX_MULTIPLY = 2
    IDENTITY = 3


class NetworkDefinitionCreationFlag(IntEnum):
    STRONGLY_TYPED = 1


class MemoryPoolType(IntEnum):
    WORKSPACE = 0


class BuilderFlag(IntEnum):
    TF32 = 7
    DIRECT_IO = 11
    MONITOR_MEMORY = 23


class ProfilingVerbosity(IntEnum):
    LAYER_NAMES_ONLY = 0
    NONE = 1
    DETAILED = 2


class LayerInformationFormat(IntEnum):
    ONELINE = 0
    JSON = 1


class TensorLocation(IntEnum):
    DEVICE = 0
    HOST = 1


class SeekPosition(IntEnum):
    SET = 0
    CUR = 1
    END = 2


class PluginFieldType(IntEnum):
    FLOAT16 = 0
    FLOAT32 = 1
    INT32 = 5
    CHAR = 6


class PluginCapabilityType(IntEnum):
    CORE = 0
    BUILD = 1
    RUNTIME = 2


class TensorRTPhase(IntEnum):
    BUILD = 0
    RUNTIME = 1


class ILogger:
    class Severity(IntEnum):
        INTERNAL_ERROR = 0
        ERROR = 1
        WARNING = 2
        INFO = 3
        VERBOSE = 4


class IProgressMonitor:
    pass


class IStreamWriter:
    pass


class IStreamReaderV2:
    pass


# ---- plugins ----------------------------------------------------------------------------------


class IPluginV3:
    pass


class IPluginV3OneCore:
    pass


class IPluginV3OneBuild:
    pass


class IPluginV3OneRuntime:
    pass


class IPluginCreatorV3One:
    pass


class IPluginResourceContext:
    pass


@dataclass
class PluginField:
    name: str = ""
    data: Any = None
    type: PluginFieldType = PluginFieldType.INT32


class PluginFieldCollection(list):
    pass


@dataclass
class IDimensionExpr:
    value: int
    """-1 if it is decided only when the engine runs."""

    def is_constant(self) -> bool:
        return self.value >= 0

    def get_constant_value(self) -> int:
        return self.value


class IExprBuilder:
    def constant(self, value: int) -> IDimensionExpr:
        return IDimensionExpr(value)


class DimsExprs(list):
    pass


class Dims(tuple):
    pass


@dataclass
class PluginTensorDesc:
    dims: Dims
    type: DataType | None
    format: TensorFormat = TensorFormat.LINEAR


@dataclass
class DynamicPluginTensorDesc:
    desc: PluginTensorDesc
    min: Dims
    max: Dims
    opt: Dims


class IPluginRegistry:
    def __init__(self) -> None:
        self.creators: dict[tuple[str, str, str], Any] = {}

    def register_creator(self, creator: Any, plugin_namespace: str = "") -> bool:
        key = (creator.name, creator.plugin_version, plugin_namespace)
        fresh = key not in self.creators
        self.creators[key] = creator
        return fresh

    def deregister_creator(self, creator: Any) -> bool:
        found = [key for key, one in self.creators.items() if one is creator]
        for key in found:
            del self.creators[key]
        return bool(found)

    def get_creator(self, type: str, version: str, plugin_namespace: str = "") -> Any:
        return self.creators.get((type, version, plugin_namespace))


_REGISTRY = IPluginRegistry()


def get_plugin_registry() -> IPluginRegistry:
    return _REGISTRY
