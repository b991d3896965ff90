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


DataType = IntEnum("DataType", "FLOAT HALF INT8 INT32 BOOL UINT8 FP8 BF16 INT64 INT4 FP4", start=0)
TensorFormat = IntEnum("TensorFormat", {"LINEAR": 0, "CHW32": 5})
LayerType = IntEnum("LayerType", "CONSTANT PLUGIN_V3 MATRIX_MULTIPLY IDENTITY", start=0)
NetworkDefinitionCreationFlag = IntEnum("NetworkDefinitionCreationFlag", "STRONGLY_TYPED")
MemoryPoolType = IntEnum("MemoryPoolType", "WORKSPACE", start=0)
BuilderFlag = IntEnum("BuilderFlag", {"TF32": 7, "DIRECT_IO": 11, "MONITOR_MEMORY": 23})
ProfilingVerbosity = IntEnum("ProfilingVerbosity", "LAYER_NAMES_ONLY NONE DETAILED", start=0)
LayerInformationFormat = IntEnum("LayerInformationFormat", "ONELINE JSON", start=0)
TensorLocation = IntEnum("TensorLocation", "DEVICE HOST", start=0)
SeekPosition = IntEnum("SeekPosition", "SET CUR END", start=0)
PluginFieldType = IntEnum("PluginFieldType", {"FLOAT16": 0, "FLOAT32": 1, "INT32": 5, "CHAR": 6})
PluginCapabilityType = IntEnum("PluginCapabilityType", "CORE BUILD RUNTIME", start=0)
TensorRTPhase = IntEnum("TensorRTPhase", "BUILD RUNTIME", start=0)


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
