"""The target's graphs: verify a block, prefill a chunk, accept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from thor_dflash.builders.graphs.common_layers import (
    embed,
    gated_qkv,
    mlp,
    project,
    residual,
    sampling_inputs,
)
from thor_dflash.builders.graphs.graph_builder import GraphBuilder, GraphValue
from thor_dflash.builders.graphs.weight_placement import WeightPlacement
from thor_dflash.core.model_dims import TargetDims, VisionDims
from thor_dflash.core.tensors import DType
from thor_dflash.package.manifest import HIDDEN
from thor_dflash.plugins import (
    ACCEPT,
    GDN,
    HEAD,
    IMAGE_EMBED,
    RMS_NORM,
    SAMPLE,
    VERIFY_ATTENTION,
)
from thor_dflash.plugins.contract import NEXT, Attribute

Mode = Literal["verify", "prefill"]

ID_SLOTS = 8
"""Slots for stop ids, and for ids that relaxed acceptance never accepts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphOptions:
    """What a package fixes about its graphs beyond the models' sizes."""

    block: int
    chunk: int
    activations: DType
    kv: DType
    saves: Literal["records", "states"]
    vocab: int
    """Ids from this one on are padding."""
    taps: tuple[int, ...]
    """Target layers whose output the drafter reads."""
    normed: bool = False
    """Whether it reads the last layer's output after the final norm instead."""

    @property
    def records(self) -> tuple[str, ...]:
        """Tensors that a verify leaves in each gdn layer for the next fold."""
        if self.saves == "states":
            return ("record_qkv", "states")
        return ("record_qkv", "record_k", "record_d", "record_decay")


