"""A drafter's sublayers, attention and MLP: what DFlash and DFlash2 have before and behind them.

DFlash norms the rows in the first product and adds the residual in the last. DFlash2 convolves the
normed rows before the first product, and the last one's result before the residual is added. Both
convolutions' kernels are made at once, from the rows before the first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from thor_dflash.builders.graphs.common_layers import project, residual
from thor_dflash.builders.graphs.graph_builder import GraphBuilder, GraphValue
from thor_dflash.builders.graphs.weight_placement import WeightPlacement
from thor_dflash.core.model_dims import DraftConvDims
from thor_dflash.plugins import DRAFT_CONV
from thor_dflash.plugins.contract import Attribute


@dataclass(frozen=True, slots=True)
class SublayerInput:
    """What a sublayer's first product reads, and what `leave` needs of it."""

    rows: GraphValue
    ports: Mapping[str, GraphValue]
    """Further ports of the product: the norm, unless `rows` are normed."""
    attributes: Mapping[str, Attribute]
    onto: GraphValue
    """The residual stream."""
    conv: Mapping[str, GraphValue]
    """Kernels of the convolution behind the sublayer; empty for DFlash."""
    kernels: Mapping[str, Attribute]


def enter(
    g: GraphBuilder,
    source: WeightPlacement,
    conv: str,
    x: GraphValue,
    norm: str,
    eps: Mapping[str, Attribute],
    dims: DraftConvDims | None,
) -> SublayerInput:
    """Begin a sublayer of the residual stream `x`. `conv` and `norm` are names in the checkpoint,
    `eps` the norm's attributes.
    """
    weight = {"norm_weight": source.plain(g, f"{norm}.weight")}
    if dims is None:
        return SublayerInput(x, weight, eps, x, {}, {})
    stem = f"{source.prefix}{conv}"
    matrix = source.packed(f"{conv}.kernel_projection")
    [dynamic] = project(g, f"{stem}.kernel_projection", x, [matrix], weight, eps)
    ports = {"dynamic": dynamic, "base": source.plain(g, f"{conv}.base_kernel")}
    kernels: dict[str, Attribute] = {"taps": dims.taps, "group": dims.group}
    rows = g.operator(
        DRAFT_CONV, f"{stem}.before", {"x": x, **weight, **ports}, {"side": 0, **kernels, **eps}
    )["y"]
    return SublayerInput(rows, {}, {}, x, ports, kernels)


def leave(
    g: GraphBuilder, source: WeightPlacement, own: SublayerInput, name: str, x: GraphValue
) -> GraphValue:
    """End a sublayer with the product `name` of the rows `x`; return the new residual stream."""
    if not own.conv:
        return residual(g, source, name, x, own.onto)
    [made] = project(g, source.prefix + name, x, [source.packed(name)])
    return g.operator(
        DRAFT_CONV,
        f"{source.prefix}{name}.behind",
        {"x": made, **own.conv, "residual": own.onto},
        {"side": 1, **own.kernels},
    )["y"]
