"""Calls that also prefetch the weight of the next product."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from support.kernel_cases import cases_of
from support.kernel_runner import Call, Refused, call_of, shaped

from thor_dflash.plugins import Op
from thor_dflash.plugins.launch import PREFETCHED, CallSite

PACKED = 20 * 132 * 16 + 8
"""Bytes of such a weight. It is no multiple of 16, so no number of blocks can prefetch all of it in
equal shares of whole 16 bytes."""


def fetching(call: Call, nbytes: int = PACKED) -> Call:
    """The call with a weight of `nbytes` zeros to prefetch."""
    packed = np.zeros(nbytes, np.uint8)
    ports = {**call.site.ports, PREFETCHED: shaped(packed)}
    return replace(
        call,
        site=CallSite(call.site.op, call.site.attributes, ports),
        inputs={**call.inputs, PREFETCHED: packed},
    )


def of_few_rows(op: Op) -> dict[str, Call]:
    """The calls of an operator's cases that have at most 32 rows and are not a prefill, by name."""
    found: dict[str, Call] = {}
    for name, case in cases_of(op).items():
        try:
            call = call_of(op, case)
        except Refused:
            continue
        if "prefill" not in call.site.attributes.values.values() and call.site.size("o", 0) <= 32:
            found[name] = call
    return found
