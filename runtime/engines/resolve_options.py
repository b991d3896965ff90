"""Resolves engine options against a package and the machine, and refuses those that do not fit.

Shared by `open_session` and the doctor, so that both report the same.
"""

from __future__ import annotations

import os

from thor_dflash.config.engine import EngineConfig
from thor_dflash.core.errors import ConfigError
from thor_dflash.core.model_dims import MIN_CONVERSATION, longest_context
from thor_dflash.package.manifest import Manifest


def threads(config: EngineConfig) -> int:
    """CPU threads; 0 is every core.

    Raises:
        ConfigError: more than there are cores.
    """
    # More threads would only wait for each other, and a mistyped number would start that many.
    if config.threads > (cores := os.cpu_count() or 1):
        raise ConfigError(
            f"engine.threads must be <= {cores}, the cores of this machine (got {config.threads})"
        )
    return config.threads


def capacity(config: EngineConfig, found: Manifest) -> int:
    """Context of the session, tokens.

    Raises:
        ConfigError: too short for any request, or longer than the models were made for.
    """
    chosen = config.capacity or found.capacity
    least, longest = found.block + MIN_CONVERSATION, longest_context(found.target, found.drafter)
    if not least <= chosen <= longest:
        raise ConfigError(
            f"engine.capacity must be {least} to {longest}, the models' longest (got {chosen})"
        )
    return chosen


def block(config: EngineConfig, found: Manifest) -> int:
    """Rows of a verify block.

    Raises:
        ConfigError: the package has no graphs for it.
    """
    chosen = config.block or found.block
    if chosen not in (known := (*found.widths, found.block)):
        widths = " or ".join(str(width) for width in sorted(known))
        raise ConfigError(f"engine.block must be {widths}, as the package was built (got {chosen})")
    return chosen


def chunk(config: EngineConfig, found: Manifest) -> int:
    """Rows of the largest prefill step.

    Raises:
        ConfigError: the package has no graph for it.
    """
    chosen = config.chunk or found.chunk
    if chosen not in (known := (found.chunk, *found.chunks)):
        rows = " or ".join(str(size) for size in sorted(known))
        raise ConfigError(f"engine.chunk must be {rows}, as the package was built (got {chosen})")
    return chosen
