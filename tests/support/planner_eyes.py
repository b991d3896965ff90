"""A session over planner-nano-eyes, the model in the repository that sees."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from thor_dflash.builders.build import build
from thor_dflash.config.build import BuildConfig
from thor_dflash.config.engine import EngineConfig
from thor_dflash.core.progress import Silent
from thor_dflash.runtime.session import Session, open_session

EYES = Path(__file__).parents[2] / "models" / "planner-nano-eyes"
_HELD: list[TemporaryDirectory[str]] = []


@cache
def eyes_session() -> Session:
    """Returns the same session for every test, which keeps turns. Its package is removed when the
    process ends.
    """
    held = TemporaryDirectory()
    _HELD.append(held)
    out = Path(held.name) / "package"
    config = BuildConfig(chunk=64, capacity=1024)
    build(EYES / "target", EYES / "drafter", out, config, Silent())
    return open_session(out, EngineConfig(threads=1), Silent(), reuse=16 << 20)
