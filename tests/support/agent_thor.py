"""What the scripts of the agent trace share: cycles of an assumed acceptance, times of others."""

from __future__ import annotations

import math

SHARE = 0.795
"""Share of its read rate at which an H100 runs a cycle: bench-2.json."""
REFERENCE_S = 157 * 60
"""MLPerf's reference on a Thor, s."""
VENDOR_S = 24.5 * 60
"""What a vendor's "6.4 times faster" makes of it, s, if it is meant against that."""


def cycles_of(tokens: int, accept: float) -> int:
    """Cycles of a forced answer."""
    return next(n for n in range(tokens + 1) if math.floor(n * accept) >= tokens)
