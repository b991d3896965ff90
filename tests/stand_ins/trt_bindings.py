"""Our plugins on TensorRT's own Python bindings, as far as these work without the library.

A process can load one version of the bindings, so each version is tested in a process of its own.
Output shapes are not computed here: their IDimensionExpr exist only in a network of the real
library. The tests of tests/trt compute them.
"""

from __future__ import annotations

import ctypes
import json
import sys
from typing import Any

import numpy as np
from support.kernel_cases import taken_of
from support.kernel_runner import rule_of

from thor_dflash.core.tensors import DType
from thor_dflash.plugins import OPS
from thor_dflash.plugins.contract import DOMAIN, VERSION
from thor_dflash.plugins.cuda.enqueue import working
from thor_dflash.plugins.launch import THOR, CallSite, Shaped
from thor_dflash.plugins.tensorrt.node import KEYS, PluginNode, describe, tensor_of


# ---- in a process of its own -------------------------------------------------------------------
class BindingChecks:
    """Makes the plugin of every case of every operator with the bindings and checks the results."""

    def __init__(self, trt: Any, plugin: Any, messages: Any) -> None:
        self.trt, self.module, self.messages = trt, plugin, messages
        self.types = {dtype: kind for kind, dtype in plugin.TYPES.items()}
        self.count = 0

    def all(self) -> dict[str, Any]:
        """Check every operator; returns the bindings' version and the number of plugins."""
        for op in OPS:
            cases = [(site, describe(site, outs_of(site))) for _, site in taken_of(op)]
            table = {node.key: node for _, node in cases}
            for site, node in cases:
                self.one(self.module.Creator(node.op, THOR, None, table, self.messages), site, node)
                self.count += 1
        return {"version": self.trt.__version__, "plugins": self.count}

    def one(self, creator: Any, site: CallSite, node: PluginNode) -> None:
        """Make a plugin from its fields and again from its serialised fields; check both."""
        trt = self.trt
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
    print(json.dumps(BindingChecks(trt, plugin, host.Messages()).all()))
