"""Reports a missing extra of this package as a ConfigError instead of a traceback."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from thor_dflash.core.errors import ConfigError
from thor_dflash.core.shortages import shortage

ENGINE = ("numpy", "ml_dtypes", "tokenizers", "jinja2", "llguidance", "tomli_w")
"""The modules of the extra `engine`."""


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
        raise ConfigError(shortage(e) or missing(name, e)) from e


def missing(name: str, error: ImportError) -> str:
    """The message for a module that does not load, of the extra `name`."""
    command = f"pip install 'thor-dflash[{name}]'"
    if name == "engine":  # alone it is of no use
        command = "pip install 'thor-dflash[ort]', or [cuda] for an NVIDIA GPU"
    # If it is there: for example a compiled package that needs a newer libstdc++.
    got = "none" if isinstance(error, ModuleNotFoundError) else str(error)
    return f"{error.name or f'the extra {name}'} must be installed: {command} (got {got})"
