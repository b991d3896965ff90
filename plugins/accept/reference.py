"""accept in numpy: the definition that every other implementation is tested against."""

from __future__ import annotations

import numpy as np

from thor_dflash.core.tensors import Array
from thor_dflash.plugins.accept.record import LOG_MARGIN, STRICT
from thor_dflash.plugins.contract import Arrays, Attributes


def reference(x: Arrays, a: Attributes) -> dict[str, Array]:
    """See the operator's docstring for shapes. Decides row by row."""
    rows = len(x["tokens"])
    best = [_choice(x, a, i) for i in range(rows)]
    choices = [_softened(x, a, i, best[i]) for i in range(rows)]
    follow = [int(t) for t in x["tokens"][1:]]
    closed = next((i for i, t in enumerate(follow) if t == int(x["close"][0]) >= 0), rows)

    def agrees(i: int) -> bool:
        if choices[i] < 0:
            return False
        loose = i < closed and best[i] == choices[i]
        return follow[i] == choices[i] or (loose and _relaxed(x, a, i, follow[i], choices[i]))

    drafted = int(x["drafted"][0])
    agreed = next((i for i in range(drafted) if not agrees(i)), drafted)
    tokens = follow[:agreed] + choices[agreed:]
    count = min(agreed + 1, int(x["cap"][0]))
    stops = {int(t) for t in x["stop"] if t >= 0}
    count = next((i + 1 for i in range(count) if tokens[i] in stops), count)
    fault = count - 1 if choices[count - 1] < 0 else -1
    relaxed = sum(tokens[i] != choices[i] for i in range(count))
    softened = sum(best[i] != choices[i] for i in range(count))
    record = [count, fault, relaxed, agreed, softened, *tokens, *choices]
    return {"record": np.array(record, np.int32)}


def allowed(x: Arrays, a: Attributes, i: int) -> Array:
    """Returns row i's logits of ids below vocab, -inf where the mask forbids the id."""
    logits: Array = x["logits"][i, : a.integer("vocab") or None].astype(np.float64)
    if "mask" in x:
        ids = np.arange(len(logits))
        bits = x["mask"][i].view(np.uint32)[ids // 32] >> (ids % 32).astype(np.uint32)
        logits = np.where(bits & 1, logits, -np.inf)
    return logits


def _choice(x: Arrays, a: Attributes, i: int) -> int:
    whole = x["logits"][i, : a.integer("vocab") or None]
    if np.isnan(whole).any() or np.isposinf(whole).any():
        return -1
    if x["forced"][i] >= 0:
        return int(x["forced"][i])
    logits = allowed(x, a, i)
    best = int(logits.argmax())
    if not np.isfinite(logits[best]):
        return -1
    return int(x["sampled"][i]) if "sampled" in x else best


def _softened(x: Arrays, a: Attributes, i: int, best: int) -> int:
    """Returns row i's soft id if its choice `best` is not forced and the soft id is near it, else
    `best`.
    """
    soft = int(x["soft"][i])
    logits = allowed(x, a, i)
    if best < 0 or x["forced"][i] >= 0 or not 0 <= soft < len(logits):
        return best
    near = logits[soft] >= logits.max() - float(x["soft_margin"][0])
    return soft if near and np.isfinite(logits[soft]) else best


def _relaxed(x: Arrays, a: Attributes, i: int, draft: int, choice: int) -> bool:
    rule, margin = int(x["rule"][0]), float(x["margin"][0])
    never = {int(t) for t in (*x["strict"], *x["stop"])}
    logits = allowed(x, a, i)
    if (
        rule == STRICT
        or margin <= 0
        or choice < 0
        or x["forced"][i] >= 0
        or draft in never
        or not 0 <= draft < len(logits)
        or not np.isfinite(logits[draft])
    ):
        return False
    if _ahead(logits, draft).sum() >= int(x["top_k"][0]):
        return False
    temperature, kept = 1.0, np.isfinite(logits)
    if "last" in x:
        temperature, last = float(x["temperature"][0]), int(x["last"][i])
        kept = _ahead(logits, last) | (np.arange(len(logits)) == last)
    if not kept[draft]:
        return False
    if rule == LOG_MARGIN:
        return bool(logits[draft] >= logits.max() - margin * temperature)
    share = np.where(kept, np.exp((logits - logits.max()) / temperature), 0.0)
    share /= share.sum()
    return bool(share[draft] >= share.max() - margin)


def _ahead(logits: Array, of: int) -> Array:
    """bool: whether an id's rank is before that of the id `of`."""
    before = np.arange(len(logits)) < of
    return np.asarray((logits > logits[of]) | ((logits == logits[of]) & before))
