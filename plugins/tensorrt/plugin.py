"""Implements every operator as an IPluginV3, derived from its contract and launch rule.

A plugin answers TensorRT's queries about types, shapes and memory from the contract, and enqueues
the CUDA engine's kernels on TensorRT's stream. It runs only while a cycle is captured into a CUDA
graph, and once before that; replaying the graph runs no Python.

While an engine is built, TensorRT also runs every plugin, to time it, on inputs whose values mean
nothing: a length or a token among them would make a kernel read outside its memory. A plugin has no
choice that could be timed, so it launches nothing then.

Uses the API that TensorRT 10.13.3 and 11.4 have in common.
"""

# tensorrt is not installed where the checkers run: the tests check this file against its bindings.
# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUntypedBaseClass=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportAttributeAccessIssue=false

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping, Sequence
from functools import cache

import numpy as np
import tensorrt as trt

from thor_dflash.core.errors import EngineError
from thor_dflash.core.tensors import Array, DType
from thor_dflash.plugins.contract import DOMAIN, VERSION
from thor_dflash.plugins.cuda.enqueue import working
from thor_dflash.plugins.cuda.kernel_cache import Kernels
from thor_dflash.plugins.cuda.op_call import OpCall
from thor_dflash.plugins.launch import CallSite, Device, Shaped
from thor_dflash.plugins.registry import KERNELS
from thor_dflash.plugins.tensorrt.host import Messages, keeps_failure
from thor_dflash.plugins.tensorrt.node import KEYS, Key, PluginNode, fingerprint

TYPES: Mapping[trt.DataType, DType] = {
    trt.DataType.FLOAT: DType.F32,
    trt.DataType.HALF: DType.F16,
    trt.DataType.BF16: DType.BF16,
    trt.DataType.FP8: DType.FP8,
    trt.DataType.INT32: DType.I32,
}
"""Element types that a plugin's tensor may have."""
OF = {dtype: kind for kind, dtype in TYPES.items()}


