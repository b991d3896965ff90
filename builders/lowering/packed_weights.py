"""Packs weights as the kernels read them, each once, however many graphs use it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from thor_dflash.builders.output.weight_files import StoredTensor, WeightFiles
from thor_dflash.core.tensors import Array, DType
from thor_dflash.package.manifest import WEIGHTS
from thor_dflash.plugins.launch import CallSite, OpKernels

CONSTANTS = f"{WEIGHTS}constants.bin"
"""The file of constants that the graphs hold themselves."""


@dataclass(slots=True)
class WeightPacker:
    """The weight files of a package for an engine that runs programs."""

    source: WeightFiles
    """The weights as the checkpoints hold them, which the graphs refer to."""
    files: WeightFiles = field(default_factory=WeightFiles)
    """The packed weights, which the package will hold."""
    _stored: dict[str, StoredTensor] = field(default_factory=dict[str, StoredTensor])
    _sources: dict[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    _last: dict[str, dict[str, Array]] = field(default_factory=dict[str, dict[str, Array]])
    """Arrays of the last packed call, cached because its parts are written one after the other."""

    def stored(self, name: str) -> StoredTensor:
        """Return where a weight is stored."""
        return self._stored[name]

    def plain(self, name: str) -> None:
        """Add a tensor as the checkpoint stores it."""
        if name not in self._stored:
            old = self.source.stored(name)
            self._stored[name] = self.files.add(
                old.file, name, old.dtype, old.shape, lambda: self.source.array(name)
            )

    def constant(self, name: str, value: Array) -> None:
        """Add a constant that the graph holds itself."""
        if name not in self._stored:
            self._stored[name] = self.files.add(
                CONSTANTS, name, DType.of(value), value.shape, lambda: value
            )

    def packed(
        self, rule: OpKernels, site: CallSite, sources: Mapping[str, str]
    ) -> dict[str, StoredTensor]:
        """Add the packed form of a call's weights, `sources` (port -> name). Returns port -> packed
        weight.
        """
        assert rule.packed is not None
        first = sources["weight0"]
        stem, names = first.removesuffix(".weight"), tuple(sources.values())
        known = self._sources.setdefault(stem, names)
        assert known == names, (stem, names)
        made: dict[str, StoredTensor] = {}
        for port, shaped in rule.packed(site).items():
            name = f"{stem}.{port}"
            if name not in self._stored:
                self._stored[name] = self.files.add(
                    self.source.stored(first).file,
                    name,
                    shaped.dtype,
                    shaped.shape,
                    self._maker(rule, site, stem, port, sources),
                )
            made[port] = self._stored[name]
        return made

    def _maker(
        self, rule: OpKernels, site: CallSite, stem: str, port: str, sources: Mapping[str, str]
    ) -> Callable[[], Array]:
        def make() -> Array:
            if stem not in self._last:
                assert rule.pack is not None
                arrays = {p: self.source.array(name) for p, name in sources.items()}
                self._last = {stem: rule.pack(site, arrays)}
            return self._last[stem][port]

        return make
