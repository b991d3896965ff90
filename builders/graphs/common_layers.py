"""Graph blocks that target and drafter layers have in common."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from thor_dflash.builders.graphs.graph_builder import GraphBuilder, GraphValue
from thor_dflash.builders.graphs.weight_placement import (
    EMBEDDING,
    PlacedLinear,
    WeightPlacement,
    gate_rows,
)
from thor_dflash.core.model_dims import AttentionDims
from thor_dflash.core.tensors import DType
from thor_dflash.plugins import LINEAR
from thor_dflash.plugins.contract import Attribute
from thor_dflash.plugins.onnx_builder import ONNX_TYPE

NO_VALUES: Mapping[str, GraphValue] = {}
NO_ATTRIBUTES: Mapping[str, Attribute] = {}


SAMPLING: Mapping[str, tuple[str, DType, int]] = {
    "length": ("length", DType.I32, 1),
    "seed": ("sampling.seed", DType.I32, 2),
    "top_k": ("sampling.top_k", DType.I32, 1),
    "temperature": ("sampling.temperature", DType.F32, 1),
    "top_p": ("sampling.top_p", DType.F32, 1),
    "min_log_p": ("sampling.min_log_p", DType.F32, 1),
}
"""`sample`'s ports that say how to sample -> graph input, its type and its size."""


def sampling_inputs(
    g: GraphBuilder, ports: Collection[str] = SAMPLING.keys()
) -> dict[str, GraphValue]:
    """Return the graph's inputs that say how to sample, by `sample`'s ports."""
    inputs = {port: SAMPLING[port] for port in ports}
    return {port: g.input(name, dtype, (size,)) for port, (name, dtype, size) in inputs.items()}


def embed(
    g: GraphBuilder,
    source: WeightPlacement,
    tokens: GraphValue,
    activations: DType,
    call: str = "",
) -> GraphValue:
    """Look up rows of the target's embedding table, in the activations' type. `call` begins the
    names of nodes of which a graph has several, here and below.
    """
    table, name = source.plain(g, EMBEDDING), f"{call}embedding"
    shape = *tokens.shape, table.shape[1]
    rows = g.node("Gather", name, table.dtype, shape, table, tokens, axis=0)
    if rows.dtype is activations:
        return rows
    return g.node("Cast", f"{name}.rows", activations, shape, rows, to=ONNX_TYPE[activations])


def project(
    g: GraphBuilder,
    name: str,
    x: GraphValue,
    weights: Sequence[PlacedLinear],
    inputs: Mapping[str, GraphValue] = NO_VALUES,
    attributes: Mapping[str, Attribute] = NO_ATTRIBUTES,
) -> list[GraphValue]:
    """Add a `linear` of one or more weights over the same rows. Returns one output per weight."""
    segments = [w.values(g, i) for i, w in enumerate(weights)]
    ports = {"x": x, **inputs, **{k: v for s in segments for k, v in s.items()}}
    return list(g.operator(LINEAR, name, ports, {"segments": len(weights), **attributes}).values())


def gated_qkv(
    g: GraphBuilder,
    source: WeightPlacement,
    layer: str,
    dims: AttentionDims,
    x: GraphValue,
    norm: Mapping[str, Attribute],
    call: str = "",
) -> list[GraphValue]:
    """q, gate, k and v of a gated attention from the rows before its norm."""
    queries, gates = gate_rows(dims.heads, dims.head_dim)
    name = f"{layer}.self_attn"
    weights = [
        source.packed(f"{name}.q_proj", queries, "query"),
        source.packed(f"{name}.q_proj", gates, "gate"),
        source.packed(f"{name}.k_proj"),
        source.packed(f"{name}.v_proj"),
    ]
    weight = {"norm_weight": source.plain(g, f"{layer}.input_layernorm.weight")}
    return project(g, f"{call}{source.prefix}{name}.qkv", x, weights, weight, norm)


def residual(
    g: GraphBuilder,
    source: WeightPlacement,
    name: str,
    x: GraphValue,
    onto: GraphValue,
    inputs: Mapping[str, GraphValue] = NO_VALUES,
    attributes: Mapping[str, Attribute] = NO_ATTRIBUTES,
    call: str = "",
) -> GraphValue:
    """onto + x w^T."""
    return project(
        g,
        call + source.prefix + name,
        x,
        [source.packed(name)],
        {"residual": onto, **inputs},
        {"epilogue": "residual", **attributes},
    )[0]


def mlp(
    g: GraphBuilder,
    source: WeightPlacement,
    layer: str,
    x: GraphValue,
    norm: Mapping[str, Attribute],
    call: str = "",
) -> GraphValue:
    """x + down(silu(gate h) * (up h)), h the normed x."""
    weights = [source.packed(f"{layer}.mlp.{part}_proj") for part in ("gate", "up")]
    weight = source.plain(g, f"{layer}.post_attention_layernorm.weight")
    [h] = project(
        g,
        f"{call}{source.prefix}{layer}.mlp.gate_up",
        x,
        weights,
        {"norm_weight": weight},
        {"epilogue": "swiglu", **norm},
    )
    return residual(g, source, f"{layer}.mlp.down_proj", h, x, call=call)
