"""The answer to `hello`: the server, its model and its limits."""

from __future__ import annotations

from typing import Any

import thor_dflash
from thor_dflash.config.serving import ServeConfig
from thor_dflash.core.bounds import MOST_IMAGE_BYTES
from thor_dflash.runtime.grammar.schema import MAX_BYTES
from thor_dflash.serving.planner.backend import Backend
from thor_dflash.serving.protocol import codec, messages, validation
from thor_dflash.serving.server import host_info


def server_description(config: ServeConfig, backend: Backend | None) -> dict[str, Any]:
    """Return the answer to `hello`; `backend` is None until it is ready."""
    model = None if backend is None else backend.about
    return {
        "server": {"name": "thor-dflash", "version": thor_dflash.__version__},
        "versions": [messages.VERSION],
        "model": model,
        "features": () if model is None else model.features,
        "limits": {
            "max_message": config.max_message,
            "max_queue": config.max_queue,
            "max_context": None if model is None else model.max_context,
            "max_schema": MAX_BYTES,
            "max_metadata": validation.METADATA_BYTES,
            "max_depth": codec.DEPTH,
            "max_images": config.max_images,
            "max_image_bytes": MOST_IMAGE_BYTES,
            "max_image_pixels": config.image_pixels,
            "prefill_chunk": None if model is None else model.prefill_chunk,
            "cancel_bound_ms": None if backend is None else backend.rates.bound_ms(),
        },
        "defaults": {
            "max_tokens": config.max_tokens,
            "thinking": config.thinking,
            "thinking_budget": config.thinking_budget,
        },
        "prefixes": [] if backend is None else backend.prefixes(),
        "device": host_info.describe("" if model is None else model.engine),
        "admin": config.allow_admin,
    }
