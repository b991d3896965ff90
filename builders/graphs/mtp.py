"""The graphs of an MTP layer: draft a chain of tokens, observe committed rows.

Of token x at position i and the target's row h at i - 1, after the final norm:

    z = fc [norm(embedding of x) ; norm(h)]         the layer's input, and its key and value
    g = norm(layer z)                               head g: the draft of the token at i + 1

The next draft has the same with the draft for x and g for h. There is no row for position 0. z
needs no attention, so neither does observing. Keys lie at index i and turn by it, where vLLM's turn
by i - 1: only differences of positions count.

Source: vLLM qwen3_5_mtp.py; transformers has no such model.
"""

from __future__ import annotations

from collections.abc import Mapping

from thor_dflash.builders.checkpoint.mtp import HALVES, LAYER
from thor_dflash.builders.graphs.common_layers import (
    embed,
    gated_qkv,
    mlp,
    project,
    residual,
    sampling_inputs,
)
from thor_dflash.builders.graphs.draft_graphs import DraftGraphs, index
from thor_dflash.builders.graphs.graph_builder import GraphBuilder, GraphValue
from thor_dflash.core.tensors import DType
from thor_dflash.plugins import CONTEXT_KV, DRAFT_ATTENTION, FILL_DRAFTS, HEAD, RMS_NORM, SAMPLE
from thor_dflash.plugins.contract import NEXT

ATTENTION = f"{LAYER}.self_attn"