class Plugin(trt.IPluginV3, trt.IPluginV3OneCore, trt.IPluginV3OneBuild, trt.IPluginV3OneRuntime):
    """One call of one operator. Each execution context has its own clone, with its own memory."""

    def __init__(
        self,
        name: str,
        node: PluginNode,
        device: Device,
        kernels: Kernels | None,
        messages: Messages,
    ) -> None:
        trt.IPluginV3.__init__(self)
        trt.IPluginV3OneCore.__init__(self)
        trt.IPluginV3OneBuild.__init__(self)
        trt.IPluginV3OneRuntime.__init__(self)
        self.plugin_name = node.kernels.op.type
        self.plugin_namespace = DOMAIN
        self.plugin_version = str(VERSION)
        self.num_outputs = len(node.outputs)
        self.format_combination_limit = 1
        # Includes a hash of the kernels, so that a changed kernel does not get an old one's timing.
        self.timing_cache_id = f"{fingerprint()[:16]} {node.key}"
        self.metadata_string = str(node.fields())
        self.node = node
        self.messages = messages
        self._name = name
        self._device = device
        self._kernels = kernels
        self._call: OpCall | None = None
        self._at: CallSite | None = None
        # TensorRT deletes its plugins, and the bindings then give back a reference that only a
        # plugin has that was once asked for its capabilities. From any other, such as a clone of a
        # build that fails, they would take the last one: Python would free the object again. So
        # each plugin has one more, which is never given back. Source: ~PyIPluginV3Impl.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))

    # ---- core ----------------------------------------------------------------------------

    def get_capability_interface(self, type: trt.PluginCapabilityType) -> object:
        """Returns this object, which implements all three capabilities."""
        del type
        return self

    def clone(self) -> Plugin:
        """Returns a plugin for the same call, without memory yet."""
        return Plugin(self._name, self.node, self._device, self._kernels, self.messages)

    def destroy(self) -> None:
        """Free the memory."""
        call, self._call = self._call, None
        if call is not None:
            call.close()

    # ---- build ---------------------------------------------------------------------------

    @keeps_failure
    def get_output_data_types(self, input_types: Sequence[trt.DataType]) -> list[trt.DataType]:
        """Returns the outputs' types, by the contract."""
        inputs = self._types(input_types)
        return [OF[self.node.output_dtype(port, inputs)] for port in self.node.outputs]

    @keeps_failure
    def get_output_shapes(
        self,
        inputs: Sequence[trt.DimsExprs],
        shape_inputs: Sequence[trt.DimsExprs],
        expr_builder: trt.IExprBuilder,
    ) -> list[trt.DimsExprs]:
        """Returns the outputs' shapes, from the contract's symbols as bound by the inputs."""
        del shape_inputs
        known = {
            port: [shape[axis] for axis in range(len(shape))]
            for port, shape in zip(self.node.inputs, inputs, strict=True)
        }
        found = self.node.output_shapes(known, expr_builder.constant)
        return [trt.DimsExprs(list(found[port])) for port in self.node.outputs]

    @keeps_failure
    def supports_format_combination(
        self, pos: int, in_out: Sequence[trt.DynamicPluginTensorDesc], num_inputs: int
    ) -> bool:
        """Linear format and the contract's types only. Of the tensors, the formats and types up to
        `pos` are all that is known here.
        """
        descs = [described.desc for described in in_out[: pos + 1]]
        kind = TYPES.get(descs[pos].type)
        if descs[pos].format != trt.TensorFormat.LINEAR or kind is None:
            return False
        names = (*self.node.inputs, *self.node.outputs)
        inputs = self._types([desc.type for desc in descs[:num_inputs]])
        return self.node.takes(names[pos], kind, inputs)

    @keeps_failure
    def configure_plugin(
        self,
        pos_in: Sequence[trt.DynamicPluginTensorDesc],
        pos_out: Sequence[trt.DynamicPluginTensorDesc],
    ) -> None:
        """Check the largest sizes of a profile. There is nothing to configure: the launches follow
        from the sizes, once they are known.

        Raises:
            EngineError: the kernels cannot run with these sizes.
        """
        self._check(self._most(pos_in, pos_out))

    def get_valid_tactics(self) -> list[int]:
        """There are no tactics: the launch rule chooses the launches."""
        return []

    @keeps_failure
    def get_workspace_size(
        self,
        inputs: Sequence[trt.DynamicPluginTensorDesc],
        outputs: Sequence[trt.DynamicPluginTensorDesc],
    ) -> int:
        """Scratch memory at the largest sizes, bytes, without counters."""
        site = self._most(inputs, outputs)
        return working(self.node.kernels.launches(site, self._device))[1]

    # ---- runtime -------------------------------------------------------------------------

    def attach_to_context(self, resource_context: trt.IPluginResourceContext) -> Plugin:
        """Returns a plugin for one execution context."""
        del resource_context
        return self.clone()

    def set_tactic(self, tactic: int) -> None:
        """Ignored: there are no tactics."""
        del tactic

    @keeps_failure
    def get_fields_to_serialize(self) -> trt.PluginFieldCollection:
        """Returns the two fields by which the node is found again."""
        kind, halves = trt.PluginFieldType.INT32, zip(KEYS, _halves(self.node.key), strict=True)
        return trt.PluginFieldCollection([trt.PluginField(n, h.data, kind) for n, h in halves])

    @keeps_failure
    def on_shape_change(
        self, inputs: Sequence[trt.PluginTensorDesc], outputs: Sequence[trt.PluginTensorDesc]
    ) -> None:
        """Determine the launches for these sizes.

        Raises:
            EngineError: the kernels cannot run with these sizes.
        """
        both = [*inputs, *outputs]
        site = self._site([d.type for d in both], [tuple(d.dims) for d in both])
        if self._call is not None and site == self._at:
            return  # keep the tables: TensorRT may call this while a stream is captured
        self._check(site)
        self.destroy()
        if self._kernels is not None:
            self._call, self._at = OpCall(self._kernels, self.node.kernels, site), site

    @keeps_failure
    def enqueue(
        self,
        input_desc: Sequence[trt.PluginTensorDesc],
        output_desc: Sequence[trt.PluginTensorDesc],
        inputs: Sequence[int],
        outputs: Sequence[int],
        workspace: int,
        stream: int,
    ) -> None:
        """Enqueue the launches on the stream; nothing if there are no kernels, see the top.

        Raises:
            EngineError: a launch failed, or the stream is being captured with addresses with which
                the plugin never ran.
        """
        if self._kernels is None:
            return
        if self._call is None:
            self.on_shape_change(input_desc, output_desc)
        assert self._call is not None
        names = (*self.node.inputs, *self.node.outputs)
        at = dict(zip(names, (*inputs, *outputs), strict=True))
        self._call.run(at, workspace, self._kernels.gate.cu.CUstream(stream))

    # ---- from descriptors to ports -------------------------------------------------------

    def _types(self, types: Sequence[trt.DataType]) -> dict[str, DType]:
        return {p: TYPES[t] for p, t in zip(self.node.inputs, types, strict=False) if t in TYPES}

    def _check(self, site: CallSite) -> None:
        if why := self.node.kernels.refuse(site):
            raise EngineError(f"{self.plugin_name} {self._name}: {why}")

    def _most(
        self,
        inputs: Sequence[trt.DynamicPluginTensorDesc],
        outputs: Sequence[trt.DynamicPluginTensorDesc],
    ) -> CallSite:
        both = [*inputs, *outputs]
        return self._site([d.desc.type for d in both], [_largest(d) for d in both])

    def _site(self, types: Sequence[trt.DataType], sizes: Sequence[tuple[int, ...]]) -> CallSite:
        names = (*self.node.inputs, *self.node.outputs)
        return self.node.site(
            {
                name: Shaped(TYPES[kind], shape)
                for name, kind, shape in zip(names, types, sizes, strict=True)
            }
        )


