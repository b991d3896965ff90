"""The graph of a vision tower: patches of one image -> rows that take the place of embeddings."""

from __future__ import annotations

from collections.abc import Mapping

from thor_dflash.builders.checkpoint.vision import PATCH_EMBED, POSITIONS
from thor_dflash.builders.graphs.graph_builder import GraphBuilder, GraphValue
from thor_dflash.builders.graphs.weight_placement import WeightPlacement
from thor_dflash.core.model_dims import MERGED, PATCH_COLUMNS, TowerDims
from thor_dflash.core.tensors import DType
from thor_dflash.plugins import IMAGE_ATTENTION, IMAGE_POSITIONS, LAYER_NORM, LINEAR
from thor_dflash.plugins.contract import Attribute
from thor_dflash.plugins.image_positions import TAPS
from thor_dflash.plugins.onnx_builder import ONNX_TYPE


class VisionGraph:
    """Writes a tower into a graph for images of at most `patches` patches."""

    def __init__(
        self, dims: TowerDims, source: WeightPlacement, patches: int, activations: DType
    ) -> None:
        self._dims = dims
        self._source = source
        self._patches = patches
        self._activations = activations

    def encode(self) -> GraphBuilder:
        """patches [P, 1536], of which the first `count` are an image -> image_rows [P / 4, H]. Rows
        are in merge order: the four patches of a token are neighbours.
        """
        g, count = GraphBuilder("encode"), self._patches
        places = {
            name: g.input(name, DType.I32, shape)
            for name, shape in (("row", (count,)), ("column", (count,)), ("count", (1,)))
        }
        patches = g.input("patches", self._activations, (count, PATCH_COLUMNS))
        x = self._linear(g, PATCH_EMBED, patches, onto=self._positions(g))
        for block in (f"blocks.{i}" for i in range(self._dims.depth)):
            qkv = self._linear(g, f"{block}.attn.qkv", self._norm(g, f"{block}.norm1", x))
            o = self._attention(g, block, qkv, places)
            x = self._linear(g, f"{block}.attn.proj", o, onto=x)
            wide = self._norm(g, f"{block}.norm2", x)
            wide = self._linear(g, f"{block}.mlp.linear_fc1", wide, epilogue="gelu_tanh")
            x = self._linear(g, f"{block}.mlp.linear_fc2", wide, onto=x)
        merged = self._norm(g, "merger.norm", x, fold=MERGED)
        merged = self._linear(g, "merger.linear_fc1", merged, epilogue="gelu_erf")
        g.output(self._linear(g, "merger.linear_fc2", merged, out="image_rows"))
        return g

    def _positions(self, g: GraphBuilder) -> GraphValue:
        table = self._source.plain(g, POSITIONS)
        if table.dtype is not self._activations:
            kind = ONNX_TYPE[self._activations]
            table = g.node("Cast", "positions", self._activations, table.shape, table, to=kind)
        shape = self._patches, TAPS
        ports = {
            "table": table,
            "taps": g.input("taps", DType.I32, shape),
            "weights": g.input("tap_weights", DType.F32, shape),
        }
        return g.operator(IMAGE_POSITIONS, POSITIONS, ports, {})["y"]

    def _attention(
        self, g: GraphBuilder, block: str, qkv: GraphValue, places: Mapping[str, GraphValue]
    ) -> GraphValue:
        a: dict[str, Attribute] = {"heads": self._dims.heads, "head_dim": self._dims.head_dim}
        a["rope_theta"] = self._dims.rope_theta
        return g.operator(IMAGE_ATTENTION, f"{block}.attn", {"qkv": qkv, **places}, a)["o"]

    def _norm(self, g: GraphBuilder, name: str, x: GraphValue, fold: int = 1) -> GraphValue:
        rows, columns = map(int, x.shape)
        parts = {part: self._source.plain(g, f"{name}.{part}") for part in ("weight", "bias")}
        a: dict[str, Attribute] = {"rows": rows, "columns": columns, "fold": fold}
        a["eps"] = self._dims.eps
        return g.operator(LAYER_NORM, name, {"x": x, **parts}, a)["y"]

    def _linear(
        self,
        g: GraphBuilder,
        name: str,
        x: GraphValue,
        *,
        onto: GraphValue | None = None,
        epilogue: str = "none",
        out: str = "",
    ) -> GraphValue:
        ports = {"x": x, "bias0": self._source.plain(g, f"{name}.bias")}
        ports |= self._source.packed(name).values(g, 0)
        if onto is not None:
            ports["residual"], epilogue = onto, "residual"
        names = {"y0": out} if out else {}
        return g.operator(LINEAR, name, ports, {"epilogue": epilogue}, names)["y0"]
