"""The TensorRT engine: one execution context for each call and each combination of the two places
of its states, all captured into one CUDA graph per cycle.

Each context runs once before it is captured, on empty states, because plugins then make the tables
that their kernels read. Afterwards a cycle only replays the graph, without Python or TensorRT code.

Written to the API common to TensorRT 10.13.3 and 11.4.
"""

# tensorrt and cuda-python publish no types, or are not installed where the checkers run.
# pyright: reportMissingImports=false, reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportAttributeAccessIssue=false

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import tensorrt as trt

from thor_dflash.config.engine import EngineConfig
from thor_dflash.core.errors import EngineError
from thor_dflash.core.progress import Progress
from thor_dflash.core.tensors import DType, TensorSpec
from thor_dflash.package import manifest as package_manifest
from thor_dflash.package import trt_engine as sidecar
from thor_dflash.package.launch_program import Weight
from thor_dflash.package.trt_engine import EngineDescription
from thor_dflash.plugins.cuda.driver import DeviceInfo, Driver
from thor_dflash.plugins.cuda.kernel_cache import Kernels
from thor_dflash.plugins.launch import Shaped
from thor_dflash.plugins.tensorrt.host import Messages, Reader
from thor_dflash.plugins.tensorrt.node import fingerprint, parse, tensor_of
from thor_dflash.plugins.tensorrt.plugin import Creator, deregister, register
from thor_dflash.runtime.engines.cuda.binding import BoundCall, cuda
from thor_dflash.runtime.engines.cuda.device_tensors import DeviceTensors
from thor_dflash.runtime.engines.cuda.graph_replay import GraphReplay
from thor_dflash.runtime.engines.cuda.weight_loader import FileWeights
from thor_dflash.runtime.engines.protocol import Call, Graph
from thor_dflash.runtime.engines.tensorrt.compatibility import RuntimeFacts, check

ALIGNMENT = 256
"""Alignment of every bound tensor, bytes. Source: setTensorAddress in NvInferRuntime.h."""


@dataclass(slots=True, eq=False, kw_only=True)
class BoundEngine(BoundCall):
    """A call, with an execution context for each combination of places of its tensors."""

    contexts: dict[tuple[int, ...], trt.IExecutionContext] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class PlanGraph:
    """An engine's description and its ports."""

    name: str
    plan: EngineDescription
    inputs: Mapping[str, TensorSpec]
    outputs: Mapping[str, TensorSpec]


