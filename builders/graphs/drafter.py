"""The drafter's graphs: propose a block, observe committed rows."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from thor_dflash.builders.graphs.common_layers import NO_VALUES, embed, project, sampling_inputs
from thor_dflash.builders.graphs.draft_graphs import DraftGraphs
from thor_dflash.builders.graphs.draft_sublayers import enter, leave
from thor_dflash.builders.graphs.graph_builder import GraphBuilder, GraphValue, integers
from thor_dflash.core.tensors import DType
from thor_dflash.plugins import (
    CONTEXT_KV,
    DRAFT_ATTENTION,
    FILL_DRAFTS,
    HEAD,
    LINEAR,
    SAMPLE,
    SELECTOR,
)
from thor_dflash.plugins.contract import NEXT, Attribute
from thor_dflash.plugins.onnx_builder import ONNX_TYPE
from thor_dflash.plugins.selector import LAW

DRAWN = ("length", "seed", "temperature")
"""What the selector needs of sampling: its candidates are few already."""
CANDIDATES = 16
"""The best ids of a DFlash drafter's head that a draft of rejection sampling is drawn from."""


class DrafterGraphs(DraftGraphs):
    """Writes a DFlash drafter's layers into graphs."""

    def propose(self) -> GraphBuilder:
        """last [1], forced [R] -> tokens [R]: the last token and its drafted continuation; and, for
        `sample_drafts`, draft_logits [R, ...], with a selector also draft_hidden [R, its rank].
        """
        g = GraphBuilder("propose")
        last = g.input("last", DType.I32, (1,))
        rows = self._rows
        masks = np.full(rows - 1, self.dims.mask_token, np.int32)
        ids = g.node("Concat", "ids", DType.I32, (rows,), last, g.constant("masks", masks), axis=0)
        x = embed(g, self._target, ids, self._shape.activations)
        for i in range(len(self.dims.layers)):
            x = self._attention(g, i, x)
            x = self._mlp(g, i, x)
        head = g.operator(
            HEAD,
            "head",
            {"x": x, "norm_weight": self._source.plain(g, "norm.weight"), **self._head(g)},
            {"vocab": self._limit, **self._norm},
            {"logits": "draft_logits"},
        )
        if self.dims.selector is None:
            g.output(self._compose(g, last, head["best"]))
        else:
            hidden = self._selector_rows(g, x)
            g.output(self._selected(g, head["logits"], hidden))
            g.output(hidden)
        g.output(head["logits"])
        return g

    def sample_drafts(self) -> GraphBuilder:
        """last [1], forced [R], what `propose` left -> tokens [R], drawn with the noise that the
        target will use for the same positions.
        """
        g = GraphBuilder("sample_drafts")
        logits = self._left_logits(g)
        if self.dims.selector is not None:
            drawn = sampling_inputs(g, DRAWN)
            g.output(self._selected(g, logits, self._left_hidden(g), drawn))
            return g
        ports = {"logits": logits, **sampling_inputs(g), **self._id_map(g)}
        # Row j of the drafter drafts the token after row j - 1 of the block.
        choice = g.operator(SAMPLE, "sample", ports, {"vocab": self._limit, "first": 0})["choice"]
        g.output(self._compose(g, g.input("last", DType.I32, (1,)), choice))
        return g

    def sample_drafts_rejection(self) -> GraphBuilder:
        """The same -> tokens [R], each drawn by noise of its own from the ids draft.candidates
        [R, candidates] with the law of draft.scores, for rejection sampling.
        """
        g = GraphBuilder("sample_drafts_rejection")
        hidden = self._left_hidden(g) if self.dims.selector else None
        drawn = sampling_inputs(g, DRAWN)
        for value in self._select(g, self._left_logits(g), hidden, drawn, rejection=1).values():
            g.output(value)
        return g

    @property
    def candidates(self) -> int:
        """Ids that a draft of rejection sampling is drawn from."""
        return self.dims.selector.top_k if self.dims.selector else CANDIDATES

    def _left_logits(self, g: GraphBuilder) -> GraphValue:
        ids = self._draft_ids
        width = self._target.head(self._tied).weight.shape[0] if ids is None else len(ids)
        return g.input("draft_logits", DType.F32, (self._rows, width))

    def _left_hidden(self, g: GraphBuilder) -> GraphValue:
        assert self.dims.selector is not None
        shape = (self._rows, self.dims.selector.rank)
        return g.input("draft_hidden", self._shape.activations, shape)

    def observe(self, name: str, rows: int) -> GraphBuilder:
        """taps [rows] of positions length .. length + rows - 1 -> keys and values in the rings."""
        g = GraphBuilder(name)
        dims, source = self.dims, self._source
        width = len(dims.taps) * dims.hidden
        taps = g.input("taps", self._shape.activations, (rows, width))
        [fused] = project(g, f"{source.prefix}fc", taps, [source.packed("fc")])
        layers = range(len(dims.layers))
        pairs = project(
            g,
            f"{source.prefix}context",
            fused,
            [source.packed(f"layers.{i}.self_attn.{n}_proj") for i in layers for n in "kv"],
            {"norm_weight": source.plain(g, "hidden_norm.weight")},
            self._norm,
        )
        ports = {"length": g.input("length", DType.I32, (1,))}
        for i in layers:
            ports |= {
                f"k{i}": pairs[2 * i],
                f"v{i}": pairs[2 * i + 1],
                f"k_norm{i}": source.plain(g, f"layers.{i}.self_attn.k_norm.weight"),
            }
            ports |= {f"ring_{n}{i}": self._ring(g, i, n) for n in "kv"}
        out = g.operator(
            CONTEXT_KV,
            f"{source.prefix}context_kv",
            ports,
            {"layers": len(dims.layers), **self._heads()},
            {f"next_ring_{n}{i}": f"{NEXT}drafter.{i}.{n}" for i in layers for n in "kv"},
        )
        for value in out.values():
            g.output(value)
        return g

    def _attention(self, g: GraphBuilder, i: int, x: GraphValue) -> GraphValue:
        source, layer = self._source, f"layers.{i}.self_attn"
        norm, conv = f"layers.{i}.input_layernorm", f"layers.{i}.attention_conv"
        own = enter(g, source, conv, x, norm, self._norm, self.dims.conv)
        q, k, v = project(
            g,
            f"{source.prefix}{layer}.qkv",
            own.rows,
            [source.packed(f"{layer}.{n}_proj") for n in "qkv"],
            own.ports,
            own.attributes,
        )
        o = g.operator(
            DRAFT_ATTENTION,
            f"{source.prefix}{layer}",
            {
                "q": q,
                "k": k,
                "v": v,
                "q_norm": source.plain(g, f"{layer}.q_norm.weight"),
                "k_norm": source.plain(g, f"{layer}.k_norm.weight"),
                "length": g.input("length", DType.I32, (1,)),
                "window": g.input(f"drafter.{i}.window", DType.I32, (1,)),
                "first": g.input("drafter.first", DType.I32, (1,)),
                "ring_k": self._ring(g, i, "k"),
                "ring_v": self._ring(g, i, "v"),
            },
            {
                "heads": self.dims.attention.heads,
                "causal": int(self.dims.layers[i].causal),
                **self._heads(),
            },
        )["o"]
        return leave(g, source, own, f"{layer}.o_proj", o)

    def _mlp(self, g: GraphBuilder, i: int, x: GraphValue) -> GraphValue:
        source, layer = self._source, f"layers.{i}.mlp"
        norm, conv = f"layers.{i}.post_attention_layernorm", f"layers.{i}.mlp_conv"
        own = enter(g, source, conv, x, norm, self._norm, self.dims.conv)
        [h] = project(
            g,
            f"{source.prefix}{layer}.gate_up",
            own.rows,
            [source.packed(f"{layer}.{part}_proj") for part in ("gate", "up")],
            own.ports,
            {"epilogue": "swiglu", **own.attributes},
        )
        return leave(g, source, own, f"{layer}.down_proj", h)

    def _selector_rows(self, g: GraphBuilder, x: GraphValue) -> GraphValue:
        """What the selector reads of the normed rows."""
        source, name = self._source, "candidate_selector.hidden_projection"
        ports = {"x": x, "norm_weight": source.plain(g, "norm.weight")}
        ports |= source.packed(name).values(g, 0)
        out = g.operator(LINEAR, source.prefix + name, ports, self._norm, {"y0": "draft_hidden"})
        return out["y0"]

    @property
    def wide(self) -> bool:
        """Whether a verify has rows behind the drafter's block."""
        return self._rows < self._shape.block

    def _selected(
        self,
        g: GraphBuilder,
        logits: GraphValue,
        hidden: GraphValue,
        drawn: Mapping[str, GraphValue] = NO_VALUES,
    ) -> GraphValue:
        """The block's tokens, as `_select` chooses the drafts."""
        if not self.wide:
            return self._select(g, logits, hidden, drawn)["tokens"]
        return self._fill(g, self._select(g, logits, hidden, drawn, tokens="drafts")["tokens"])

    def _fill(self, g: GraphBuilder, drafts: GraphValue) -> GraphValue:
        """The block's tokens, where the host has left places for drafts."""
        ids = g.input("block_ids", DType.I32, (self._shape.block,))
        ports = {"ids": ids, "best": drafts}
        return g.operator(FILL_DRAFTS, "fill", ports, {"at": 0}, {"tokens": "tokens"})["tokens"]

    def _forced(self, g: GraphBuilder) -> GraphValue:
        name = "drafter.forced" if self.wide else "forced"
        return g.input(name, DType.I32, (self._rows,))

    def _select(
        self,
        g: GraphBuilder,
        logits: GraphValue,
        hidden: GraphValue | None,
        drawn: Mapping[str, GraphValue] = NO_VALUES,
        rejection: int = 0,
        tokens: str = "tokens",
    ) -> dict[str, GraphValue]:
        """tokens [last, drafts]: each the best candidate after the one before it, or of its own if
        the drafter has no selector; `drawn` adds noise. With `rejection` also their laws.
        """
        source, stem, rows = self._source, "candidate_selector", self._rows
        ports = {
            "logits": logits,
            "last": g.input("last", DType.I32, (1,)),
            "forced": self._forced(g),
            **drawn,
        }
        if hidden is not None:
            ports |= {
                "hidden": hidden,
                "predecessors": source.plain(g, f"{stem}.predecessor_codebook"),
                "successors": source.plain(g, f"{stem}.successor_codebook"),
            }
        if (ids := self._draft_ids) is not None:
            ports["id_map"] = g.constant("draft_ids", ids)
        attributes: dict[str, Attribute] = {
            "vocab": self._limit,
            "rows": rows,
            "top_k": self.candidates,
            "rejection": rejection,
        }
        if (dims := self.dims.selector) is not None:
            attributes |= {"multiplier": dims.multiplier, "softcap": dims.softcap}
        names = {"tokens": tokens, **{name: f"draft.{name}" for name in LAW}}
        return g.operator(SELECTOR, source.prefix + stem, ports, attributes, names)

    def _compose(self, g: GraphBuilder, last: GraphValue, best: GraphValue) -> GraphValue:
        """[last, drafts], where a forced id replaces the draft of its row."""
        if self.wide:
            return self._fill(g, best)
        rows = self._rows
        forced = self._forced(g)
        # forced[i] is the token after row i of the block, which the drafter's row i + 1 drafts.
        drafts = _wide(g, "drafts", _slice(g, "drafts", best, 1, rows))
        wanted = _wide(g, "wanted", _slice(g, "wanted", forced, 0, rows - 1))
        zero = g.constant("zero", integers(0))
        # A row of NaNs has no best id (-1). Any valid id may replace it, as the target verifies it,
        # but it must be valid, because the row is computed along with the rest of the block.
        drafts = g.node("Max", "drafts.some", DType.I64, (rows - 1,), drafts, zero)
        free = g.node("Less", "free", DType.BOOL, (rows - 1,), wanted, zero)
        follow = g.node("Where", "follow.wide", DType.I64, (rows - 1,), free, drafts, wanted)
        narrow = g.node("Cast", "follow", DType.I32, (rows - 1,), follow, to=ONNX_TYPE[DType.I32])
        return g.node("Concat", "tokens", DType.I32, (rows,), last, narrow, axis=0)


def _slice(g: GraphBuilder, name: str, x: GraphValue, start: int, end: int) -> GraphValue:
    return g.node(
        "Slice",
        f"{name}.slice",
        x.dtype,
        (end - start,),
        x,
        g.constant(f"{name}.start", integers(start)),
        g.constant(f"{name}.end", integers(end)),
    )


def _wide(g: GraphBuilder, name: str, x: GraphValue) -> GraphValue:
    # ONNX Runtime's Where does not support int32.
    return g.node("Cast", f"{name}.wide", DType.I64, x.shape, x, to=ONNX_TYPE[DType.I64])
