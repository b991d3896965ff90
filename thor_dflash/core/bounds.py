"""Types of whole numbers with a range, as configuration and manifests use them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from msgspec import Meta

LARGEST = (1 << 31) - 1
"""Largest number. Graphs and drivers take 32 bits; the wire protocol shifts some."""

Count = Annotated[int, Meta(ge=0, le=LARGEST)]
Positive = Annotated[int, Meta(ge=1, le=LARGEST)]

MOST_IMAGE_BYTES = 8 << 20
"""Longest image of a request, bytes as it is sent."""

IMAGES_BYTES = 16 << 20
"""Bytes that the images of a request may have, beside the rest of it: as base64, or binary."""

IMAGE_MAGIC: Mapping[Literal["jpeg", "png"], bytes] = {
    "jpeg": b"\xff\xd8\xff",
    "png": b"\x89PNG\r\n\x1a\n",
}
"""Format of an image file -> its first bytes."""