@cache
def _halves(key: Key) -> tuple[Array, ...]:
    """Returns a key as arrays for fields. Cached, since TensorRT keeps their addresses."""
    return tuple(np.array([half], np.int32) for half in key)


def _largest(described: trt.DynamicPluginTensorDesc) -> tuple[int, ...]:
    return tuple(
        most if size < 0 else size
        for size, most in zip(described.desc.dims, described.max, strict=True)
    )


class Creator(trt.IPluginCreatorV3One):
    """Creates the plugins of one operator."""

    def __init__(
        self,
        op: str,
        device: Device,
        kernels: Kernels | None,
        nodes: Mapping[Key, PluginNode],
        messages: Messages,
    ) -> None:
        trt.IPluginCreatorV3One.__init__(self)
        self.name = KERNELS[op].op.type
        self.plugin_namespace = DOMAIN
        self.plugin_version = str(VERSION)
        kind, halves = trt.PluginFieldType.INT32, zip(KEYS, _halves((0, 0)), strict=True)
        self.field_names = trt.PluginFieldCollection(
            [trt.PluginField(name, half.data, kind) for name, half in halves]
        )
        self.messages = messages
        self._op = op
        self._device = device
        self._kernels = kernels
        self._nodes = nodes

    @keeps_failure
    def create_plugin(
        self, name: str, field_collection: trt.PluginFieldCollection, phase: trt.TensorRTPhase
    ) -> Plugin:
        """Returns the plugin of a node, when a network is built or an engine is loaded.

        Raises:
            EngineError: the fields do not identify a node of this operator.
        """
        del phase
        found = {field.name: int(np.ravel(field.data)[0]) for field in field_collection}
        key = found.get(KEYS[0], -1), found.get(KEYS[1], -1)
        node = self._nodes.get(key)
        if node is None or node.op != self._op:
            raise EngineError(
                f"{name} must be a call that its package describes (got {self.name} {key}); "
                "build the package again"
            )
        return Plugin(name, node, self._device, self._kernels, self.messages)


def register(
    registry: trt.IPluginRegistry,
    device: Device,
    kernels: Kernels | None,
    nodes: Iterable[PluginNode],
    messages: Messages,
) -> tuple[Creator, ...]:
    """Register a creator for every operator that has calls in `nodes`. Keep the returned creators
    as long as networks or engines with these plugins exist, then `deregister` them.

    Args:
        registry: `trt.get_plugin_registry()`.
        device: The device that the launches are for.
        kernels: The kernels to launch; None while engines are built: the plugins launch nothing.
        nodes: The calls.
        messages: Keeps the exceptions of the plugins.

    Raises:
        EngineError: creators of these names are already registered.
    """
    table = {node.key: node for node in nodes}
    made: list[Creator] = []
    for op in sorted({node.op for node in table.values()}):
        creator = Creator(op, device, kernels, table, messages)
        if not registry.register_creator(creator, DOMAIN):
            deregister(registry, made)
            raise EngineError(
                f"{creator.name} must be registered once in a process (got it registered already); "
                "close the other TensorRT engine or builder first"
            )
        made.append(creator)
    return tuple(made)


def deregister(registry: trt.IPluginRegistry, creators: Iterable[Creator]) -> None:
    """Remove creators from the registry."""
    for creator in creators:
        registry.deregister_creator(creator)
