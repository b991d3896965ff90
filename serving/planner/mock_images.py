"""The images of a mock's requests, taken by the rules of a package of Qwen3.6-27B. Its tower takes
the time of a step and makes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

from thor_dflash.config.serving import ServeConfig
from thor_dflash.runtime.vision.picture import Picture, PixelLimits
from thor_dflash.serving.planner.request_images import (
    ImageRules,
    RecentPictures,
    count_tokens,
    image_results,
    read_pictures,
)
from thor_dflash.serving.protocol import messages

LIMITS = PixelLimits(65536, 16777216)
"""Of the model's preprocessor_config.json."""
LARGEST = 1 << 20
"""Most pixels of an image for which a package has a graph by default."""
MARKS = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")


class MockImages:
    """Reads images, and remembers which it has seen. Thread-safe."""

    def __init__(self, config: ServeConfig) -> None:
        self._rules = ImageRules(
            pixels=LIMITS.under(min(config.image_pixels, LARGEST)),
            largest=LARGEST,
            most=config.max_images,
            marks=MARKS,
        )
        self._kept = RecentPictures()
        self._encoded = RecentPictures(config.image_mb << 20)

    def read(self, ask: messages.PlanRequest, scope: str) -> dict[str, Picture]:
        """As Backend.read_images."""
        return read_pictures(ask, self._rules, self._kept, scope)

    def count(self, ask: messages.Validate) -> dict[str, int]:
        """See `count_tokens`."""
        return count_tokens(ask, self._rules)

    def encode(self, pictures: Mapping[str, Picture]) -> list[bytes]:
        """Return the digests of those for which a tower would have to run."""
        return [p.digest for p in pictures.values() if self._encoded.add("", p)]

    def results(
        self, pictures: Mapping[str, Picture], encode_ms: Mapping[bytes, float]
    ) -> tuple[messages.ImageResult, ...] | None:
        """See `image_results`."""
        return image_results(pictures, encode_ms)
