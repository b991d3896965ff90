"""The configuration section of `thor-dflash calibrate`."""

from __future__ import annotations

from dataclasses import dataclass

from thor_dflash.config.bounds import Count, Positive


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrateConfig:
    """What `thor-dflash calibrate` reads ([quantising](../guide/quantize.md#with-activations))."""

    tokens: Positive = 65536
    """Tokens that are run, from the first document on."""
    context: Positive = 4096
    """Longest beginning of a document that is run, tokens."""
    threads: Count = 0
    """CPU threads; 0: every core."""
