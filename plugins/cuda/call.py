"""One call of a room on a stream that somebody else owns, with memory that somebody else places."""

# cuda-python publishes no types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from thor_dflash.errors import EngineError
from thor_dflash.plugins.cuda.enqueue import content, enqueue, values, working
from thor_dflash.plugins.cuda.kernels import Kernels
from thor_dflash.plugins.launch import Addresses, Scratch, Site, Table
from thor_dflash.plugins.rules import Rule


class Call:
    """The launches of a call at fixed sizes, and the memory that is theirs for good.

    Constant tables, tables of addresses and counters are made when `run` first needs them. A
    captured stream only finds them again, so a call runs once with its addresses before it is
    captured with them.
    """

    def __init__(self, kernels: Kernels, rule: Rule, site: Site) -> None:
        self._kernels = kernels
        self._rule = rule
        self._site = site
        self._launches = rule.launches(site, kernels.device)
        self._offsets, self.working = working(self._launches)
        self._tables: dict[bytes, int] = {}
        self._counters: dict[str, int] = {}

    def run(self, at: Mapping[str, int], memory: int, stream: Any) -> None:
        """Put the launches on a stream.

        Args:
            at: Addresses by port. An output of `rule.in_place` that is not where its input is gets
                a copy of the input first.
            memory: `working` bytes, address.
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
            kernel = self._kernels.function(self._rule.folder / launch.source, launch)
            arguments = values(launch, address, self._tables.__getitem__, scratch, lambda wanted: 0)
            # Only behind one of its own: what ran before the call may be no kernel at all.
            overlap = launch.overlap and i > 0
            enqueue(self._kernels.gate, stream, kernel, launch, arguments, overlap=overlap)

    def _settle(self, at: dict[str, int], stream: Any) -> dict[str, int]:
        """Addresses with every state that is renewed in place in one place."""
        for output in self._rule.in_place:
            source = self._rule.op.alias_of(output) or output.replace("next_", "", 1)
            if output in at and at[output] != at[source]:
                size = self._site.ports[output].nbytes
                self._kernels.gate("cuMemcpyDtoDAsync", at[output], at[source], size, stream)
                at[source] = at[output]
        return at

    def _provide(self, at: Mapping[str, int], stream: Any) -> None:
        """Make the tables and counters that are not there yet."""
        for argument in (a for launch in self._launches for a in launch.arguments):
            if isinstance(argument, Table | Addresses):
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

    @property
    def nbytes(self) -> int:
        """Device memory it holds, bytes."""
        counters = {
            a.name: a.nbytes
            for launch in self._launches
            for a in launch.arguments
            if isinstance(a, Scratch) and a.zeroed
        }
        return sum(map(len, self._tables)) + sum(counters[name] for name in self._counters)

    def close(self) -> None:
        """Give its memory back; nothing of it may be running. Idempotent."""
        for address in (*self._tables.values(), *self._counters.values()):
            self._kernels.gate("cuMemFree", address)
        self._tables.clear()
        self._counters.clear()
