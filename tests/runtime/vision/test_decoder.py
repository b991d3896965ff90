"""Bytes to pictures: what is shown, and hostile files, each refused with one error."""

from __future__ import annotations

import struct
import tracemalloc
import warnings
from typing import Any

import numpy as np
import pytest
from PIL import Image, TiffImagePlugin, TiffTags
from support.image_files import HOSTILE, file_of, written
from support.seeing_model import frame

from thor_dflash.core.errors import RequestError
from thor_dflash.runtime.vision import decoder
from thor_dflash.runtime.vision.decoder import RawSize, read_picture
from thor_dflash.runtime.vision.picture import Picture, PixelLimits

MODEL = PixelLimits(65536, 16777216)
"""As in the preprocessor_config.json of Qwen3.5 and later."""
SERVED = MODEL.under(1 << 20)


def read(data: bytes, kind: Any = "png") -> Picture:
    return read_picture(data, kind, SERVED)


@pytest.mark.parametrize(
    ("sent", "want"),
    [
        ((224, 224), (256, 256)),
        ((64, 64), (256, 256)),
        ((424, 240), (416, 256)),
        ((640, 480), (640, 480)),
        ((848, 480), (832, 480)),
        ((1280, 720), (1280, 704)),
        ((1280, 800), (1280, 800)),
        ((1920, 1080), (1920, 1088)),
        ((3840, 2160), (3840, 2176)),
    ],
)
def test_sizes_of_cameras(sent: tuple[int, int], want: tuple[int, int]) -> None:
    """Source: transformers' processor."""
    assert MODEL.resized(*sent) == want


def test_a_limit_of_pixels_shrinks_a_frame() -> None:
    assert SERVED.resized(1920, 1080) == (1344, 768)


def test_a_png_is_the_picture_that_its_pixels_are() -> None:
    pixels = frame(1, 320, 256)
    raw = read_picture(pixels.tobytes(), "rgb8", SERVED, RawSize(width=320, height=256))
    assert read(file_of(Image.fromarray(pixels))).digest == raw.digest
    assert (raw.pixels == pixels).all(), "a size that fits is not resized"


def test_what_is_transparent_is_white() -> None:
    clear = Image.new("RGBA", (256, 256), (255, 0, 0, 0))
    assert (read(file_of(clear)).pixels == 255).all()
    palette = Image.new("P", (256, 256), 0)
    assert (read(file_of(palette, transparency=0)).pixels == 255).all()


def test_bands_of_transparency_are_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    rgba = Image.fromarray(np.random.default_rng(3).integers(0, 256, (320, 288, 4), np.uint8))
    white = Image.new("RGBA", rgba.size, "white")
    whole = np.asarray(Image.alpha_composite(white, rgba).convert("RGB"))
    for band in (1, 1000, 288 * 320):
        monkeypatch.setattr(decoder, "BAND", band)
        assert (read(file_of(rgba)).pixels == whole).all()


def test_a_photo_is_turned_as_its_camera_was() -> None:
    pixels = frame(2, 320, 256)
    exif = Image.Exif()
    exif[0x0112] = 6
    turned = read(file_of(Image.fromarray(pixels), "JPEG", exif=exif, quality=95), "jpeg")
    assert turned.pixels.shape == (320, 256, 3)


def test_decoding_changes_no_warnings_of_other_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    data, white = file_of(Image.fromarray(frame(2))), decoder._on_white
    read(data)
    before, seen = list(warnings.filters), list[object]()

    def noted(*given: Any) -> Any:
        seen.append(list(warnings.filters))
        return white(*given)

    monkeypatch.setattr(decoder, "_on_white", noted)
    read(data)
    assert seen == [before]


def test_warnings_about_a_file_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder._ignore_warnings.cache_clear()  # pytest has other filters in every test
    for module in (TiffImagePlugin, Image):
        monkeypatch.delattr(module, "__warningregistry__", raising=False)
    single = [tag for tag, info in sorted(TiffTags.TAGS_V2.items()) if info.length == 1]
    tags = b"".join(struct.pack(">HHIHH", tag, 3, 2, 1, 1) for tag in single)
    exif = b"Exif\0\0MM\0*\0\0\0\x08" + struct.pack(">H", len(single)) + tags + bytes(4)
    data = file_of(Image.fromarray(frame(2)), "JPEG", exif=exif)
    assert read(data, "jpeg").pixels.size
    with pytest.raises(RequestError, match="pixels"):
        read(written(10_000, 10_000, 8, b""))
    for module in (TiffImagePlugin, Image):
        assert set(vars(module).get("__warningregistry__", ())) <= {"version"}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_one_error(name: str) -> None:
    data, kind = HOSTILE[name]()
    tracemalloc.start()
    try:
        with pytest.raises(RequestError, match="data") as error:
            read(data, kind)
        assert "0x" not in str(error.value), "no address of the process"
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("kind", ["jpeg", "png"])
def test_a_file_with_changed_bytes_is_read_or_refused(kind: Any) -> None:
    good, rng = file_of(Image.fromarray(frame(6)), kind.upper()), np.random.default_rng(1)
    for _ in range(120):
        data = bytearray(good)
        for at in rng.integers(3, len(data), rng.integers(1, 6)):
            data[at] = rng.integers(256)
        try:
            assert read(bytes(data), kind).pixels.size > 0
        except RequestError:
            continue
