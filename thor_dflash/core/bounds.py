"""Types of whole numbers with a range, as configuration and manifests use them."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

LARGEST = (1 << 31) - 1
"""Largest number. Graphs and drivers take 32 bits; the wire protocol shifts some."""

Count = Annotated[int, Meta(ge=0, le=LARGEST)]
Positive = Annotated[int, Meta(ge=1, le=LARGEST)]
