"""Waits for something that another thread does."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE_S = 20.0
"""Time after which a test gives up. Only a test that fails waits so long."""


def until(what: Callable[[], object]) -> None:
    """Wait until something is true."""
    end = time.monotonic() + PATIENCE_S
    while not what():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.002)
