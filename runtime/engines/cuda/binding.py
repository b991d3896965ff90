"""Binds calls to kernel launches with addresses, which are captured once and then replayed."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from thor_dflash.core.errors import EngineError
from thor_dflash.core.tensors import DType, TensorSpec
from thor_dflash.package.launch_program import Program, Step
from thor_dflash.plugins.contract import NEXT, Attributes
from thor_dflash.plugins.cuda.enqueue import Arguments, content, values, working
from thor_dflash.plugins.launch import (
    PREFETCHED,
    BufferOffset,
    CallSite,
    Device,
    Launch,
    Pointer,
    PointerTable,
    Scratch,
    Shaped,
    Table,
)
from thor_dflash.plugins.registry import KERNELS
from thor_dflash.runtime.engines.cuda.graph_capture import HostCopy
from thor_dflash.runtime.engines.protocol import Call, Tensor


@dataclass(slots=True, eq=False)
class DoubleBuffer:
    """Which of two places holds the current values of some tensors. They switch together."""

    current: int = 0
    distance: int = 0
    """Bytes from the first place to the second, the same for all of the tensors."""
    control: int = -1
    """Offset in the control page of the word from which kernels read the place: an int64, 0 or the
    distance. -1: there is none, and a capture is valid only for the places at capture time."""
    word: int = 0
    """Device address of that word."""


@dataclass(slots=True, eq=False)
class CudaTensor:
    """A tensor in device memory: one place, or two if a step cannot update it in place."""

    spec: TensorSpec
    places: list[int] = field(default_factory=list[int])
    """Device addresses; empty until the engine has placed it."""
    buffer: DoubleBuffer | None = None
    """Set if there are two places."""
    control: int = -1
    """Offset in the control page, which holds the small tensors; -1: not in it."""
    written: bool = False
    """Whether a call writes it, as opposed to the host alone."""
    read: bool = False
    """Whether a call reads it."""
    readback: HostCopy | None = None
    """Its copy to the host, if it is small, calls write it and none reads it."""

    @property
    def now(self) -> int:
        """Address of the current value."""
        return self.places[self.buffer.current if self.buffer else 0]

    @property
    def next(self) -> int:
        """Address that the next value is written to."""
        return self.places[1 - self.buffer.current if self.buffer else 0]


def cuda(tensor: Tensor) -> CudaTensor:
    """Narrow the type of a tensor to this engine's."""
    assert isinstance(tensor, CudaTensor)
    return tensor


@dataclass(slots=True, eq=False, kw_only=True)
class BoundCall:
    """A call and what an engine keeps for it."""

    call: Call
    touched: list[DoubleBuffer] = field(default_factory=list[DoubleBuffer])
    """The double buffers of its tensors."""
    swapped: list[DoubleBuffer] = field(default_factory=list[DoubleBuffer])
    """Those that it updates: they switch when the call has run."""

    @property
    def outputs(self) -> Iterator[CudaTensor]:
        """The tensors of its outputs."""
        return map(cuda, self.call.outputs.values())

    @property
    def tensors(self) -> Iterator[CudaTensor]:
        """Its inputs, then its outputs."""
        return map(cuda, (*self.call.inputs.values(), *self.call.outputs.values()))

    def updated(self, in_place: Collection[str]) -> list[CudaTensor]:
        """The tensors that it reads and updates, without those in the outputs `in_place`. Also
        notes which tensors it reads and writes.
        """
        for tensor in self.call.inputs.values():
            cuda(tensor).read = True
        for tensor in self.call.outputs.values():
            cuda(tensor).written = True
        inputs = {cuda(tensor) for tensor in self.call.inputs.values()}
        outputs = ((name, cuda(tensor)) for name, tensor in self.call.outputs.items())
        return [t for name, t in outputs if t in inputs and name not in in_place]

    def swap(self) -> None:
        """Switch the double buffers that the call updates."""
        for buffer in self.swapped:
            buffer.current = 1 - buffer.current

    def where(self, name: str) -> int:
        """Address of an input or output."""
        if name not in self.call.outputs:
            return cuda(self.call.inputs[name]).now
        tensor = cuda(self.call.outputs[name])
        return tensor.next if tensor.buffer in self.swapped else tensor.now


@dataclass(slots=True, eq=False)
class BoundLaunch:
    """One launch of one step."""

    step: Step
    launch: Launch
    source: Path
    scratch: dict[str, int]
    """Name of a Scratch argument -> offset in the step's working memory."""
    counters: dict[str, int]
    """Name of a zeroed Scratch argument -> offset in the arena; shared by the step's launches."""


@dataclass(slots=True, eq=False, kw_only=True)
class BoundProgram(BoundCall):
    """A call of a program, with all its launches."""

    program: Program
    launches: list[BoundLaunch]
    working: int
    """Bytes of scratch memory that lasts for one step."""
    packed: Mapping[str, CallSite]
    """Packed weight -> the call that reads it."""
    sites: tuple[CallSite, ...]
    """The calls of the program's steps, in their order."""


def in_place(program: Program) -> frozenset[str]:
    """Outputs of a program that its kernels write in place, over the state they update."""
    return frozenset(
        step.ports[port]
        for step in program.steps
        for port in KERNELS[step.op].in_place
        if step.ports.get(port, "").startswith(NEXT)
    )


