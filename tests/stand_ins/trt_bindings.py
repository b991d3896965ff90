"""Our plugins on TensorRT's own Python bindings, as far as these work without the library.

A process can load one version of the bindings, so each version is tested in a process of its own.
Output shapes are not computed here: their IDimensionExpr exist only in a network of the real
library. The stand-in (stand_in_trt.py) is used for them.
"""

from __future__ import annotations

import ctypes
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from stand_ins.trt_stubs import FETCH_SECONDS, STORE, libraries
from support.kernel_cases import taken_of
from support.kernel_runner import rule_of

from thor_dflash.core.errors import EngineError
from thor_dflash.core.tensors import DType
from thor_dflash.plugins import OPS
from thor_dflash.plugins.contract import DOMAIN, VERSION
from thor_dflash.plugins.cuda.enqueue import working
from thor_dflash.plugins.launch import THOR, CallSite, Shaped
from thor_dflash.plugins.tensorrt.node import KEYS, PluginNode, describe, tensor_of

LEAN = "tensorrt_lean_cu13_libs"
"""TensorRT's lean library, published for version 11: no builder, but the real plugin registry."""
_NVINFER = """
extern void *getPluginRegistry(void);
void *getBuilderPluginRegistry(int capability) { return getPluginRegistry(); }
void *createInferBuilder_INTERNAL(void *l, int v) { return 0; }
"""


def lean(version: str) -> Path:
    """Returns the path of the lean library, which is fetched once.

    Raises:
        OSError, SubprocessError: it cannot be fetched.
    """
    site = STORE / f"lean-{version}"
    if not site.is_dir():
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", "install"]
        partial = site.with_name(f"{site.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        subprocess.run(
            [*pip, "--no-deps", "--only-binary=:all:", f"--target={partial}", f"{LEAN}=={version}"],
            check=True,
            timeout=FETCH_SECONDS,
            capture_output=True,
        )
        partial.rename(site)
    [found] = site.glob("*/libnvinfer_lean.so.*")
    return found


def lean_libraries(version: str, directory: Path) -> list[Path]:
    """Returns what trt_stubs.libraries does, except that the plugin registry and the runtime are
    those of the lean library, which comes first in the list.
    """
    real, stubs = lean(version), libraries(version, directory)
    source = directory / "nvinfer.c"
    source.write_text(_NVINFER)
    [out] = [path for path in stubs if path.name.startswith("libnvinfer.so")]
    command = ["cc", "-shared", "-fPIC", f"-Wl,-soname,{out.name}", "-o", str(out), str(source)]
    link = ["-Wl,--no-as-needed", f"-L{real.parent}", f"-l:{real.name}"]
    subprocess.run([*command, *link], check=True, capture_output=True)
    return [real, *stubs]


