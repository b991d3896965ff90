"""Image files, most of them hostile."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
from PIL import Image
from support.seeing_model import frame


def file_of(image: Image.Image, kind: str = "PNG", **more: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **more)
    return out.getvalue()


def part(kind: bytes, body: bytes) -> bytes:
    """A chunk of a PNG."""
    size = struct.pack(">I", len(body))
    return size + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def written(width: int, height: int, depth: int, pixels: bytes) -> bytes:
    """A PNG that says how large it is and then holds this, grey."""

    head = struct.pack(">IIBBBBB", width, height, depth, 0, 0, 0, 0)
    whole = part(b"IHDR", head) + part(b"IDAT", zlib.compress(pixels, 1)) + part(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + whole


def animated() -> bytes:
    frames = [Image.fromarray(frame(i)) for i in range(2)]
    return file_of(frames[0], save_all=True, append_images=frames[1:])


GOOD = file_of(Image.fromarray(frame(5)), "JPEG")
HOSTILE: dict[str, Callable[[], tuple[bytes, str]]] = {
    "too long": lambda: (b"\xff\xd8\xff" + bytes(8 << 20), "jpeg"),
    "bomb": lambda: (written(12_000, 12_000, 1, bytes(12_000 * 1_501)), "png"),
    "above our limit of pixels": lambda: (written(4_100, 4_100, 1, bytes(4_100 * 514)), "png"),
    "huge by its header": lambda: (written(60_000, 60_000, 8, b""), "png"),
    "line": lambda: (file_of(Image.new("L", (100_000, 1))), "png"),
    "truncated": lambda: (GOOD[: len(GOOD) // 2], "jpeg"),
    "cmyk": lambda: (file_of(Image.new("CMYK", (64, 64)), "JPEG"), "jpeg"),
    "16 bits": lambda: (file_of(Image.fromarray(np.zeros((64, 64), np.uint16))), "png"),
    "animated": lambda: (animated(), "png"),
    "another type": lambda: (file_of(Image.new("RGB", (64, 64)), "GIF"), "png"),
    "a png as jpeg": lambda: (file_of(Image.new("RGB", (64, 64))), "jpeg"),
    "polyglot": lambda: (b"\x89PNG\r\n\x1a\n" + GOOD, "png"),
    "scans": lambda: (GOOD[:-2] + b"\xff\xda\x00\x02" * 40 + GOOD[-2:], "jpeg"),
    "chunks": lambda: (
        (png := written(8, 8, 8, bytes(72)))[:33] + part(b"teXt", b"") * 20_000 + png[33:],
        "png",
    ),
    "segments": lambda: (GOOD[:2] + b"\xff\xfe\0\2" * 20_000 + GOOD[2:], "jpeg"),
    "fill bytes": lambda: (GOOD[:2] + b"\xff" * 20_000 + GOOD[2:], "jpeg"),
    "nothing": lambda: (b"", "png"),
}
"""Name -> a file, and the format that it is sent as."""
