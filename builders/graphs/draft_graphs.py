"""What the graphs of every drafter share: sizes, rings, and the target's head."""

from __future__ import annotations

from thor_dflash.builders.graphs.graph_builder import GraphBuilder, GraphValue
from thor_dflash.builders.graphs.target import GraphOptions
from thor_dflash.builders.graphs.weight_placement import WeightPlacement
from thor_dflash.core.model_dims import DrafterDims
from thor_dflash.core.tensors import Array, DType
from thor_dflash.plugins.contract import Attribute


class DraftGraphs:
    """Writes a drafter's layers into graphs. They use the target's embedding and head."""

    def __init__(
        self,
        dims: DrafterDims,
        source: WeightPlacement,
        target: WeightPlacement,
        tied: bool,
        shape: GraphOptions,
        draft_ids: Array | None = None,
    ) -> None:
        self.dims = dims
        self._tied = tied
        self._draft_ids = draft_ids
        """int32: the ids that may be proposed; None for all."""
        self._source = source
        self._target = target
        self._shape = shape
        self._rows = min(dims.block, shape.block)
        """Rows of the drafter's block; those of a wider verify behind it are the host's."""
        self._norm: dict[str, Attribute] = {"norm_eps": dims.eps, "norm_offset": 0.0}

    @property
    def _limit(self) -> int:
        """Columns of the head below which ids may be proposed; 0 for all."""
        return 0 if self._draft_ids is not None else self._shape.vocab

    def _heads(self) -> dict[str, Attribute]:
        a = self.dims.attention
        return {
            "kv_heads": a.kv_heads,
            "head_dim": a.head_dim,
            "rotary_dim": a.rotary_dim,
            "rope_theta": a.rope_theta,
            "norm_eps": self.dims.eps,
        }

    def _ring(self, g: GraphBuilder, i: int, name: str) -> GraphValue:
        a = self.dims.attention
        return g.input(
            f"drafter.{i}.{name}",
            self._shape.activations,
            (a.kv_heads, f"ring_rows.{i}", a.head_dim),
        )

    def _head(self, g: GraphBuilder) -> dict[str, GraphValue]:
        """Return the target's head, or a copy of its rows for the ids that may be proposed."""
        if self._draft_ids is None:
            return self._target.head(self._tied).values(g, 0)
        rows = self._target.packed("lm_head", self._draft_ids, "draft").values(g, 0)
        return {**rows, **self._id_map(g)}

    def _id_map(self, g: GraphBuilder) -> dict[str, GraphValue]:
        ids = self._draft_ids
        return {} if ids is None else {"id_map": g.constant("draft_ids", ids)}


def index(g: GraphBuilder, name: str) -> GraphValue:
    """An input of one number."""
    return g.input(name, DType.I32, (1,))
