"""Sizes of planner-nano. Its heads have the sizes of the 27B's, so that the same kernels run it."""

from __future__ import annotations

from dataclasses import dataclass

BPE_ENTRIES = 1200
"""Byte-level BPE entries; the special tokens follow."""
VOCAB = 1280
"""Rows of the embedding. As in the 27B, there are more ids than the tokenizer has; the extra ones
are never sampled.
"""


@dataclass(frozen=True)
class NanoTargetDims:
    """The target: a hybrid of gated delta net and gated attention layers, with tied embeddings."""

    hidden: int = 320
    intermediate: int = 576
    layers: int = 8
    q_heads: int = 4
    kv_heads: int = 2
    head_dim: int = 256
    rotary: int = 64
    gdn_k_heads: int = 2
    gdn_v_heads: int = 4
    gdn_dim: int = 128
    conv: int = 4
    theta: float = 1e7
    eps: float = 1e-6
    vocab: int = VOCAB

    def is_full(self, layer: int) -> bool:
        """Whether a 0-based layer is full attention: every fourth."""
        return (layer + 1) % 4 == 0

    @property
    def conv_channels(self) -> int:
        """Channels of the causal convolution: q, k and v of every GDN head."""
        return (2 * self.gdn_k_heads + self.gdn_v_heads) * self.gdn_dim


@dataclass(frozen=True)
class NanoDrafterDims:
    """The DFlash drafter: sliding layers are causal in the block, the last layer bidirectional."""

    hidden: int = 320
    intermediate: int = 704
    layers: int = 3
    q_heads: int = 4
    kv_heads: int = 2
    head_dim: int = 128
    window: int = 256
    block: int = 16
    taps: int = 3
    theta: float = 1e7
    eps: float = 1e-6
    second: bool = False
    """Whether it is a DFlash2 drafter: no layer is causal, all slide, and these sizes count."""
    conv_taps: int = 2
    conv_group: int = 16
    rank: int = 64
    top_k: int = 16

    @property
    def gamma(self) -> float:
        """Decay of the loss over block positions. Source: DFlash."""
        return 7.0 if self.block == 16 else 4.0

    @property
    def stem(self) -> str:
        """Name of its directory and of its master weights."""
        return "drafter2" if self.second else "drafter"


DFLASH2 = NanoDrafterDims(block=8, second=True)


MROPE = (11, 11, 10)
"""Pairs of a rotated head that turn by time, row and column. Source: Qwen3.5's mrope_section."""


@dataclass(frozen=True)
class NanoTowerDims:
    """The vision tower. Its heads have the 27B's 72 columns, and its sizes are as awkward."""

    hidden: int = 144
    intermediate: int = 528
    heads: int = 2
    depth: int = 3
    positions: int = 12
    """Side of the table of positions."""
    out: int = 320
    """Hidden size of the target."""
    theta: float = 1e4
    eps: float = 1e-6
    shortest: int = 128 * 128
    longest: int = 128 * 128
    """Least and most pixels of a resized image."""

    @property
    def head_dim(self) -> int:
        """Columns of a head."""
        return self.hidden // self.heads


def tap_layers(target_layers: int, taps: int) -> list[int]:
    """Return the 0-based target layers whose output the drafter reads. Source: DFlash,
    ``build_target_layer_ids``.
    """
    return [round(1 + i * (target_layers - 4) / (taps - 1)) for i in range(taps)]
