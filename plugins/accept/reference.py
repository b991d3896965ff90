"""accept in numpy: the definition that every other implementation is tested against."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from thor_dflash.core.tensors import Array
from thor_dflash.plugins.accept.record import LOG_MARGIN, PROBABILITY_DELTA, STRICT
from thor_dflash.plugins.contract import Arrays, Attributes, OpCase


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
    return best if np.isfinite(logits[best]) else -1


def _softened(x: Arrays, a: Attributes, i: int, best: int) -> int:
    """Returns row i's soft id if its choice `best` is not forced and the soft id is near it, else
    `best`.
    """
    soft = int(x["soft"][i])
    logits = allowed(x, a, i)
    if best < 0 or x["forced"][i] >= 0 or not 0 <= soft < len(logits):
        return best
    near = logits[soft] >= logits[best] - float(x["soft_margin"][0])
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
    ahead = (logits > logits[draft]) | (
        (logits == logits[draft]) & (np.arange(len(logits)) < draft)
    )
    if ahead.sum() >= int(x["top_k"][0]):
        return False
    if rule == LOG_MARGIN:
        return bool(logits[draft] >= logits[choice] - margin)
    share = np.exp(logits - logits.max())
    share /= share.sum()
    return bool(share[draft] >= share[choice] - margin)


def accept_case(name: str, logits: Array, tokens: Array, **given: Array | int | float) -> OpCase:
    """Returns a case; defaults have no effect. `vocab` is an attribute, all else an input."""
    rows = len(tokens)
    vocab = int(np.asarray(given.pop("vocab", 0)))
    quiet: dict[str, Array | int | float] = {
        "forced": np.full(rows, -1),
        "drafted": rows - 1,
        "cap": rows,
        "stop": np.full(4, -1),
        "rule": 0,
        "top_k": 3,
        "close": -1,
        "strict": np.full(4, -1),
        "soft": np.full(rows, -1),
    }
    x = {**quiet, **given}
    margins = {name: np.array([x.pop(name, 1.0)], np.float32) for name in ("margin", "soft_margin")}
    inputs = {name: np.atleast_1d(value).astype(np.int32) for name, value in x.items()}
    return OpCase(
        name,
        {
            "logits": logits.astype(np.float32),
            "tokens": tokens.astype(np.int32),
            **margins,
            **inputs,
        },
        {"vocab": vocab, "rows": rows},
    )


def cases(rng: np.random.Generator) -> Iterator[OpCase]:
    """All, no and some drafts right; right again after a wrong one; ties; stops, caps, masks,
    forced ids, faults, soft ids; relaxed rules.
    """
    rows, vocab = 16, 40

    def right(logits: Array, count: int) -> Array:
        best = logits.argmax(axis=1)
        tokens = np.concatenate([[0], (best[:-1] + 1) % vocab])
        tokens[1 : count + 1] = best[:count]
        return tokens

    for count in (0, 1, 7, 14, 15):
        logits = rng.standard_normal((rows, vocab))
        yield accept_case(f"{count}_right", logits, right(logits, count))
    logits = rng.standard_normal((rows, vocab))
    again = right(logits, 15)
    again[6] = (again[6] + 1) % vocab
    yield accept_case("right_again_after_a_miss", logits, again)
    full = right(logits, 15)
    for drafted in (0, 1, 6):
        yield accept_case(f"drafted_{drafted}_of_15_right", logits, full, drafted=drafted)
    for cap in (1, 2, 15, 16):
        yield accept_case(f"cap_{cap}", logits, full, cap=cap)
    for at in (1, 8, 15):
        yield accept_case(f"stop_drafted_at_{at}", logits, full, stop=full[at : at + 1])
    yield accept_case("stop_is_the_bonus", logits, right(logits, 4), stop=logits[4].argmax()[None])
    yield accept_case("padding_never_chosen", logits, right(logits, 3), vocab=17)
    equal = np.round(logits)
    yield accept_case("ties", equal, right(equal, 9))
    yield from _forced_and_masked(rng, rows, vocab)
    yield from _faults(rng, rows, vocab)
    yield from _soft_cases(rng, rows, vocab)
    yield from _rules_that_meet(vocab)
    for rule in (LOG_MARGIN, PROBABILITY_DELTA):
        yield from _relaxed_cases(rng, rows, vocab, rule)


def _forced_and_masked(rng: np.random.Generator, rows: int, vocab: int) -> Iterator[OpCase]:
    logits = rng.standard_normal((rows, vocab))
    forced = np.full(rows, -1)
    for span in (1, 5, 15, 16):
        ids = rng.integers(0, vocab, rows)
        forced = np.where(np.arange(rows) < span, ids, -1)
        tokens = np.concatenate([[0], np.where(forced >= 0, forced, 3)[:-1]])
        yield accept_case(f"forced_{span}", logits, tokens, forced=forced)
    words = rng.integers(-(2**31), 2**31, (rows, 2), dtype=np.int64)
    yield accept_case("mask", logits, rng.integers(0, vocab, rows), mask=words)
    words[5] = 0
    yield accept_case("mask_leaves_nothing", logits, np.zeros(rows), mask=words)
    forced[5] = 7
    yield accept_case(
        "forced_through_an_empty_mask", logits, np.zeros(rows), mask=words, forced=forced
    )


def _faults(rng: np.random.Generator, rows: int, vocab: int) -> Iterator[OpCase]:
    for row in (0, 3, 15):
        for value in (np.nan, np.inf):
            logits = rng.standard_normal((rows, vocab))
            tokens = np.concatenate([[0], logits.argmax(axis=1)[:-1]])
            logits[row, 11] = value
            yield accept_case(f"{value}_in_row_{row}", logits, tokens)
    logits[:3, 11] = np.nan
    yield accept_case("a_fault_agrees_with_no_draft", logits, np.full(rows, -1))
    logits[:3, 11] = logits[15, 11] = 0
    logits[2, 30:] = np.nan
    yield accept_case("nan_in_padding_is_no_fault", logits, tokens, vocab=30)
    yield accept_case("all_minus_infinity", np.full((rows, vocab), -np.inf), tokens)


def _soft_cases(rng: np.random.Generator, rows: int, vocab: int) -> Iterator[OpCase]:
    logits = rng.standard_normal((rows, vocab))
    best = logits.argmax(axis=1)
    full = np.concatenate([[0], best[:-1]])
    soft = 7
    logits[:, soft] = logits.max(axis=1) - np.arange(rows) / 8
    for margin in (0.0, 0.25, 9.0):
        for start in (0, 5, 15):
            wanted = np.where(np.arange(rows) >= start, soft, -1)
            yield accept_case(
                f"soft_from_{start}_margin_{margin}",
                logits[::-1],
                full[::-1],
                soft=wanted,
                soft_margin=margin,
            )
    wanted = np.full(rows, soft)
    yield accept_case("soft_is_drafted", logits, wanted, soft=wanted, soft_margin=1.0)
    forced = np.where(np.arange(rows) < 3, 11, -1)
    tokens = np.concatenate([[0], np.where(forced >= 0, forced, soft)[:-1]])
    yield accept_case("soft_gives_way_to_forced", logits, tokens, soft=wanted, forced=forced)
    words = np.full((rows, 2), -1)
    words[:2, 0] = ~(1 << soft)
    yield accept_case("soft_is_masked", logits, full, soft=wanted, mask=words)
    yield accept_case(
        "soft_refuses_relaxed", logits, full, soft=wanted, rule=LOG_MARGIN, margin=9.0, top_k=40
    )
    yield accept_case(
        "soft_outside_vocab",
        logits[:, ::-1],
        full,
        soft=np.full(rows, vocab - 1),
        soft_margin=9.0,
        vocab=vocab - 2,
    )
    halves = np.where(np.arange(vocab) < 3, [0.5], [0.25]) * np.ones((rows, 1))
    just = np.nextafter(np.float32(0.25), np.float32(0))
    for name, margin in (("within", 0.25), ("outside", just)):
        yield accept_case(f"soft_just_{name}", halves, full, soft=wanted, soft_margin=margin)
    logits[4, 30] = np.nan
    yield accept_case("soft_over_a_fault", logits, full, soft=wanted, soft_margin=0.0)


def _rules_that_meet(vocab: int) -> Iterator[OpCase]:
    """Four rows with the same logits: id 0 is the best one and id 1 is near it."""
    logits = np.zeros((4, vocab))
    logits[:, :3] = 2.0, 1.75, 1.5
    best, drafts = np.array([9, 0, 0, 0]), np.array([9, 0, 1, 1])
    given: dict[str, Array | int | float]
    loose: dict[str, int | float] = {"rule": LOG_MARGIN, "margin": 9.0, "top_k": vocab}
    spoiled = np.array(logits)
    spoiled[2, 9] = np.nan
    yield accept_case("fault_past_the_cap", spoiled, best, cap=2)
    bits = np.full((4, 4), -1)  # twice as many words as this vocabulary needs
    bits[1:, 0], bits[:, 2:] = ~(1 << 9), 0
    yield accept_case("mask_of_more_words", logits, best, mask=bits)
    yield accept_case("nan_under_the_mask", spoiled, best, mask=bits)
    spoiled[2, 9] = np.inf
    yield accept_case("inf_under_the_mask", spoiled, best, mask=bits)
    given = {"mask": bits, "soft": np.full(4, 9), "soft_margin": np.inf}
    yield accept_case("soft_is_masked_at_any_margin", logits, best, **given)
    given = {"soft": np.array([-1, 1, 1, 1]), "soft_margin": 0.5, "stop": np.zeros(1)}
    yield accept_case("soft_past_a_stop", logits, drafts, **given)
    yield accept_case("near_a_forced_id", logits, drafts[::-1], forced=np.full(4, 5), **loose)
    yield accept_case("close_is_the_best_id", logits, drafts, close=0, **loose)
    signs = np.full((4, vocab), -1.0)
    signs[:, vocab - 1], signs[:, :2], signs[:, 2] = 0.25, 0.0, -0.0
    for k in (3, 4):
        third = loose | {"top_k": k}
        yield accept_case(f"zeros_of_both_signs_tie_k_{k}", signs, np.full(4, 2), **third)
    flat = np.zeros((4, vocab))
    for rule in (LOG_MARGIN, PROBABILITY_DELTA):
        strict = {"rule": rule, "margin": 0.0, "top_k": vocab}
        yield accept_case(f"rule_{rule}_margin_0_at_a_tie", flat, best + 1, **strict)


def _relaxed_cases(rng: np.random.Generator, rows: int, vocab: int, rule: int) -> Iterator[OpCase]:
    logits = rng.standard_normal((rows, vocab)) * 0.5
    order = np.argsort(-logits, axis=1, kind="stable")
    second = np.concatenate([[0], order[:-1, 1]])
    margin = 0.01 if rule == PROBABILITY_DELTA else 0.4
    for k in (1, 2, 3, 10):
        yield accept_case(
            f"rule_{rule}_second_best_k_{k}", logits, second, rule=rule, top_k=k, margin=margin
        )
    mixed = np.concatenate([[0], order[np.arange(rows - 1), rng.integers(0, 3, rows - 1)]])
    for limit in (0.0, margin / 2, margin * 3):
        yield accept_case(f"rule_{rule}_margin_{limit:.3f}", logits, mixed, rule=rule, margin=limit)
    for at in (1, 4, 9):
        yield accept_case(
            f"rule_{rule}_close_at_{at}",
            logits,
            second,
            rule=rule,
            margin=9.0,
            top_k=40,
            close=second[at],
        )
    yield accept_case(
        f"rule_{rule}_strict_id",
        logits,
        second,
        rule=rule,
        margin=9.0,
        top_k=40,
        strict=second[3:5],
    )
    yield accept_case(
        f"rule_{rule}_stop_id", logits, second, rule=rule, margin=9.0, top_k=40, stop=second[3:5]
    )
    for drafted in (0, 3):
        yield accept_case(
            f"rule_{rule}_drafted_{drafted}",
            logits,
            second,
            rule=rule,
            margin=9.0,
            top_k=40,
            drafted=drafted,
        )
    halves = np.where(np.arange(vocab) < 1, [0.5], [0.25]) * np.ones((rows, 1))
    for name, limit in (
        ("within", 0.25),
        ("outside", np.nextafter(np.float32(0.25), np.float32(0))),
    ):
        yield accept_case(
            f"rule_{rule}_just_{name}", halves, np.ones(rows), rule=rule, top_k=2, margin=limit
        )
    flat = np.zeros((rows, vocab))
    yield accept_case(
        f"rule_{rule}_all_equal", flat, np.arange(rows), rule=rule, top_k=5, margin=0.5
    )
