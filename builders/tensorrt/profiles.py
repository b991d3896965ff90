"""Decides which graphs share an engine, and the sizes of each of its optimization profiles."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import onnx

from thor_dflash.builders.tensorrt.deployment_graph import Deployment
from thor_dflash.core.model_dims import DrafterDims
from thor_dflash.plugins.tensorrt.node import KEYS, KNOWN
from thor_dflash.plugins.verify_attention import TILE

CACHE = "cache_rows"
RING = "ring_rows."
DYNAMIC = -1
"""TensorRT's mark of a size that a profile decides."""
Bounds = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""Least, usual and largest shape of a value in one profile."""


@dataclass(frozen=True, slots=True)
class SizeRange:
    """Sizes of one dimension in one profile: least, the one to optimise for, most."""

    least: int
    best: int
    most: int


@dataclass(frozen=True, slots=True)
class EngineGraphs:
    """Graphs that are profiles of one engine."""

    name: str
    """Name of the engine's file, without its suffix."""
    model: onnx.ModelProto
    """Sizes in which the graphs differ are symbolic."""
    graphs: tuple[Deployment, ...]
    """The graph of each profile."""
    ranges: tuple[Mapping[str, SizeRange], ...]
    """For each profile: symbolic size -> range."""


def session_ranges(
    capacity: int, longest: int, rows: int, drafter: DrafterDims | None
) -> dict[str, SizeRange]:
    """Return the ranges of the sizes that a session decides; `rows`: most rows of any step.

    A cache has whole tiles for the context and one step. A ring has rows for one step and for the
    window, or for the whole context if that is shorter.
    """

    def tiles(context: int) -> int:
        return -(-(context + rows) // TILE) * TILE

    ranges = {CACHE: SizeRange(TILE, tiles(capacity), tiles(longest))}
    for i, layer in enumerate(drafter.layers if drafter else ()):
        best, most = (min(layer.window or n, n) + rows for n in (capacity, longest))
        ranges[f"{RING}{i}"] = SizeRange(rows, best, most)
    return ranges


def gather(
    deployments: Sequence[Deployment], ranges: Mapping[str, SizeRange]
) -> Iterator[EngineGraphs]:
    """Yield every engine to build.

    Graphs share an engine if they hold constants and differ only in sizes. All others are an engine
    each, which costs no memory, as their weights are inputs.
    """
    groups: dict[object, list[Deployment]] = {}
    for one in deployments:
        key = tuple(map(_sizeless, one.model.graph.node)) if one.products else one.name
        groups.setdefault(key, []).append(one)
    for group in groups.values():
        yield _together(group, ranges)


def _sizeless(node: onnx.NodeProto) -> bytes:
    """Serialise a node without its hash and without `known`, whose row counts no plugin reads."""
    copy = onnx.NodeProto()
    copy.CopyFrom(node)
    for attribute in [a for a in copy.attribute if a.name in (KNOWN, *KEYS)]:
        copy.attribute.remove(attribute)
    return bytes(copy.SerializeToString(deterministic=True))


def _together(group: Sequence[Deployment], ranges: Mapping[str, SizeRange]) -> EngineGraphs:
    model = onnx.ModelProto()
    model.CopyFrom(group[0].model)
    made: list[dict[str, SizeRange]] = [{} for _ in group]
    rows = (_values(one.model) for one in group)
    for to, *values in zip(_values(model), *rows, strict=True):
        _symbolise(to, values, made)
    used = {d.dim_param for v in _values(model) for d in v.type.tensor_type.shape.dim}
    for profile in made:
        profile |= {symbol: size for symbol, size in ranges.items() if symbol in used}
    return EngineGraphs(group[0].name, model, tuple(group), tuple(made))


def _values(model: onnx.ModelProto) -> list[onnx.ValueInfoProto]:
    graph = model.graph
    return sorted((*graph.input, *graph.output, *graph.value_info), key=lambda v: v.name)


def _symbolise(
    to: onnx.ValueInfoProto,
    values: Sequence[onnx.ValueInfoProto],
    made: Sequence[dict[str, SizeRange]],
) -> None:
    """Make those sizes of a value symbolic in which the graphs differ."""
    assert len({v.name for v in values}) == 1, [v.name for v in values]
    shapes = [v.type.tensor_type.shape.dim for v in values]
    for axis, dim in enumerate(to.type.tensor_type.shape.dim):
        sizes = [shape[axis].dim_value for shape in shapes]
        if dim.dim_param or len(set(sizes)) == 1:
            continue
        symbol = "size." + ".".join(map(str, sizes))
        dim.dim_param = symbol
        for profile, size in zip(made, sizes, strict=True):
            profile[symbol] = SizeRange(size, size, size)


def dims(info: onnx.ValueInfoProto) -> tuple[int, ...]:
    """Return a shape in TensorRT's notation."""
    return tuple(DYNAMIC if d.dim_param else d.dim_value for d in info.type.tensor_type.shape.dim)


def bounds(info: onnx.ValueInfoProto, ranges: Mapping[str, SizeRange]) -> Bounds:
    """Return the shapes of a value in a profile."""
    shape = info.type.tensor_type.shape.dim
    each = [
        ranges[d.dim_param] if d.dim_param else SizeRange(d.dim_value, d.dim_value, d.dim_value)
        for d in shape
    ]
    return (
        tuple(size.least for size in each),
        tuple(size.best for size in each),
        tuple(size.most for size in each),
    )