def bind(call: Call, program: Program, device: Device) -> BoundProgram:
    """Decide the launches of a call.

    Raises:
        EngineError: an operator's kernels do not take these sizes, or need more shared memory than
            the device has; names the step.
    """
    shapes = _shapes(call, program)
    sites = [_site(step, shapes) for step in program.steps]
    packed = {
        step.ports["packed"]: site
        for step, site in zip(program.steps, sites, strict=True)
        if "packed" in step.ports
    }
    bound: list[BoundLaunch] = []
    most, written = 0, set[str]()
    for step, alone in zip(program.steps, sites, strict=True):
        rule = KERNELS[step.op]
        if why := rule.refuse(alone):
            raise EngineError(f"{program.name}: {step.name}: {why}")
        site = replace(alone, following=packed.get(step.ports.get(PREFETCHED, "")))
        launches = rule.launches(site, device)
        outputs = {step.ports[port] for port in rule.in_place if port in step.ports}
        # Kernels read a state before they wait for the one before them: elsewhere no other kernel
        # of the same run writes it.
        if written & (set(step.ports.values()) - outputs):
            launches = tuple(replace(one, overlap=False) for one in launches)
        written |= outputs
        if (shared := max(one.shared for one in launches)) > device.shared:
            raise EngineError(
                f"{program.name}: {step.name}: shared memory of a block must be at most "
                f"{device.shared} bytes on this device (got {shared})"
            )
        offsets, size = working(launches)
        counters: dict[str, int] = {}
        bound += [BoundLaunch(step, one, rule.source(one), offsets, counters) for one in launches]
        most = max(most, size)
    return BoundProgram(
        call=call,
        program=program,
        launches=bound,
        working=most,
        packed=packed,
        sites=tuple(sites),
    )


def _site(step: Step, shapes: Mapping[str, Shaped]) -> CallSite:
    ports = {port: shapes[name] for port, name in step.ports.items()}
    return CallSite(KERNELS[step.op].op, Attributes(step.attributes), ports)


def _shapes(call: Call, program: Program) -> dict[str, Shaped]:
    found = {n: Shaped(DType(w.dtype), w.shape) for n, w in program.weights.items()}
    for name, value in program.values.items():
        found[name] = Shaped(DType(value.dtype), tuple(int(d) for d in value.shape))
    for name, tensor in (*call.inputs.items(), *call.outputs.items()):
        found[name] = Shaped(tensor.spec.dtype, tensor.spec.at({}))
    return found


@dataclass(frozen=True, slots=True)
class Places:
    """Device addresses of what the calls share."""

    arena: int
    """Base of all memory."""
    weights: Mapping[str, int]
    values: int
    """Base of the intermediate values of a call."""
    working: int
    """Base of scratch memory that lasts for one step."""
    tables: dict[bytes, int]
    """Content -> address."""


def address(bound: BoundProgram, step: Step, port: str, places: Places) -> int:
    """Device address of a step's port; 0 if the step leaves it out."""
    name = step.ports.get(port)
    if name is None:
        return 0
    if name in places.weights:
        return places.weights[name]
    if name in bound.program.values:
        return places.values + bound.program.values[name].offset
    return bound.where(name)


def table(
    bound: BoundProgram, one: BoundLaunch, argument: Table | PointerTable, places: Places
) -> bytes:
    """The content of a table argument."""
    return content(argument, lambda port: address(bound, one.step, port, places))


def arguments(
    bound: BoundProgram, one: BoundLaunch, places: Places, left_out: Collection[str] = ()
) -> Arguments:
    """The arguments of one launch, with null pointers for the ports `left_out`. Its tables must
    already be in device memory.
    """

    def scratch(wanted: Scratch) -> int:
        if wanted.zeroed:
            return places.arena + one.counters[wanted.name]
        return places.working + one.scratch[wanted.name]

    return values(
        one.launch,
        lambda port: 0 if port in left_out else address(bound, one.step, port, places),
        places.tables.__getitem__,
        scratch,
        lambda wanted: _offset_word(bound, one, wanted),
    )


def _offset_word(bound: BoundProgram, one: BoundLaunch, wanted: BufferOffset) -> int:
    """Address of the word with the place of some ports' values; 0 if they have one place."""
    found = {buffer.word for port in wanted.ports if (buffer := _buffer(bound, one.step, port))}
    if len(found) > 1:
        raise EngineError(
            f"{one.step.name}: states with one BufferOffset must change place together "
            f"(got {', '.join(wanted.ports)})"
        )
    return found.pop() if found else 0


def _buffer(bound: BoundProgram, step: Step, port: str) -> DoubleBuffer | None:
    """The double buffer of a port's tensor; None if it has one place."""
    name = step.ports.get(port, "")
    tensor = bound.call.inputs.get(name) or bound.call.outputs.get(name)
    return cuda(tensor).buffer if tensor else None


def without_offset(bound: BoundProgram, one: BoundLaunch) -> list[str]:
    """Ports of a launch whose tensors have two places but that have no BufferOffset argument."""
    shifted: set[str] = set()
    used: set[str] = set()
    for argument in one.launch.arguments:
        match argument:
            case Pointer(port):
                used.add(port)
            case PointerTable(ports):
                used |= set(ports)
            case BufferOffset(ports):
                shifted |= set(ports)
            case _:
                pass
    return sorted(port for port in used - shifted if _buffer(bound, one.step, port))
