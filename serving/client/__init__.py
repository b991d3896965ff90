"""Clients of a plan server: RemotePlanner for one thread, AsyncPlanner for asyncio.

They need pyzmq and msgspec, nothing else.
"""

from typing import TYPE_CHECKING, Any

from thor_dflash.core.errors import PlanError
from thor_dflash.serving.client.client import RemotePlanner
from thor_dflash.serving.client.connection import LostRequest
from thor_dflash.serving.client.options import Options
from thor_dflash.serving.protocol.messages import (
    Chunk,
    ImageDigest,
    ImageInput,
    ImagePart,
    ImageSize,
    Message,
    PlanRequest,
    Result,
    TextPart,
    Validate,
)

if TYPE_CHECKING:
    from thor_dflash.serving.client.async_client import AsyncPlanner

Ask = PlanRequest
"""The earlier name of PlanRequest."""

__all__ = [
    "Ask",
    "AsyncPlanner",
    "Chunk",
    "ImageDigest",
    "ImageInput",
    "ImagePart",
    "ImageSize",
    "LostRequest",
    "Message",
    "Options",
    "PlanError",
    "PlanRequest",
    "RemotePlanner",
    "Result",
    "TextPart",
    "Validate",
]


if not TYPE_CHECKING:  # else checkers would take any name for one that there is

    def __getattr__(name: str) -> Any:
        """Import AsyncPlanner when it is asked for: asyncio is half of the time to import this."""
        if name == "AsyncPlanner":
            from thor_dflash.serving.client.async_client import AsyncPlanner

            return AsyncPlanner
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
