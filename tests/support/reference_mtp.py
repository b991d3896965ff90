"""The MTP layer of a Qwen3.5 checkpoint in plain numpy float64, to test the project's own.

Written from what vLLM's qwen3_5_mtp.py does, which is the reference: transformers has no such
model. One position at a time, without a cache. Imports nothing of thor_dflash.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Weights = Mapping[str, Floats]

WRONG = (
    "weights are not offsets from 1",
    "hidden rows before the norm",
    "queries one position late",
    "drafts one position late",
    "halves of fc exchanged",
    "token of the hidden row",
    "no gate",
    "chain of rows before the norm",
    "drafts are not in the cache",
)


@dataclass(frozen=True, kw_only=True)
class MtpModel:
    """The layer, and what it shares with its target."""

    heads: int
    kv_heads: int
    head_dim: int
    rotary: int
    theta: float
    eps: float
    mtp: Weights
    """By checkpoint name, without `mtp.`"""
    embedding: Floats
    head: Floats
    norm: Floats
    """The target's final norm."""
    wrong: str = ""
    """One of WRONG."""

    def logits(
        self, rows: NDArray[Any], tokens: Sequence[int], chain: Sequence[int]
    ) -> list[Floats]:
        """Logits of each draft of a chain, after the drafts before it.

        `rows` [P, H]: the target's last layer's output at positions 0..P-1, before the final norm;
        `tokens` [P + 1]: those at these positions, and the newest.
        """
        rows = rows.astype(np.float64)
        if self.wrong != "hidden rows before the norm":
            rows = self._norm(rows, self.norm)
        follow = tokens[1:] if self.wrong != "token of the hidden row" else tokens[:-1]
        # vLLM's position p: the hidden row of p, the token at p + 1.
        z, at = self._input(follow, rows), np.arange(len(rows))
        out: list[Floats] = []
        for step, draft in enumerate(chain):
            seen = np.ones(len(z), bool)
            if self.wrong == "drafts are not in the cache":
                seen[len(rows) : -1] = False
            x = self._layer(z[seen], at[seen])
            g = self._norm(x, self._of("norm"))
            out.append(self.head @ g)
            kept = x if self.wrong == "chain of rows before the norm" else g
            z = np.concatenate([z, self._input([draft], kept[None])])
            late = self.wrong == "drafts one position late" and not step
            at = np.append(at, at[-1] + 1 + late)
        return out

    def _input(self, tokens: Sequence[int], hidden: Floats) -> Floats:
        e = self._norm(self.embedding[list(tokens)], self._of("pre_fc_norm_embedding"))
        h = self._norm(hidden, self._of("pre_fc_norm_hidden"))
        pair = [h, e] if self.wrong == "halves of fc exchanged" else [e, h]
        return np.asarray(np.concatenate(pair, axis=1) @ self._of("fc").T)

    def _layer(self, z: Floats, at: NDArray[np.int64]) -> Floats:
        """The last row's output of the decoder layer over rows at positions `at`."""
        stem = "layers.0.self_attn"
        y = self._norm(z, self._of("layers.0.input_layernorm"))
        # Of each head, first its query rows, then its gate rows.
        both = (self._of(f"{stem}.q_proj") @ y[-1]).reshape(self.heads, 2, self.head_dim)
        query = self._norm(both[:, 0], self._of(f"{stem}.q_norm"))
        query = self._turn(query[None], at[-1:] + (self.wrong == "queries one position late"))[0]
        gate = np.ones(both[:, 1].shape) if self.wrong == "no gate" else _sigmoid(both[:, 1])
        k = (y @ self._of(f"{stem}.k_proj").T).reshape(len(y), self.kv_heads, self.head_dim)
        v = (y @ self._of(f"{stem}.v_proj").T).reshape(k.shape)
        k = self._turn(self._norm(k, self._of(f"{stem}.k_norm")), at)
        o = np.empty_like(query)
        for h in range(self.heads):
            own = h // (self.heads // self.kv_heads)
            score = k[:, own] @ query[h] / np.sqrt(self.head_dim)
            weight = np.exp(score - score.max())
            o[h] = weight @ v[:, own] / weight.sum()
        x = z[-1] + self._of(f"{stem}.o_proj") @ (o * gate).reshape(-1)
        y = self._norm(x, self._of("layers.0.post_attention_layernorm"))
        gate, up = (self._of(f"layers.0.mlp.{n}_proj") @ y for n in ("gate", "up"))
        return np.asarray(x + self._of("layers.0.mlp.down_proj") @ (gate * _sigmoid(gate) * up))

    def _norm(self, x: Floats, weight: Floats) -> Floats:
        offset = 0 if self.wrong == "weights are not offsets from 1" else 1
        root = np.sqrt((x**2).mean(axis=-1, keepdims=True) + self.eps)
        return np.asarray(x / root * (offset + weight))

    def _turn(self, x: Floats, at: NDArray[np.int64]) -> Floats:
        """Rotary embedding of the first `rotary` columns of x [P, heads, D]; column j is paired
        with j + rotary / 2."""
        half = self.rotary // 2
        angle = at[:, None, None] * self.theta ** -(np.arange(half) / half)
        a, b, rest = x[..., :half], x[..., half : self.rotary], x[..., self.rotary :]
        turned = a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)
        return np.concatenate([*turned, rest], axis=-1)

    def _of(self, name: str) -> Floats:
        return self.mtp[f"{name}.weight"]


def _sigmoid(x: Floats) -> Floats:
    return np.asarray(1 / (1 + np.exp(-x)))
