"""Bytes of an image file, or raw pixels, to a picture. Everything is checked before the work that
it bounds; only JPEG and PNG are decoded, by Pillow, and only still images.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from io import BytesIO
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from thor_dflash.core.bounds import IMAGE_MAGIC, MOST_IMAGE_BYTES
from thor_dflash.core.errors import RequestError
from thor_dflash.core.extras import extra
from thor_dflash.core.message_text import show
from thor_dflash.core.model_dims import VisionDims
from thor_dflash.core.tensors import Array
from thor_dflash.runtime.vision.picture import FACTOR, Picture, resized

ImageFormat = Literal["jpeg", "png", "rgb8", "bgr8", "mono8"]
RAW: dict[str, int] = {"rgb8": 3, "bgr8": 3, "mono8": 1}
"""Raw formats, and their bytes of a pixel."""
MODES = ("1", "L", "LA", "P", "RGB", "RGBA")
MOST_PIXELS = 1 << 24
"""Pixels of an image as it was sent."""
MOST_SCANS = 20
"""Scans of a progressive JPEG. Each costs as much time as the whole image; encoders write ten."""
_SCAN = b"\xff\xda"


@dataclass(frozen=True, slots=True, kw_only=True)
class RawSize:
    """Size of raw pixels; `step` is the bytes of a row, 0 for no padding."""

    width: int
    height: int
    step: int = 0


def read_picture(
    data: bytes,
    kind: ImageFormat,
    vision: VisionDims,
    most_pixels: int,
    size: RawSize | None = None,
    where: str = "image",
) -> Picture:
    """Decode and resize an image.

    Args:
        most_pixels: Limit of the resized image, beside the model's own.
        size: Of raw formats.
        where: The field that errors name.

    Raises:
        RequestError: it is no such image, or beyond a limit.
        ConfigError: Pillow is needed and missing.
    """
    if len(data) > MOST_IMAGE_BYTES:
        raise RequestError(f"{where} must be at most {MOST_IMAGE_BYTES} bytes (got {len(data)})")
    if kind == "jpeg" or kind == "png":
        pixels = _decoded(data, kind, where)
    else:
        pixels = _raw(data, kind, size, where)
    height, width, _ = pixels.shape
    longest = max(min(vision.longest, most_pixels), FACTOR * FACTOR)
    try:
        wanted = resized(width, height, min(vision.shortest, longest), longest)
    except RequestError as e:
        raise RequestError(f"{where}: {e}") from e
    return Picture(pixels if wanted == (width, height) else _resample(pixels, wanted))


def _raw(data: bytes, kind: str, size: RawSize | None, where: str) -> NDArray[np.uint8]:
    if size is None or min(size.width, size.height) < 1:
        raise RequestError(f"{where}.width and height must be given for {kind} (got none)")
    _check_pixels(size.width, size.height, where)
    row = size.width * RAW[kind]
    step = size.step or row
    if step < row:
        raise RequestError(f"{where}.step must be at least {row}, a row's bytes (got {step})")
    if len(data) != step * size.height:
        raise RequestError(
            f"{where}.data must be step * height = {step * size.height} bytes (got {len(data)})"
        )
    rows = np.frombuffer(data, np.uint8).reshape(size.height, step)[:, :row]
    pixels = rows.reshape(size.height, size.width, RAW[kind])
    if kind == "mono8":
        return np.repeat(pixels, 3, axis=2)
    return np.ascontiguousarray(pixels[:, :, ::-1] if kind == "bgr8" else pixels)


def _check_pixels(width: int, height: int, where: str) -> None:
    if width * height > MOST_PIXELS:
        raise RequestError(f"{where} must be at most {MOST_PIXELS} pixels (got {width} x {height})")


def _decoded(data: bytes, kind: Literal["jpeg", "png"], where: str) -> NDArray[np.uint8]:
    if not data.startswith(IMAGE_MAGIC[kind]):
        raise RequestError(f"{where} must be a {kind} file (got bytes {data[:8].hex()})")
    if kind == "jpeg" and (scans := data.count(_SCAN)) > MOST_SCANS:
        raise RequestError(f"{where} must have at most {MOST_SCANS} scans (got {scans})")
    with extra("images"):
        from PIL import Image, ImageOps

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with Image.open(BytesIO(data), formats=(kind.upper(),)) as image:
                _check_pixels(*image.size, where)
                if (frames := getattr(image, "n_frames", 1)) != 1:
                    raise RequestError(f"{where} must be a still image (got {frames} frames)")
                if image.mode not in MODES:
                    rule = "of 8 bits, grey or RGB, with or without transparency"
                    raise RequestError(f"{where} must be {rule} (got {image.mode})")
                image.load()
                return _on_white(Image, ImageOps.exif_transpose(image))
    except RequestError:
        raise
    # Pillow raises many kinds for what is no image: OSError, ValueError, SyntaxError, struct.error.
    except Exception as e:
        raise RequestError(f"{where} must be a {kind} image (got: {show(str(e))})") from e


def _on_white(library: Any, image: Any) -> NDArray[np.uint8]:
    """RGB pixels; what is transparent is white."""
    if image.mode in ("LA", "RGBA", "P") or "transparency" in image.info:
        image = image.convert("RGBA")
        white = library.new("RGBA", image.size, "white")
        image = library.alpha_composite(white, image)
    return np.asarray(image.convert("RGB"))


def _resample(pixels: Array, size: tuple[int, int]) -> NDArray[np.uint8]:
    with extra("images"):
        from PIL import Image

    image = Image.fromarray(pixels)
    return np.asarray(image.resize(size, Image.Resampling.BICUBIC))
