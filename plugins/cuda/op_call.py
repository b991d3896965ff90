"""One call of an operator, on a stream and in memory that the caller owns."""

# cuda-python publishes no types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from thor_dflash.core.errors import EngineError
from thor_dflash.plugins.cuda.enqueue import content, enqueue, values, working
from thor_dflash.plugins.cuda.kernel_cache import Kernels
from thor_dflash.plugins.launch import CallSite, OpKernels, PointerTable, Scratch, Table


class OpCall:
    """The launches of a call at fixed sizes, and their persistent memory.

    Constant tables, tables of addresses and counters are created when `run` first needs them. This
    is not possible while a stream is captured, so a call must run once with its addresses before it
    is captured with them.
    """

    def __init__(self, kernels: Kernels, rule: OpKernels, site: CallSite) -> None:
        self._kernels = kernels
        self._rule = rule
        self._site = site
        self._launches = rule.launches(site, kernels.device)
        self._offsets, self.working = working(self._launches)
        self._tables: dict[bytes, int] = {}
        self._counters: dict[str, int] = {}

    def run(self, at: Mapping[str, int], memory: int, stream: Any) -> None:
        """Enqueue the launches on a stream.

        Args:
            at: Addresses by port. If an output of `rule.in_place` has another address than its
                input, the input is first copied there.
            memory: Address of `working` bytes.
            stream: A CUstream.

        Raises:
            EngineError: the stream is being captured and the call never ran with these addresses;
                a launch failed.
        """
        where = self._settle(dict(at), stream)

        def address(port: str) -> int:
            return where.get(port, 0)

        def scratch(wanted: Scratch) -> int:
            if wanted.zeroed:
                return self._counters[wanted.name]
            return memory + self._offsets[wanted.name]

        self._provide(where, stream)
        for i, launch in enumerate(self._launches):
            kernel = self._kernels.function(self._rule.source(launch), launch)
            arguments = values(launch, address, self._tables.__getitem__, scratch, lambda wanted: 0)
            # Only behind a launch of this call: the work before the call may not be a kernel.
            overlap = self._kernels.overlap and launch.overlap and i > 0
            enqueue(self._kernels.gate, stream, kernel, launch, arguments, overlap=overlap)

    def _settle(self, at: dict[str, int], stream: Any) -> dict[str, int]:
        """Returns the addresses, with each state that is updated in place at its output's address,
        after copying it there if necessary.
        """
        for output in self._rule.in_place:
            source = self._rule.op.alias_of(output) or output.replace("next_", "", 1)
            if output in at and at[output] != at[source]:
                size = self._site.ports[output].nbytes
                self._kernels.gate("cuMemcpyDtoDAsync", at[output], at[source], size, stream)
                at[source] = at[output]
        return at

    def _provide(self, at: Mapping[str, int], stream: Any) -> None:
        """Create the tables and counters that do not exist yet."""
        for argument in (a for launch in self._launches for a in launch.arguments):
            if isinstance(argument, Table | PointerTable):
                made = content(argument, lambda port: at.get(port, 0))
                if made not in self._tables:
                    self._tables[made] = self._upload(made, stream)
            elif (
                isinstance(argument, Scratch)
                and argument.zeroed
                and argument.name not in self._counters
            ):
                self._counters[argument.name] = self._zeros(argument.nbytes, stream)

    def _upload(self, data: bytes, stream: Any) -> int:
        address = self._allocate(len(data), stream)
        host = np.frombuffer(data, np.uint8).ctypes.data
        self._kernels.gate("cuMemcpyHtoDAsync", address, host, len(data), stream)
        return address

    def _zeros(self, nbytes: int, stream: Any) -> int:
        address = self._allocate(nbytes, stream)
        self._kernels.gate("cuMemsetD8Async", address, 0, nbytes, stream)
        return address

    def _allocate(self, nbytes: int, stream: Any) -> int:
        gate = self._kernels.gate
        if int(gate("cuStreamIsCapturing", stream)) != 0:
            raise EngineError(
                f"{self._rule.op.type} must run once with these addresses before it is captured "
                "with them (got a captured stream)"
            )
        return gate.allocate(nbytes)

    def close(self) -> None:
        """Free the memory; none of the launches may be running. Idempotent."""
        for address in (*self._tables.values(), *self._counters.values()):
            self._kernels.gate.free(address)
        self._tables.clear()
        self._counters.clear()