class MtpGraphs(DraftGraphs):
    """Writes an MTP layer into graphs."""

    def propose(self, *, sampled: bool = False) -> GraphBuilder:
        """block_ids [R]: tokens, negative where a draft is wanted -> tokens [R]. First takes in up
        to R rows from index `drafter.length` on, of which `drafter.row` is the last. Drafts are the
        best ids, or drawn with the noise that the target will use for the same positions.
        """
        g = GraphBuilder("propose_sampled" if sampled else "propose")
        rows, drafts = self._shape.block, self._rows - 1
        z = self._input(g, "pending.", *self._held(g, rows))
        ring = self._write(g, "pending.", z, index(g, "drafter.length"), self._rings(g), drafts < 3)
        last = g.input("drafter.row", DType.I32, (1,))
        z = g.node("Gather", "pending.last", z.dtype, (1, self.dims.hidden), z, last, axis=0)
        tokens = g.input("block_ids", DType.I32, (rows,))
        for step in range(1, drafts + 1):
            name = f"step{step}."
            length = index(g, "length" if step == 1 else f"drafter.length.{step - 1}")
            if 1 < step < drafts:  # nothing reads the row of the last draft
                ring = self._write(g, name, z, length, ring, step == drafts - 1)
            x = self._attention(g, name, z, length, ring)
            x = mlp(g, self._source, LAYER, x, self._norm, name)
            best = self._best(g, name, x, step if sampled else 0)
            named = {"tokens": "tokens"} if step == drafts else {}
            filled = g.operator(
                FILL_DRAFTS, f"{name}fill", {"ids": tokens, "best": best}, {"at": step}, named
            )
            tokens = filled["tokens"]
            if step < drafts:
                own = {"x": x, "weight": self._source.plain(g, "norm.weight")}
                hidden = g.operator(RMS_NORM, f"{name}norm", own, {"eps": self.dims.eps})["y"]
                z = self._input(g, f"step{step + 1}.", filled["first"], hidden)
        g.output(tokens)
        return g

    def observe(self, name: str, rows: int) -> GraphBuilder:
        """taps [rows, H], following [rows]: the target's rows and the token after each, of indices
        drafter.length .. drafter.length + rows - 1 -> keys and values in the ring.
        """
        g = GraphBuilder(name)
        z = self._input(g, "", *self._held(g, rows))
        self._write(g, "", z, index(g, "drafter.length"), self._rings(g), True)
        return g

    def _held(self, g: GraphBuilder, rows: int) -> tuple[GraphValue, GraphValue]:
        """The tokens and rows of a step's input."""
        taps = g.input("taps", self._shape.activations, (rows, self.dims.hidden))
        return g.input("following", DType.I32, (rows,)), taps

    def _input(
        self, g: GraphBuilder, name: str, tokens: GraphValue, hidden: GraphValue
    ) -> GraphValue:
        """z."""
        rows = embed(g, self._target, tokens, self._shape.activations, name)
        z: dict[str, GraphValue] = {}
        for half, x in zip(HALVES, (rows, hidden), strict=True):
            norm = f"pre_fc_norm_{half.removeprefix('fc_')}.weight"
            [y] = project(
                g,
                f"{name}{self._source.prefix}{half}",
                x,
                [self._source.packed(half)],
                {"norm_weight": self._source.plain(g, norm), **z},
                {**self._norm, **({"epilogue": "residual"} if z else {})},
            )
            z = {"residual": y}
        return z["residual"]

    def _write(
        self,
        g: GraphBuilder,
        name: str,
        z: GraphValue,
        length: GraphValue,
        ring: Mapping[str, GraphValue],
        last: bool,
    ) -> Mapping[str, GraphValue]:
        """Return the ring with the keys and values of rows; the `last` one is an output."""
        source = self._source
        k, v = project(
            g,
            f"{name}{source.prefix}context",
            z,
            [source.packed(f"{ATTENTION}.{n}_proj") for n in "kv"],
            {"norm_weight": source.plain(g, f"{LAYER}.input_layernorm.weight")},
            self._norm,
        )
        ports = {"length": length, "k0": k, "v0": v}
        ports["k_norm0"] = source.plain(g, f"{ATTENTION}.k_norm.weight")
        out = g.operator(
            CONTEXT_KV,
            f"{name}{source.prefix}context_kv",
            {**ports, **{f"ring_{n}0": value for n, value in ring.items()}},
            {"layers": 1, **self._heads()},
            {f"next_ring_{n}0": f"{NEXT}drafter.0.{n}" for n in "kv"} if last else {},
        )
        for value in out.values() if last else ():
            g.output(value)
        return {n: out[f"next_ring_{n}0"] for n in "kv"}

    def _attention(
        self,
        g: GraphBuilder,
        name: str,
        z: GraphValue,
        length: GraphValue,
        ring: Mapping[str, GraphValue],
    ) -> GraphValue:
        """z + the projection of its attention to the ring and itself, gated."""
        source, dims = self._source, self.dims.attention
        q, gate, k, v = gated_qkv(g, source, LAYER, dims, z, self._norm, name)
        o = g.operator(
            DRAFT_ATTENTION,
            f"{name}{source.prefix}{ATTENTION}",
            {
                "q": q,
                "k": k,
                "v": v,
                "q_norm": source.plain(g, f"{ATTENTION}.q_norm.weight"),
                "k_norm": source.plain(g, f"{ATTENTION}.k_norm.weight"),
                "length": length,
                "window": index(g, "drafter.0.window"),
                "first": index(g, "drafter.first"),
                **{f"ring_{n}": value for n, value in ring.items()},
            },
            {"heads": dims.heads, "causal": 1, **self._heads()},
        )["o"]
        gated = {"gate": gate}, {"gate": "sigmoid"}
        return residual(g, source, f"{ATTENTION}.o_proj", o, z, *gated, name)

    def _best(self, g: GraphBuilder, name: str, x: GraphValue, first: int) -> GraphValue:
        """The best id after each row, or one drawn for position length + `first`."""
        ports = {"x": x, "norm_weight": self._source.plain(g, "norm.weight"), **self._head(g)}
        limit = {"vocab": self._limit}
        out = g.operator(HEAD, f"{name}head", ports, {**limit, **self._norm})
        if not first:
            return out["best"]
        ports = {"logits": out["logits"], **self._id_map(g), **sampling_inputs(g)}
        return g.operator(SAMPLE, f"{name}sample", ports, {**limit, "first": first})["choice"]

    def _rings(self, g: GraphBuilder) -> dict[str, GraphValue]:
        return {n: self._ring(g, 0, n) for n in "kv"}
