"""Sizes of the two models, as read from their config.json, without constants of any one model.

Symbols of the operators and graphs
    T   rows of a step (block or prefill chunk)      H   hidden size of the residual stream
    V   vocabulary rows of the head                  D   head dimension
    R   rows of the verify block
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from thor_dflash.core.bounds import Count, Positive

LayerKind = Literal["gdn", "attention"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionDims:
    """Grouped-query attention with rotary positions over the first `rotary_dim` of each head."""

    heads: Positive
    kv_heads: Positive
    head_dim: Positive
    rotary_dim: Positive
    rope_theta: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GdnDims:
    """Gated delta net: a causal convolution, then `value_heads` states of [key_dim, value_dim]."""

    key_heads: Positive
    value_heads: Positive
    key_dim: Positive
    value_dim: Positive
    conv_kernel: Positive

    @property
    def conv_channels(self) -> int:
        """Channels of the convolution: q and k of every key head, v of every value head."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetDims:
    """A Qwen3.5/3.6 text model."""

    vocab: Positive
    """Rows of the embedding and the head, padding included."""
    hidden: Positive
    intermediate: Positive
    layers: tuple[LayerKind, ...]
    attention: AttentionDims
    gdn: GdnDims
    eps: float
    tied: bool
    """Whether the head is the embedding matrix."""
    max_position: Positive
    """Longest context the model was made for, tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftLayerDims:
    """Visibility of one drafter layer."""

    causal: bool
    """Whether slot i of the block sees only slots 0..i of it."""
    window: Count
    """Keys at distance 0 <= q - k < window are visible; 0 means all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftConvDims:
    """DFlash2: the causal convolution over a block's rows, before and after each sublayer."""

    taps: Positive
    """Rows that a result mixes: its own and the ones before it."""
    group: Positive
    """Neighbouring channels that share a dynamic kernel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectorDims:
    """DFlash2: the choice of each draft among candidates, by the draft before it."""

    rank: Positive
    """Columns of the codebooks."""
    top_k: Positive
    """Candidates per slot."""
    multiplier: float = 1.0
    """Factor of the candidates' logits."""
    softcap: float = 0.0
    """Bound s of s * tanh(logit / s), applied after the factor; 0: none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterDims:
    """A DFlash block-diffusion drafter. A DFlash2 drafter has `conv` and `selector`, too.

    Of kind "mtp" it is the target's MTP layer, which drafts one token at a time, reads the target's
    rows after the final norm, and has no masks and no taps.
    """

    kind: Literal["mtp"] | None = None
    """None: DFlash."""
    vocab: Positive
    hidden: Positive
    intermediate: Positive
    layers: tuple[DraftLayerDims, ...]
    attention: AttentionDims
    eps: float
    block: Positive
    """Rows of a block: the last committed token and block - 1 drafts."""
    taps: tuple[Count, ...]
    """Target layers, 0-based, whose output residual streams are concatenated, in this order."""
    mask_token: Count
    target_layers: Count
    """Layers of the target that the drafter was trained on; 0 if the config lacks it."""
    max_position: Positive
    conv: DraftConvDims | None = None
    selector: SelectorDims | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerDims:
    """A vision tower: a transformer over the patches of one image, then a merger of 2 x 2."""

    depth: Positive
    hidden: Positive
    heads: Positive
    intermediate: Positive
    positions: Positive
    """Rows and columns of the square table of learned positions."""
    eps: float = 1e-6
    rope_theta: float = 1e4

    @property
    def head_dim(self) -> int:
        """Columns of a head."""
        return self.hidden // self.heads


PATCH = 16
"""Pixels of a patch's side."""
FRAMES = 2
"""Frames of a patch; a still image is repeated."""
PATCH_COLUMNS = 3 * FRAMES * PATCH * PATCH
"""Numbers of a patch: channel, frame, row, column."""
MERGE = 2
"""Patches of a token's side."""
MERGED = MERGE * MERGE
"""Patches of a token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionDims:
    """How a model reads images."""

    tower: TowerDims
    mrope: tuple[Count, Count]
    """Pairs of columns of a text attention's head that turn by height, and by width."""
    image_token: Count
    """The id that stands for one token of an image in a prompt."""
    reserved: tuple[Count, ...]
    """Ids that only the template may write: image_token, those around it, that of video."""
    shortest: Positive
    """Least pixels of a resized image."""
    longest: Positive
    """Most pixels of a resized image."""


MIN_CONVERSATION = 2
"""Tokens of the shortest prompt and its answer. A context needs one more block, kept free."""


def longest_context(target: TargetDims, drafter: DrafterDims | None) -> int:
    """Longest context both models were made for, tokens."""
    return min(target.max_position, drafter.max_position) if drafter else target.max_position
