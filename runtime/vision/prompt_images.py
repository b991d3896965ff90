"""The images of one prompt: which rows each token takes, and by which positions rows turn.

In a prompt, a token of an image is a negative id that names the image and the row. Images are
numbered by their pixels, and no number is ever used for two: equal ids mean equal rows, so that
whatever compares prompts or hashes them needs to know nothing of images.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from thor_dflash.core.tensors import Array
from thor_dflash.runtime.vision.picture import Picture

ROW_BITS = 16
"""Bits of an id for the row; an image has fewer rows."""
NUMBERED = 1 << 16
"""Images whose numbers are remembered. One that was forgotten gets a new number: nothing is reused
then, and nothing is confused."""


class ImageNumbers:
    """The number of each image, by its digest. Thread-safe."""

    def __init__(self) -> None:
        self._numbers: OrderedDict[bytes, int] = OrderedDict()
        self._next = 0
        self._lock = threading.Lock()

    def of(self, picture: Picture) -> int:
        """The number of these pixels."""
        with self._lock:
            if picture.digest not in self._numbers:
                self._numbers[picture.digest] = self._next
                self._next += 1
                if len(self._numbers) > NUMBERED:
                    self._numbers.popitem(last=False)
            self._numbers.move_to_end(picture.digest)
            return self._numbers[picture.digest]

    def ids(self, picture: Picture) -> range:
        """The ids of the image's tokens."""
        first = -1 - (self.of(picture) << ROW_BITS)
        return range(first, first - picture.grid.tokens, -1)


@dataclass(frozen=True, slots=True)
class PromptImages:
    """A prompt with images, and the positions of its tokens."""

    prompt: tuple[int, ...]
    """Negative ids are rows of images."""
    pictures: Mapping[int, Picture]
    """By their numbers."""
    positions: NDArray[np.int32]
    """[tokens, 3]: time, height, width."""
    shift: int
    """Position minus index of every token behind the prompt; never positive."""
    encoded: dict[int, Array] = field(default_factory=dict[int, Array])
    """Rows of each image, once they are there."""
    encode_ms: dict[int, float] = field(default_factory=dict[int, float])
    """Time that the tower took, for images whose rows were not kept."""

    def missing(self, ids: Sequence[int]) -> list[int]:
        """The numbers of images of which these tokens take rows that are not there yet."""
        numbers = dict.fromkeys(-1 - i >> ROW_BITS for i in ids if i < 0)
        return [number for number in numbers if number not in self.encoded]


def place_images(
    ids: Sequence[int], pictures: Sequence[Picture], numbers: ImageNumbers
) -> PromptImages:
    """Give positions to a prompt in which `pictures` have their ids. Source: transformers
    models/qwen3_5 get_rope_index.
    """
    known = {numbers.of(picture): picture for picture in pictures}
    given = np.array(ids, np.int64)
    positions = np.repeat(np.arange(len(ids), dtype=np.int32)[:, None], 3, axis=1)
    ends, shift = 0, 0
    while (found := np.flatnonzero(given[ends:] < 0)).size:
        start = ends + int(found[0])
        grid = known[-1 - ids[start] >> ROW_BITS].grid
        rows, columns = grid.merged
        ends, at = start + grid.tokens, start + shift
        down, across = np.indices((rows, columns)).reshape(2, -1)
        positions[start:ends] = np.stack([np.zeros_like(down), down, across], axis=1) + at
        shift += max(rows, columns) - grid.tokens
        positions[ends:] = np.arange(ends, len(ids))[:, None] + shift
    return PromptImages(tuple(ids), known, positions, shift)


def local_rows(ids: Sequence[int], rows: Mapping[int, Array]) -> tuple[list[int], Array | None]:
    """For one prefill step: its ids, in which -1 - k takes row k, and these rows; None if the step
    has no image. `rows`: those of each image, by number.
    """
    taken = [-1 - i for i in ids if i < 0]
    if not taken:
        return list(ids), None
    mask = (1 << ROW_BITS) - 1
    image = np.stack([rows[at >> ROW_BITS][at & mask] for at in taken])
    behind = iter(range(len(taken)))
    return [-1 - next(behind) if i < 0 else i for i in ids], image
