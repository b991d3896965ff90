"""How many prompt tokens a prefill step reads: as many as a cancel can wait for."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from statistics import median

from thor_dflash.runtime.model import Model

REPEATS = 3
"""Measured steps of a size, after one that warms it up."""


def choose_chunk(
    model: Model,
    sizes: Iterable[int],
    limit_ms: float,
    log: Callable[[str], None],
    measure: Callable[[Model, int, int], float] | None = None,
) -> float:
    """Set `model.chunk` to the largest of `sizes` whose step takes `limit_ms` at most, or else to
    the smallest; give what its step takes at the end of the longest prompt, where attention reads
    most, ms. Before the first request: the sequence is empty after.
    """
    took = 0.0
    for rows in sorted(sizes, reverse=True):
        model.chunk = rows
        took = (measure or step_ms)(model, rows, max(0, model.limit - rows))
        if took <= limit_ms:
            break
    else:
        log(
            f"a prefill step of {model.chunk} tokens takes {took:.0f} ms and serve.cancel_ms is "
            f"{limit_ms:.0f}: a cancel waits longer; build.chunks gives a package smaller steps"
        )
    return took


def step_ms(model: Model, rows: int, start: int) -> float:
    """What a prefill step of so many rows takes after `start` others, ms. What those hold does not
    matter to that: they are not filled.
    """
    times: list[float] = []
    for _ in range(1 + REPEATS):
        model.state.reset()
        model.state.advance(start)
        begin = time.perf_counter()
        model.prefill([0] * rows, observe=True)
        times.append(1e3 * (time.perf_counter() - begin))
    model.state.reset()
    return median(times[1:])
