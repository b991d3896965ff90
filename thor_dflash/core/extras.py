"""Reports a missing extra of this package as a ConfigError instead of a traceback."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from thor_dflash.core.errors import ConfigError
from thor_dflash.core.shortages import shortage


@contextmanager
def extra(name: str) -> Generator[None]:
    """Context for imports that need the extra `name`.

    Raises:
        ConfigError: it is not installed, or this machine cannot load it, or has no memory for it.
    """
    try:
        yield
    except ImportError as e:
        if (e.name or "").startswith("thor_dflash"):
            raise
        if text := shortage(e):
            raise ConfigError(text) from e
        # If it is there: for example a compiled package that needs a newer libstdc++.
        got = "none" if isinstance(e, ModuleNotFoundError) else f": {e}"
        raise ConfigError(
            f"{e.name} must be installed: pip install 'thor-dflash[{name}]' (got {got})"
        ) from e