class TensorRTEngine:
    """TensorRT engines of one package directory on one device."""

    def __init__(self, package: Path, config: EngineConfig, progress: Progress) -> None:
        # TensorRT works in the primary context, which all libraries of a process share.
        self.driver = Driver(config.device, shared=True)
        self.package = package
        self.tensors = DeviceTensors(self.driver, ALIGNMENT)
        self.replay = GraphReplay(self.tensors, self._resolve, graphs=config.graphs)
        self.empty, self.reserve = self.tensors.empty, self.tensors.reserve
        self.swap_out, self.swap_in = self.tensors.swap_out, self.tensors.swap_in
        self.run, self.busy = self.replay.run, self.replay.busy
        self.write, self.read = self.replay.write, self.replay.read
        self.clear = self.replay.clear
        self._config = config
        self._progress = progress
        self._fill = FileWeights(package, progress)
        self._messages = Messages()
        self._creators: tuple[Creator, ...] = ()
        self._graphs: dict[str, PlanGraph] = {}
        self._engines: dict[str, trt.ICudaEngine] = {}
        self._owned: dict[str, int] = {}

    @property
    def info(self) -> DeviceInfo:
        """The device."""
        return self.driver.info

    @property
    def device(self) -> str:
        """See Engine."""
        return str(self.info)

    @property
    def memory(self) -> Mapping[str, int]:
        """Device memory of the engine: kind -> bytes."""
        return {**self.tensors.arena.sizes, **self._owned}

    @property
    def loads_late(self) -> bool:
        """See Engine."""
        return False

    def load(self, name: str) -> Graph:
        """See Engine.

        Raises:
            EngineError: the engine was made for another machine, version or build.
        """
        if name not in self._graphs:
            plan = sidecar.read(self.package, name)
            device = self.info.device
            here = RuntimeFacts(
                str(trt.__version__),
                self.info.name,
                device.capability,
                device.multiprocessors,
                fingerprint(),
            )
            check(plan, here, package_manifest.read(self.package).files.get(plan.file))
            inputs = {n: v.spec(n) for n, v in plan.inputs.items()}
            outputs = {n: v.spec(n) for n, v in plan.outputs.items()}
            self._graphs[name] = PlanGraph(name, plan, inputs, outputs)
        return self._graphs[name]

    # ---- prepare -------------------------------------------------------------------------

    def prepare(self, calls: Sequence[Call]) -> None:
        """See Engine."""
        plans = {plan.name: plan for plan in map(_plan, calls)}
        self._deserialise(list(plans.values()))
        bounds = [BoundEngine(call=call) for call in calls]
        self.replay.bound |= {bound.call: bound for bound in bounds}
        self.tensors.assign_buffers([(bound, _plan(bound.call).in_place) for bound in bounds])
        take = self.tensors.arena.take
        weights = {name: w for plan in plans.values() for name, w in plan.weights.items()}
        at = {name: take("weights", w.nbytes) for name, w in weights.items()}
        page = self.tensors.count()
        working = max((self._working(plan) for plan in plans.values()), default=0)
        scratch = take("scratch", working)
        base = self.tensors.allocate(page)
        places = {name: base + offset for name, offset in at.items()}
        self._fill(self.driver, weights, places, {})
        free = self.driver.free_memory()
        for bound in bounds:
            self._make_contexts(bound, places, base + scratch, working)
        self._warm_up(bounds)
        self._owned["contexts"] = max(0, free - self.driver.free_memory())

    def _deserialise(self, plans: Sequence[EngineDescription]) -> None:
        """Register the plugins that the engines use, then load the engine files."""
        directory, overlap = self._config.cubins_directory, self._config.overlap
        kernels = Kernels(self.driver, self.info.device, directory, overlap=overlap)
        nodes = [parse(node.op, node.fields) for plan in plans for node in plan.nodes]
        registry = trt.get_plugin_registry()
        self._creators = register(registry, self.info.device, kernels, nodes, self._messages)
        free = self.driver.free_memory()
        files = sorted({plan.file for plan in plans})
        # Kept by its engines alone, so that nothing of TensorRT outlives the CUDA context.
        runtime = trt.Runtime(self._messages)
        with self._progress.task("loading engines", len(files), "engines") as task:
            for file in files:
                self._engines[file] = self._engine(runtime, file)
                task.advance(1)
        self._owned["engines"] = max(0, free - self.driver.free_memory())

    def _engine(self, runtime: trt.Runtime, file: str) -> trt.ICudaEngine:
        self._messages.begin(file)
        with closing(Reader(self.package / file)) as reader:
            # None if it fails, although the bindings' signature does not say so.
            engine: trt.ICudaEngine | None = runtime.deserialize_cuda_engine(reader)
        if engine is None:
            self._messages.raise_failure()
            raise EngineError(
                f"{file} must be an engine that TensorRT loads here (got: {self._messages.why})"
            )
        return engine

    def _working(self, plan: EngineDescription) -> int:
        engine = self._engines[plan.file]
        return int(engine.get_device_memory_size_for_profile_v2(plan.profile))

    def _make_contexts(
        self, bound: BoundEngine, weights: Mapping[str, int], scratch: int, size: int
    ) -> None:
        """Make the contexts of a call, one for each combination of places of its tensors."""
        before = [buffer.current for buffer in bound.touched]
        for places in itertools.product((0, 1), repeat=len(bound.touched)):
            for buffer, place in zip(bound.touched, places, strict=True):
                buffer.current = place
            bound.contexts[places] = self._context(bound, weights, scratch, size)
        for buffer, place in zip(bound.touched, before, strict=True):
            buffer.current = place

    def _context(
        self, bound: BoundEngine, weights: Mapping[str, int], scratch: int, size: int
    ) -> trt.IExecutionContext:
        """A context with all addresses and sizes set, for the current places of the tensors."""
        plan = _plan(bound.call)
        self._messages.begin(plan.name)
        engine = self._engines[plan.file]
        managed = trt.ExecutionContextAllocationStrategy.USER_MANAGED
        # None if it fails, although the bindings' signature does not say so.
        context: trt.IExecutionContext | None = engine.create_execution_context(managed)
        if context is None:
            raise _refusal(plan, self._messages)
        context.name = plan.name
        # All contexts share this memory, since they run one after the other.
        context.set_device_memory(scratch, size)
        try:
            self._bind(context, bound, weights)
        except RuntimeError as e:  # some methods of the bindings raise it instead of giving False
            raise _refusal(plan, self._messages) from e
        return context

    def _bind(
        self, context: trt.IExecutionContext, bound: BoundEngine, weights: Mapping[str, int]
    ) -> None:
        """Set the profile, all sizes and all addresses of a context."""
        call, stream = bound.call, int(self.driver.stream)
        plan = _plan(call)
        _must(context.set_optimization_profile_async(plan.profile, stream), plan, self._messages)
        self.driver.synchronize()
        for name, tensor in call.inputs.items():
            self._shape(context, plan, name, cuda(tensor).spec.at({}))
        for name, weight in plan.weights.items():
            self._shape(context, plan, name, _bound(weight))
        addresses = {name: bound.where(name) for name in (*call.inputs, *call.outputs)}
        for name, address in {**addresses, **{n: weights[n] for n in plan.weights}}.items():
            _must(context.set_tensor_address(name, address), plan, self._messages)
        if missing := context.infer_shapes():
            raise EngineError(
                f"{plan.name} must be bound in every tensor (got none for {', '.join(missing)})"
            )

    def _shape(
        self,
        context: trt.IExecutionContext,
        plan: EngineDescription,
        name: str,
        shape: tuple[int, ...],
    ) -> None:
        if context.set_input_shape(name, shape):
            return
        engine = self._engines[plan.file]
        least, _, most = engine.get_tensor_profile_shape(name, plan.profile)
        raise EngineError(
            f"{plan.name}: {name} must be {tuple(least)} to {tuple(most)} (got {shape}); set "
            "engine.capacity to what the package was built for, or build it for this one"
        )

    def _warm_up(self, bounds: Sequence[BoundEngine]) -> None:
        """Run every context once, on values legal for any input; zero all tensors afterwards."""
        for tensor in self.tensors.all:
            if tensor.spec.dtype is DType.I32:
                for place in tensor.places:
                    count = tensor.spec.nbytes({}) // DType.I32.bytes
                    self.driver("cuMemsetD32Async", place, 1, count, self.driver.stream)
        contexts = [(bound, places) for bound in bounds for places in bound.contexts]
        with self._progress.task("warming up", len(contexts), "steps") as task:
            for bound, places in contexts:
                self._enqueue(bound, places)
                self.driver.synchronize()
                task.advance(1)
        for tensor in self.tensors.all:
            for place in tensor.places:
                size = tensor.spec.nbytes({})
                self.driver("cuMemsetD8Async", place, 0, size, self.driver.stream)
        self.driver.synchronize()

    # ---- run -----------------------------------------------------------------------------

    def _resolve(self, bound: BoundEngine, first: bool) -> Callable[[], None]:
        del first  # a plugin overlaps only launches of its own
        places = tuple(buffer.current for buffer in bound.touched)
        return partial(self._enqueue, bound, places)

    def _enqueue(self, bound: BoundEngine, places: tuple[int, ...]) -> None:
        context = bound.contexts[places]
        if not context.execute_async_v3(int(self.driver.stream)):
            self._messages.raise_failure()
            why = self._messages.why
            raise EngineError(f"TensorRT engine {context.name} must run (got: {why})")

    def close(self) -> None:
        """See Engine."""
        if not self.driver.ended:
            self.driver.enter()  # plugins free device memory when their contexts are destroyed
            self.driver.synchronize()
        for bound in self.replay.bound.values():
            bound.contexts.clear()
        self._engines.clear()
        creators, self._creators = self._creators, ()
        deregister(trt.get_plugin_registry(), creators)
        self.replay.close()


def _plan(call: Call) -> EngineDescription:
    graph = call.graph
    assert isinstance(graph, PlanGraph)
    return graph.plan


def _bound(weight: Weight) -> tuple[int, ...]:
    return tensor_of(Shaped(DType(weight.dtype), weight.shape)).shape


def _must(done: bool, plan: EngineDescription, messages: Messages) -> None:
    if not done:
        raise _refusal(plan, messages)


def _refusal(plan: EngineDescription, messages: Messages) -> EngineError:
    messages.raise_failure()
    return EngineError(f"TensorRT engine {plan.name} must take its tensors (got: {messages.why})")
