"""Chooses how many prompt tokens a prefill step reads, so that a cancel does not wait too long."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from statistics import median

from thor_dflash.runtime.decoding.model_runner import ModelRunner

REPEATS = 3
"""Measured steps per size, after one warm-up step."""


def choose_chunk(
    model: ModelRunner,
    sizes: Iterable[int],
    limit_ms: float,
    log: Callable[[str], None],
    measure: Callable[[ModelRunner, int, int], float] | None = None,
    idle_ms: float = 0.0,
) -> float:
    """Set `model.chunk` to the largest of `sizes` whose step takes at most `limit_ms`, or else to
    the smallest. Returns the time of that step at the end of the longest prompt, where attention
    reads most, ms; `idle_ms` before the step are part of it. Call before the first request: this
    empties the sequence.
    """
    took = 0.0
    for rows in sorted(sizes, reverse=True):
        model.chunk = rows
        took = idle_ms + (measure or step_ms)(model, rows, max(0, model.limit - rows))
        if took <= limit_ms:
            break
    else:
        idle = f" ({idle_ms:.0f} of them serve.yield_us)" if idle_ms else ""
        remedy = (
            f"build the package with smaller steps: thor-dflash build ... --set "
            f"'build.chunks=[{model.chunk // 2}]' --force; or "
            if model.chunk > 1
            else ""
        )
        log(
            f"warning: a prefill step of {model.chunk} tokens takes {took:.0f} ms{idle}, and "
            f"serve.cancel_ms is {limit_ms:.0f}: a cancel waits longer. To change it, {remedy}"
            f"accept it: thor-dflash serve ... --set serve.cancel_ms={math.ceil(took)}"
        )
    return took


def step_ms(model: ModelRunner, rows: int, start: int) -> float:
    """Measure the time of a prefill step of `rows` rows after `start` others, ms. The content of
    those does not affect the time, so they are not filled.
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
