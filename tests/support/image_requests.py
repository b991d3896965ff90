"""Requests of TDP/1 that show images, and such that are refused, with the field at fault."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from support.seeing_model import frame

from thor_dflash.core.tensors import Array

TEXT = {"type": "text", "text": "What is on the table? "}
THIN = {"width": 6400, "height": 32}


def raw(name: str, pixels: Array, **more: Any) -> dict[str, Any]:
    height, width, _ = pixels.shape
    size = {"width": width, "height": height}
    return {"id": name, "format": "rgb8", "data": pixels.tobytes(), **size, **more}


def asked(*images: dict[str, Any], **more: Any) -> dict[str, Any]:
    parts = [TEXT, *({"type": "image", "image": image["id"]} for image in images)]
    return {"messages": [{"role": "user", "content": parts}], "images": list(images), **more}


def showing(sha256: str, *images: dict[str, Any]) -> dict[str, Any]:
    """A request that names an image by its digest."""
    part = {"type": "image", "image": {"sha256": sha256}}
    return asked() | {"messages": [{"role": "user", "content": [TEXT, part]}], "images": images}


SHOWN = "messages[0].content[1]"
BAD: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "unused": (lambda: {**asked(), "images": [raw("a", frame(1))]}, "images[0]"),
    "unknown": (lambda: asked(raw("a", frame(1))) | {"images": []}, f"{SHOWN}.image"),
    "twice": (lambda: asked(raw("a", frame(1)), raw("a", frame(2))), "images[1].id"),
    "too many": (lambda: asked(*(raw(n, frame(1)) for n in "abc")), "images"),
    "short": (lambda: asked({**raw("a", frame(1)), "data": b"x"}), "images[0].data"),
    "second": (
        lambda: asked(raw("a", frame(1)), {**raw("b", frame(2)), "step": 9}),
        "images[1].step",
    ),
    "no size": (lambda: asked({"id": "a", "format": "rgb8", "data": b"x"}), "images[0].width"),
    "no height": (lambda: asked({**raw("a", frame(1)), "height": 0}), "images[0].height"),
    "no jpeg": (lambda: asked({"id": "a", "format": "jpeg", "data": b"x"}), "images[0].data"),
    "narrow": (lambda: asked(raw("a", frame(1, 4, 64))), "images[0].width"),
    "beyond every graph": (
        lambda: asked({"id": "a", "format": "mono8", "data": bytes(6400 * 32)} | THIN),
        "images[0].data",
    ),
    "no base64": (lambda: asked({**raw("a", frame(1)), "data": "@"}), "images[0].data"),
    "with prompt": (lambda: {"prompt": "x", "images": [raw("a", frame(1))]}, "images[0]"),
    "system": (
        lambda: {
            "messages": [{"role": "system", "content": [{"type": "image", "image": "a"}]}],
            "images": [raw("a", frame(1))],
        },
        "messages[0].content",
    ),
    "spelt": (
        lambda: {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "<|image_pad|>"},
                        {"type": "image", "image": "a"},
                    ],
                }
            ],
            "images": [raw("a", frame(1))],
        },
        "messages[0].content[0].text",
    ),
    "never sent": (lambda: showing("0" * 64), f"{SHOWN}.image.sha256"),
    "no digest": (lambda: showing("0" * 63), f"{SHOWN}.image.sha256"),
    "digest as an id": (lambda: showing("0" * 64, raw("0" * 64, frame(1))), "images[0].id"),
}