# ---- in a process of its own -------------------------------------------------------------------
class BindingChecks:
    """Makes the plugin of every case of every operator with the bindings and checks the results."""

    def __init__(self, trt: Any, plugin: Any) -> None:
        self.trt, self.module = trt, plugin
        self.types = {dtype: kind for kind, dtype in plugin.TYPES.items()}
        self.registry = trt.get_plugin_registry()
        self.count = 0

    def all(self) -> dict[str, Any]:
        """Check every operator; returns the bindings' version, whether they have a registry, and
        the number of plugins.
        """
        for op in OPS:
            cases = [(site, describe(site, outs_of(site))) for _, site in taken_of(op)]
            creators = self.creators([node for _, node in cases])
            for site, node in cases:
                self.one(site, node)
                self.count += 1
            if self.registry is not None:
                self.module.deregister(self.registry, creators)
                assert self.registry.get_creator(op.type, str(VERSION), DOMAIN) is None
        return {
            "version": self.trt.__version__,
            "registry": self.registry is not None,
            "plugins": self.count,
        }

    def creators(self, nodes: list[PluginNode]) -> Any:
        """Register the nodes' creators, twice: the second time must fail. Without a registry,
        return one creator.
        """
        self.table = {node.key: node for node in nodes}
        if self.registry is None:
            return [self.module.Creator(nodes[0].op, THOR, None, self.table)]
        made = self.module.register(self.registry, THOR, None, nodes)
        try:
            self.module.register(self.registry, THOR, None, nodes)
        except EngineError:
            return made
        raise AssertionError("registered twice")

    def creator(self, node: PluginNode) -> Any:
        if self.registry is None:
            return self.module.Creator(node.op, THOR, None, self.table)
        return self.registry.get_creator(node.kernels.op.type, str(VERSION), DOMAIN)

    def one(self, site: CallSite, node: PluginNode) -> None:
        """Make a plugin from its fields and again from its serialised fields; check both."""
        trt, creator = self.trt, self.creator(node)
        assert [f.name for f in creator.field_names] == list(KEYS)
        halves = [np.array([half], np.int32) for half in node.key]
        kind = trt.PluginFieldType.INT32
        fields = trt.PluginFieldCollection(
            [trt.PluginField(n, h, kind) for n, h in zip(KEYS, halves, strict=True)]
        )
        first = creator.create_plugin("layer", fields, trt.TensorRTPhase.BUILD)
        kept = first.clone().get_fields_to_serialize()
        again = creator.create_plugin("layer", kept, trt.TensorRTPhase.RUNTIME)
        assert again.node == node
        for plugin in (first, again.attach_to_context(None)):
            self.answers(plugin, site, node)

    def answers(self, plugin: Any, site: CallSite, node: PluginNode) -> None:
        """Check what a plugin answers to TensorRT's questions."""
        trt = self.trt
        for kind in trt.PluginCapabilityType.__members__.values():
            assert plugin.get_capability_interface(kind) is plugin
        named = plugin.plugin_name, plugin.plugin_namespace, plugin.plugin_version
        assert named == (node.kernels.op.type, DOMAIN, str(VERSION))
        assert plugin.num_outputs == len(node.outputs)
        assert plugin.timing_cache_id.endswith(str(node.key))
        ins = [tensor_of(site.ports[port]) for port in node.inputs]
        outs = [tensor_of(site.ports[port]) for port in node.outputs]
        types = plugin.get_output_data_types([self.types[x.dtype] for x in ins])
        assert types == [self.types[x.dtype] for x in outs]
        both = [self.dynamic(x) for x in (*ins, *outs)]
        for pos in range(len(both)):
            assert plugin.supports_format_combination(pos, both, len(ins)), (site, pos)
            wrong = list(both)
            wrong[pos] = self.dynamic((*ins, *outs)[pos], trt.DataType.INT8)
            assert not plugin.supports_format_combination(pos, wrong, len(ins))
        plugin.configure_plugin(both[: len(ins)], both[len(ins) :])
        size = plugin.get_workspace_size(both[: len(ins)], both[len(ins) :])
        assert size == working(rule_of(site.op).launches(site, THOR))[1]
        each = [self.desc(x) for x in ins], [self.desc(x) for x in outs]
        plugin.on_shape_change(*each)
        plugin.enqueue(*each, [0] * len(ins), [0] * len(outs), 0, 0)
        assert plugin.get_valid_tactics() == []
        plugin.set_tactic(0)
        plugin.destroy()

    def desc(self, shaped: Shaped, kind: Any = None) -> Any:
        made = self.trt.PluginTensorDesc()
        made.dims = self.trt.Dims(shaped.shape)
        made.type = kind or self.types[shaped.dtype]
        made.format = self.trt.TensorFormat.LINEAR
        return made

    def dynamic(self, shaped: Shaped, kind: Any = None) -> Any:
        """Returns a descriptor whose first size is -1 (not known yet), with its maximum."""
        made = self.trt.DynamicPluginTensorDesc()
        described = self.desc(shaped, kind)
        described.dims = self.trt.Dims([-1, *shaped.shape[1:]])
        made.desc = described
        made.max = self.trt.Dims(shaped.shape)
        return made


def outs_of(site: CallSite) -> set[str]:
    return {port.name for port in site.op.outputs_of(site.attributes)}


def main(site: str, *paths: str) -> None:
    """Load the libraries, import the bindings from `site`, check every plugin, and print the
    bindings' version and the number of plugins as JSON.
    """
    for path in paths:
        ctypes.CDLL(path, ctypes.RTLD_GLOBAL)
    sys.path.insert(0, site)
    import tensorrt_bindings as trt  # type: ignore[import-not-found]

    sys.modules["tensorrt"] = trt
    from thor_dflash.plugins.tensorrt import host, plugin

    assert issubclass(host.Messages, trt.ILogger)
    assert set(plugin.TYPES.values()) >= {DType.F32, DType.BF16, DType.FP8, DType.I32}
    print(json.dumps(BindingChecks(trt, plugin).all()))
