"""Compares a candidate with a reference on the same tokens."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from thor_dflash.calib.quality.divergence import RowDivergence, best, compare_rows, join
from thor_dflash.calib.quality.quality_report import CacheLayer, Choice, LayerDrift, WorstToken
from thor_dflash.calib.quality.reference_logits import LOGITS, TAPS, ReferenceLogits, scored_rows
from thor_dflash.calib.quality.scored_texts import ScoredText
from thor_dflash.core.progress import Progress
from thor_dflash.core.tensors import Array, DType
from thor_dflash.runtime.session import Session

WORST = 10
"""Places that are listed."""
BEST = 5
"""Tokens that are listed of each."""
BEFORE = 32
"""Tokens of context that are shown with a place."""
LARGEST = 0x7E
"""Bits of the largest number of E4M3, 448, without the sign."""


@dataclass(slots=True)
class Comparison:
    """The rows of all texts, and what was seen beside them."""

    rows: list[RowDivergence] = field(default_factory=list[RowDivergence])
    """Of each text."""
    worst: list[WorstToken] = field(default_factory=list[WorstToken])
    layers: list[LayerDrift] = field(default_factory=list[LayerDrift])
    cache: list[CacheLayer] = field(default_factory=list[CacheLayer])


def compare(reference: ReferenceLogits, candidate: Session, progress: Progress) -> Comparison:
    """Score every text with both.

    Raises:
        ModelFault: a logit is NaN or infinite.
        RequestError: a text does not fit the context.
    """
    texts = reference.header.texts
    total = sum(len(text.tokens) - text.begin for text in texts)
    worst, drift, cache = _Worst(candidate), _Drift(candidate, reference), _Saturation(candidate)
    made = Comparison()
    with progress.task("scoring both", total, "tokens") as bar:
        for i, text in enumerate(texts):
            parts: list[RowDivergence] = []
            at = text.begin
            both = aligned(
                reference.rows(i, drift.wanted), scored_rows(candidate, text, drift.wanted)
            )
            for want, have in both:
                count = len(want[LOGITS])
                following = text.tokens[at : at + count]
                part = compare_rows(want[LOGITS], have[LOGITS], following)
                worst.add(text, at, part, want[LOGITS], have[LOGITS])
                drift.add(want, have)
                parts.append(part)
                bar.advance(count)
                at += count
            cache.add()
            made.rows.append(join(parts))
    made.worst, made.layers, made.cache = worst.found(), drift.found(), cache.found()
    return made


Rows = Mapping[str, Array]


def aligned(a: Iterator[Rows], b: Iterator[Rows]) -> Iterator[tuple[Rows, Rows]]:
    """Pair the rows of both, whose blocks may have different sizes."""
    x, y = next(a, None), next(b, None)
    while x is not None and y is not None:
        count = min(len(x[LOGITS]), len(y[LOGITS]))
        yield _cut(x, 0, count), _cut(y, 0, count)
        x = _cut(x, count) if len(x[LOGITS]) > count else next(a, None)
        y = _cut(y, count) if len(y[LOGITS]) > count else next(b, None)
    assert x is y is None, "both must have the same rows"


def _cut(rows: Rows, begin: int, end: int | None = None) -> Rows:
    return {name: values[begin:end] for name, values in rows.items()}


class _Worst:
    """Keeps the places with the largest divergence."""

    def __init__(self, session: Session) -> None:
        self._tokenizer = session.tokenizer
        self._heap: list[tuple[float, int, WorstToken]] = []
        self._seen = 0

    def add(self, text: ScoredText, at: int, rows: RowDivergence, want: Array, have: Array) -> None:
        """Look at some rows, the first of which precedes token `at`."""
        for i in np.argsort(-rows.kl)[:WORST]:
            self._seen += 1
            kl = float(rows.kl[i])
            if len(self._heap) == WORST and kl <= self._heap[0][0]:
                return
            position = at + int(i)
            place = WorstToken(
                text=text.name,
                position=position,
                kl=kl,
                before=self._text(text.tokens[max(0, position - BEFORE) : position]),
                token=self._text(text.tokens[position : position + 1]),
                reference=self._choices(want[i]),
                candidate=self._choices(have[i]),
            )
            heapq.heappush(self._heap, (kl, -self._seen, place))
            if len(self._heap) > WORST:
                heapq.heappop(self._heap)

    def found(self) -> list[WorstToken]:
        """The worst first."""
        return [place for _, _, place in sorted(self._heap, reverse=True)]

    def _choices(self, logits: Array) -> tuple[Choice, ...]:
        return tuple((self._text((i,)), p) for i, p in best(logits, BEST))

    def _text(self, ids: tuple[int, ...]) -> str:
        if self._tokenizer is None:
            return " ".join(map(str, ids))
        plain = self._tokenizer.decode(ids)
        # A special token has no text.
        return plain if plain or not ids else f"[{ids[0]}]" if len(ids) == 1 else plain


class _Drift:
    """Compares the layers' outputs that the drafter reads."""

    def __init__(self, session: Session, reference: ReferenceLogits) -> None:
        drafter = session.manifest.drafter
        self._layers = drafter.taps if drafter else ()
        self.wanted = bool(self._layers) and reference.taps == self._layers
        self._sums = np.zeros((2, len(self._layers)))

    def add(self, want: Rows, have: Rows) -> None:
        """Add some rows."""
        if not self.wanted:
            return
        shape = (len(want[TAPS]), len(self._layers), -1)
        a = want[TAPS].astype(np.float64).reshape(shape)
        b = have[TAPS].astype(np.float64).reshape(shape)
        self._sums += np.square(a - b).sum((0, 2)), np.square(a).sum((0, 2))

    def found(self) -> list[LayerDrift]:
        """In the order of the layers."""
        if not self.wanted:
            return []
        errors = np.sqrt(self._sums[0] / np.maximum(self._sums[1], np.finfo(float).tiny))
        pairs = sorted(zip(self._layers, errors.tolist(), strict=True))
        return [LayerDrift(layer=layer, error=error) for layer, error in pairs]


def saturated(bits: Array) -> int:
    """How many E4M3 numbers, given as uint8, are 448 or -448."""
    return int(((bits & 0x7F) == LARGEST).sum())


class _Saturation:
    """Counts values of the FP8 cache at its largest number."""

    def __init__(self, session: Session) -> None:
        self._model = session.model
        tensors = session.model.state.tensors
        self._names = [
            name
            for name, tensor in tensors.items()
            if name.startswith("attention.") and tensor.spec.dtype is DType.FP8
        ]
        self._counts = dict.fromkeys(self._names, 0)
        self._values = dict.fromkeys(self._names, 0)

    def add(self) -> None:
        """Look at the rows of the sequence that was scored last."""
        for name in self._names:
            tensor = self._model.state.tensors[name]
            heads, rows, width = tensor.spec.at({})
            shape = (heads, min(rows, self._model.state.length), width)
            bits = self._model.engine.read(tensor, shape).view(np.uint8)
            self._counts[name] += saturated(bits)
            self._values[name] += bits.size

    def found(self) -> list[CacheLayer]:
        """In the order of the layers."""
        layers = sorted({int(name.split(".")[1]) for name in self._names})
        return [
            CacheLayer(
                layer=layer,
                values=self._values[f"attention.{layer}.k"],
                k=self._counts[f"attention.{layer}.k"],
                v=self._counts[f"attention.{layer}.v"],
            )
            for layer in layers
        ]