class TargetGraphs:
    """Writes the target's layers into graphs."""

    def __init__(
        self,
        dims: TargetDims,
        source: WeightPlacement,
        shape: GraphOptions,
        kv_scales: dict[int, tuple[float, float]],
        vision: VisionDims | None = None,
    ) -> None:
        self._dims = dims
        self._vision = vision
        self._source = source
        self._shape = shape
        self._kv_scales = kv_scales
        self._norm: dict[str, Attribute] = {"norm_eps": dims.eps, "norm_offset": 1.0}

    def verify(self) -> GraphBuilder:
        """tokens [R] -> logits, taps. Folds the state, and writes cache rows and records."""
        g = GraphBuilder("verify")
        x = self._layers(g, "verify", self._shape.block)
        out = g.operator(
            HEAD,
            "head",
            {
                "x": x,
                "norm_weight": self._source.plain(g, "norm.weight"),
                **self._source.head(self._dims.tied).values(g, 0),
            },
            {"vocab": self._shape.vocab, **self._norm},
            {"logits": "logits", "best": "best"},
        )
        g.output(out["logits"])
        return g

    def prefill(self) -> GraphBuilder:
        """tokens [chunk], of which the first `valid` count -> taps. Advances the state."""
        g = GraphBuilder("prefill")
        self._layers(g, "prefill", self._shape.chunk)
        return g

    def layer(self, i: int) -> GraphBuilder:
        """x [chunk, H] -> x after layer i alone, as in prefill: for a model of which no more than
        one layer fits in memory.
        """
        g = GraphBuilder("layer")
        x = g.input("x", self._shape.activations, (self._shape.chunk, self._dims.hidden))
        mixer = self._mixer(g, i, x, "prefill")
        x = self._mixed(g, i, x, *mixer)
        g.output(mlp(g, self._source, f"layers.{i}", x, self._norm))
        return g

    def accept(self, masked: bool, sampled: bool = False, candidates: int = 0) -> GraphBuilder:
        """logits -> record. Greedy decoding has graphs of its own, so that it pays nothing for
        sampling; so has rejection, whose drafts were drawn from so many `candidates`, and whose
        one graph has a mask.
        """
        name = "accept_rejection" if candidates else "accept" + "_sampled" * sampled
        g = GraphBuilder(name + "_masked" * (masked and not candidates))
        rows = self._shape.block
        ports = {
            "logits": g.input("logits", DType.F32, (rows, self._dims.vocab)),
            **{name: g.input(name, DType.F32, (1,)) for name in ("margin", "soft_margin")},
        }
        for name in ("tokens", "forced", "soft"):
            ports[name] = g.input(name, DType.I32, (rows,))
        for name in ("drafted", "cap", "rule", "top_k", "close"):
            ports[name] = g.input(name, DType.I32, (1,))
        for name in ("stop", "strict"):
            ports[name] = g.input(name, DType.I32, (ID_SLOTS,))
        if masked:
            ports["mask"] = g.input("mask", DType.I32, (rows, -(-self._shape.vocab // 32)))
        if sampled:
            how = sampling_inputs(g)
            given = how | {name: ports[name] for name in ("logits", "mask") if name in ports}
            if candidates:
                given["tokens"] = ports["tokens"]
                given["drawn"] = g.input("drawn", DType.I32, (1,))
                shape = rows, candidates
                given["candidates"] = g.input("draft.candidates", DType.I32, shape)
                given["scores"] = g.input("draft.scores", DType.F32, shape)
            drawn = g.operator(SAMPLE, "sample", given, {"vocab": self._shape.vocab, "first": 1})
            ports |= {"sampled": drawn["choice"], "last": drawn["last"]}
            ports["temperature"] = how["temperature"]
        attributes: dict[str, Attribute] = {"vocab": self._shape.vocab, "rows": rows}
        out = g.operator(ACCEPT, "accept", ports, attributes, {"record": "record"})
        g.output(out["record"])
        return g

    def _layers(self, g: GraphBuilder, mode: Mode, rows: int) -> GraphValue:
        tokens = g.input("tokens", DType.I32, (rows,))
        x = embed(g, self._source, tokens, self._shape.activations)
        if self._vision and mode == "prefill":
            image = g.input("image", x.dtype, x.shape)
            x = g.operator(IMAGE_EMBED, "images", {"x": x, "ids": tokens, "image": image}, {})["y"]
        outputs: list[GraphValue] = []
        for i in range(len(self._dims.layers)):
            mixer = self._mixer(g, i, x, mode)
            last = i == len(self._dims.layers) - 1
            if mode == "prefill" and last and not self._shape.normed and i not in self._shape.taps:
                break  # the last rows are no tap: nothing reads them, only the state
            x = self._mixed(g, i, x, *mixer)
            x = mlp(g, self._source, f"layers.{i}", x, self._norm)
            outputs.append(x)
        # In the order of the drafter's config, which may differ from that of the layers.
        if taps := [outputs[i] for i in self._shape.taps]:
            width = len(taps) * self._dims.hidden
            g.output(g.node("Concat", "taps", x.dtype, (rows, width), *taps, axis=1))
        if self._shape.normed:
            self._normed(g, x, mode)
        return x

    def _normed(self, g: GraphBuilder, x: GraphValue, mode: Mode) -> None:
        """Add the rows after the final norm as taps, and in prefill the last one as a state."""
        norm: dict[str, Attribute] = {"eps": self._dims.eps, "offset": 1.0}
        ports = {"x": x, "weight": self._source.plain(g, "norm.weight")}
        taps = g.operator(RMS_NORM, "taps", ports, norm, {"y": "taps"})["y"]
        g.output(taps)
        if mode == "prefill":
            shape, row = (1, self._dims.hidden), g.input("last_row", DType.I32, (1,))
            g.output(g.node("Gather", f"{NEXT}{HIDDEN}", x.dtype, shape, taps, row, axis=0))

    def _mixer(
        self, g: GraphBuilder, i: int, x: GraphValue, mode: Mode
    ) -> tuple[GraphValue, GraphValue]:
        """Return a mixer's output and the gate of its rows."""
        gdn = self._dims.layers[i] == "gdn"
        return (self._gdn if gdn else self._attention)(g, i, x, mode)

    def _mixed(
        self, g: GraphBuilder, i: int, x: GraphValue, o: GraphValue, gate: GraphValue
    ) -> GraphValue:
        """x + the projection of a layer's mixer output `o`, gated."""
        if self._dims.layers[i] == "attention":
            name = f"layers.{i}.self_attn.o_proj"
            return residual(g, self._source, name, o, x, {"gate": gate}, {"gate": "sigmoid"})
        layer = f"layers.{i}.linear_attn"
        return residual(
            g,
            self._source,
            f"{layer}.out_proj",
            o,
            x,
            {"norm_weight": self._source.plain(g, f"{layer}.norm.weight"), "gate": gate},
            {"gate": "silu", "head_dim": self._dims.gdn.value_dim, "norm_eps": self._dims.eps},
        )

    def _gdn(
        self, g: GraphBuilder, i: int, x: GraphValue, mode: Mode
    ) -> tuple[GraphValue, GraphValue]:
        """See `_mixer`."""
        dims, source, layer = self._dims.gdn, self._source, f"layers.{i}.linear_attn"
        qkv, z, b, a = project(
            g,
            f"{layer}.in_proj",
            x,
            [source.packed(f"{layer}.in_proj_{part}") for part in ("qkv", "z", "b", "a")],
            {"norm_weight": source.plain(g, f"layers.{i}.input_layernorm.weight")},
            self._norm,
        )
        ports = {
            "qkv": qkv,
            "b": b,
            "a": a,
            "conv_weight": source.plain(g, f"{layer}.conv1d.weight"),
            "a_log": source.plain(g, f"{layer}.A_log"),
            "dt_bias": source.plain(g, f"{layer}.dt_bias"),
            "accepted": g.input("accepted", DType.I32, (1,)),
            **{
                part: g.input(f"gdn.{i}.{part}", dtype, shape)
                for part, (dtype, shape) in self._gdn_state().items()
            },
        }
        if mode == "prefill":
            ports["valid"] = g.input("valid", DType.I32, (1,))
        out = g.operator(
            GDN,
            layer,
            ports,
            {
                "mode": mode,
                "saves": self._shape.saves,
                "key_heads": dims.key_heads,
                "value_heads": dims.value_heads,
                "key_dim": dims.key_dim,
                "value_dim": dims.value_dim,
                "conv_kernel": dims.conv_kernel,
            },
            {f"next_{part}": f"{NEXT}gdn.{i}.{part}" for part in self._gdn_state()},
        )
        o = out.pop("o")
        for value in out.values():
            g.output(value)
        return o, z

    def _gdn_state(self) -> dict[str, tuple[DType, tuple[int, ...]]]:
        d, rows, act = self._dims.gdn, self._shape.block, self._shape.activations
        every: dict[str, tuple[DType, tuple[int, ...]]] = {
            "state": (DType.F32, (d.value_heads, d.key_dim, d.value_dim)),
            "tail": (act, (d.conv_kernel - 1, d.conv_channels)),
            "record_qkv": (act, (rows, d.conv_channels)),
            "record_k": (DType.F32, (rows, d.key_heads, d.key_dim)),
            "record_d": (DType.F32, (rows, d.value_heads, d.value_dim)),
            "record_decay": (DType.F32, (rows, d.value_heads)),
            "states": (DType.F32, (rows, d.value_heads, d.key_dim, d.value_dim)),
        }
        return {part: every[part] for part in ("state", "tail", *self._shape.records)}

    def _turning(self, g: GraphBuilder, rows: int | str, mode: Mode) -> dict[str, GraphValue]:
        """The ports of attention that turn rows by positions in images, if the model sees any."""
        if self._vision is None:
            return {}
        if mode == "verify":
            return {"shift": g.input("shift", DType.I32, (1,))}
        return {"at": g.input("at", DType.I32, (rows, 3))}

    def _mrope(self, mode: Mode) -> dict[str, Attribute]:
        if self._vision is None or mode == "verify":
            return {}
        height, width = self._vision.mrope
        return {"mrope_height": height, "mrope_width": width}

    def _attention(
        self, g: GraphBuilder, i: int, x: GraphValue, mode: Mode
    ) -> tuple[GraphValue, GraphValue]:
        """See `_mixer`."""
        dims, source, layer = self._dims.attention, self._source, f"layers.{i}.self_attn"
        q, gate, k, v = gated_qkv(g, source, f"layers.{i}", dims, x, self._norm)
        scale_k, scale_v = self._kv_scales.get(i, (1.0, 1.0))
        cache = (dims.kv_heads, "cache_rows", dims.head_dim)
        out = g.operator(
            VERIFY_ATTENTION,
            layer,
            {
                "q": q,
                "k": k,
                "v": v,
                "q_norm": source.plain(g, f"{layer}.q_norm.weight"),
                "k_norm": source.plain(g, f"{layer}.k_norm.weight"),
                "length": g.input("length", DType.I32, (1,)),
                "cache_k": g.input(f"attention.{i}.k", self._shape.kv, cache),
                "cache_v": g.input(f"attention.{i}.v", self._shape.kv, cache),
                "scale_k": g.constant(f"{layer}.scale_k", np.array([scale_k], np.float32)),
                "scale_v": g.constant(f"{layer}.scale_v", np.array([scale_v], np.float32)),
                **self._turning(g, x.shape[0], mode),
            },
            {
                "heads": dims.heads,
                "kv_heads": dims.kv_heads,
                "head_dim": dims.head_dim,
                "rotary_dim": dims.rotary_dim,
                "rope_theta": dims.rope_theta,
                **self._mrope(mode),
                **self._norm,
            },
            {f"next_cache_{n}": f"{NEXT}attention.{i}.{n}" for n in "kv"},
        )
        o = out.pop("o")
        for value in out.values():
            g.output(value)
        return o, gate
