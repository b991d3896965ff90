"""The answer to `hello`: the server, its model and its limits."""

from __future__ import annotations

from typing import Any

import thor_dflash
from thor_dflash.config.serving import ServeConfig
from thor_dflash.serving import codec, device, fields, wire
from thor_dflash.serving.backend import Backend


def about(config: ServeConfig, backend: Backend | None) -> dict[str, Any]:
    """Return the answer to `hello`; `backend` is None until it is ready."""
    model = None if backend is None else backend.about
    return {
        "server": {"name": "thor-dflash", "version": thor_dflash.__version__},
        "versions": [wire.VERSION],
        "model": model,
        "features": () if model is None else model.features,
        "limits": {
            "max_message": config.max_message,
            "max_queue": config.max_queue,
            "max_context": None if model is None else model.max_context,
            "max_schema": fields.SCHEMA_BYTES,
            "max_metadata": fields.METADATA_BYTES,
            "max_depth": codec.DEPTH,
            "prefill_chunk": None if model is None else model.prefill_chunk,
            "cancel_bound_ms": None if backend is None else backend.rates.bound_ms(),
        },
        "defaults": {
            "max_tokens": config.max_tokens,
            "thinking": config.thinking,
            "thinking_budget": config.thinking_budget,
        },
        "prefixes": [] if backend is None else backend.prefixes(),
        "device": device.describe("" if model is None else model.engine),
        "admin": config.allow_admin,
    }
