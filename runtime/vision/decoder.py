"""Bytes of an image file, or raw pixels, to a picture. Everything is checked before the work that
it bounds; only JPEG and PNG are decoded, by Pillow, and only still images.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import cache
from io import BytesIO
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from thor_dflash.core.bounds import IMAGE_MAGIC, MOST_IMAGE_BYTES
from thor_dflash.core.errors import RequestError
from thor_dflash.core.extras import extra
from thor_dflash.core.message_text import show
from thor_dflash.core.tensors import Array
from thor_dflash.runtime.vision.picture import Picture, PixelLimits

ImageFormat = Literal["jpeg", "png", "rgb8", "bgr8", "mono8"]
RAW: dict[str, int] = {"rgb8": 3, "bgr8": 3, "mono8": 1}
"""Raw formats, and their bytes of a pixel."""
MODES = ("1", "L", "LA", "P", "RGB", "RGBA")
MOST_PIXELS = 1 << 24
"""Pixels of an image as it was sent."""
SHORTEST_SIDE = 8
MOST_RATIO = 200
"""Longest side of an image as it was sent, in shortest sides."""
MOST_SCANS = 20
"""Scans of a progressive JPEG. Each costs as much time as the whole image; encoders write ten."""
MOST_PARTS = 1 << 14
"""Chunks of a PNG, or segments of a JPEG before its pixels: Pillow takes microseconds of Python for
each, and a file of 8 MiB may have two million. Encoders write chunks of 8 KiB or more.
"""
BAND = 1 << 18
"""Pixels that are put on white at a time: Pillow holds the interpreter's lock meanwhile."""
_SCAN = b"\xff\xda"
_BARE = frozenset((0xC8, *range(0xD0, 0xDA), *range(0xF0, 0xFE)))
"""Markers of JPEG behind which Pillow looks for the next one at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RawSize:
    """Size of raw pixels; `step` is the bytes of a row, 0 for no padding."""

    width: int
    height: int
    step: int = 0


def read_picture(
    data: bytes, kind: ImageFormat, pixels: PixelLimits, size: RawSize | None = None
) -> Picture:
    """Decode and resize an image.

    Args:
        pixels: Limits of the resized image.
        size: Of raw formats.

    Raises:
        RequestError: it is no such image, or beyond a limit; its field is data, width, height or
            step.
        ConfigError: Pillow is needed and missing.
    """
    if len(data) > MOST_IMAGE_BYTES:
        raise _refused("data", f"at most {MOST_IMAGE_BYTES} bytes", len(data))
    found = _decoded(data, kind) if kind == "jpeg" or kind == "png" else _raw(data, kind, size)
    height, width, _ = found.shape
    wanted = pixels.resized(width, height)
    return Picture(found if wanted == (width, height) else _resample(found, wanted))


def _refused(field: str, rule: str, got: object) -> RequestError:
    return RequestError(f"{field} must be {rule} (got {got})", field)


def _raw(data: bytes, kind: str, size: RawSize | None) -> NDArray[np.uint8]:
    for name in ("width", "height"):
        if size is None or getattr(size, name) < 1:
            raise _refused(name, f"given for {kind}", "none")
    assert size is not None
    check_size(size.width, size.height, "width")
    row = size.width * RAW[kind]
    step = size.step or row
    if step < row:
        raise _refused("step", f"at least {row}, a row's bytes", step)
    if len(data) != step * size.height:
        raise _refused("data", f"step * height = {step * size.height} bytes", len(data))
    rows = np.frombuffer(data, np.uint8).reshape(size.height, step)[:, :row]
    found = rows.reshape(size.height, size.width, RAW[kind])
    if kind == "mono8":
        return np.repeat(found, 3, axis=2)
    return np.ascontiguousarray(found[:, :, ::-1] if kind == "bgr8" else found)


def check_size(width: int, height: int, field: str) -> None:
    """Refuse an image by its size, before it is decoded.

    Raises:
        RequestError: at `field`.
    """
    got, (low, high) = f"{width} x {height}", sorted((width, height))
    if width * height > MOST_PIXELS:
        raise RequestError(f"{field} must give at most {MOST_PIXELS} pixels (got {got})", field)
    if low < SHORTEST_SIDE or high > MOST_RATIO * low:
        rule = f"sides of at least {SHORTEST_SIDE} pixels, one at most {MOST_RATIO} times the other"
        raise RequestError(f"{field} must give {rule} (got {got})", field)


def _decoded(data: bytes, kind: Literal["jpeg", "png"]) -> NDArray[np.uint8]:
    if not data.startswith(IMAGE_MAGIC[kind]):
        raise _refused("data", f"a {kind} file", f"bytes {data[:8].hex()}")
    if kind == "jpeg" and (scans := data.count(_SCAN)) > MOST_SCANS:
        raise _refused("data", f"of at most {MOST_SCANS} scans", scans)
    _check_parts(data, kind)
    with extra("images"):
        from PIL import Image, UnidentifiedImageError

    try:
        return _still_image(data, kind)
    except RequestError:
        raise
    except Image.DecompressionBombError as e:
        raise _refused("data", f"an image of at most {MOST_PIXELS} pixels", "far more") from e
    except UnidentifiedImageError as e:  # its text has an address of this process
        raise _refused("data", f"a {kind} image", "none") from e
    # Pillow raises many kinds for what is no image: OSError, ValueError, SyntaxError, struct.error.
    except Exception as e:
        raise RequestError(f"data must be a {kind} image (got: {show(str(e))})", "data") from e


def _check_parts(data: bytes, kind: str) -> None:
    """Count what Pillow will look at before the pixels, as it does: any byte that is not part of a
    segment counts, too.
    """
    at = 8 if kind == "png" else 2
    for _ in range(MOST_PARTS):
        if at + 4 > len(data):
            return
        if kind == "png":
            at += 12 + int.from_bytes(data[at : at + 4], "big")
        elif data[at] != 0xFF or data[at + 1] in (0, 0xFF):
            at += 1
        elif data[at + 1] in _BARE:
            at += 2
        elif data.startswith(_SCAN, at):
            return
        else:
            at += 2 + int.from_bytes(data[at + 2 : at + 4], "big")
    raise _refused("data", f"of at most {MOST_PARTS} chunks or segments", "more")


def _still_image(data: bytes, kind: Literal["jpeg", "png"]) -> NDArray[np.uint8]:
    """Decode with Pillow."""
    from PIL import Image, ImageOps

    _ignore_warnings()
    with Image.open(BytesIO(data), formats=(kind.upper(),)) as image:
        check_size(*image.size, "data")
        if (frames := getattr(image, "n_frames", 1)) != 1:
            raise _refused("data", "a still image", f"{frames} frames")
        if image.mode not in MODES:
            rule = "of 8 bits, grey or RGB, with or without transparency"
            raise _refused("data", rule, image.mode)
        image.load()
        ImageOps.exif_transpose(image, in_place=True)
        return _on_white(Image, image)


@cache
def _ignore_warnings() -> None:
    """Ignore what Pillow warns of in a file, of which Python keeps every text that is new.
    For the whole process, as filters are: `catch_warnings` changes those of other threads, and two
    threads within it may leave them changed.
    """
    warnings.filterwarnings("ignore", module=r"PIL\.")


def _on_white(library: Any, image: Any) -> NDArray[np.uint8]:
    """RGB pixels; what is transparent is white."""
    if image.mode in ("LA", "RGBA", "P") or "transparency" in image.info:
        image = image if image.mode == "RGBA" else image.convert("RGBA")
        whole = library.new("RGB", image.size)
        width, height = image.size
        rows = max(1, BAND // width)
        for top in range(0, height, rows):
            band = image.crop((0, top, width, min(top + rows, height)))
            white = library.new("RGBA", band.size, "white")
            whole.paste(library.alpha_composite(white, band).convert("RGB"), (0, top))
        image = whole
    return np.asarray(image if image.mode == "RGB" else image.convert("RGB"))


def _resample(pixels: Array, size: tuple[int, int]) -> NDArray[np.uint8]:
    with extra("images"):
        from PIL import Image

    image = Image.fromarray(pixels)
    return np.asarray(image.resize(size, Image.Resampling.BICUBIC))
