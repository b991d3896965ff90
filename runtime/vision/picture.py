"""An image as the tower reads it: resized, cut into patches, with the places of these.

Patches are in merge order: 2 x 2 blocks row by row, and in each block row by row, so that the four
patches of a token are neighbours. Source: transformers models/qwen2_vl image_processing_qwen2_vl,
vision_utils.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from thor_dflash.core.model_dims import FRAMES, MERGE, MERGED, PATCH, PATCH_COLUMNS, TowerDims
from thor_dflash.core.tensors import Array

FACTOR = MERGE * PATCH
"""Pixels of a token's side; sides of a resized image are multiples of it."""


@dataclass(frozen=True, slots=True)
class PixelLimits:
    """Least and most pixels of a resized image."""

    shortest: int
    longest: int

    def under(self, most: int) -> PixelLimits:
        """With at most so many, or those of one token."""
        longest = max(min(self.longest, most), FACTOR * FACTOR)
        return PixelLimits(min(self.shortest, longest), longest)

    def resized(self, width: int, height: int) -> tuple[int, int]:
        """Width and height after resizing, about as wide for its height. Python's round, to even at
        a half, is part of the definition.
        """
        sides = [round(side / FACTOR) * FACTOR for side in (height, width)]
        if math.prod(sides) > self.longest:
            shrink = math.sqrt(height * width / self.longest)
            sides = [
                max(FACTOR, math.floor(side / shrink / FACTOR) * FACTOR) for side in (height, width)
            ]
        elif math.prod(sides) < self.shortest:
            grow = math.sqrt(self.shortest / (height * width))
            sides = [math.ceil(side * grow / FACTOR) * FACTOR for side in (height, width)]
        return sides[1], sides[0]


@dataclass(frozen=True, slots=True)
class PatchGrid:
    """Rows and columns of patches of an image."""

    rows: int
    columns: int

    @property
    def patches(self) -> int:
        """Patches of the image."""
        return self.rows * self.columns

    @property
    def tokens(self) -> int:
        """Prompt tokens of the image."""
        return self.patches // MERGED

    @property
    def merged(self) -> tuple[int, int]:
        """Rows and columns of tokens."""
        return self.rows // MERGE, self.columns // MERGE

    def places(self) -> NDArray[np.int32]:
        """int32 [2, P]: row and column of each patch, in merge order."""
        down, across = np.indices((self.rows, self.columns), np.int32)
        return np.stack([self._merge_order(axis) for axis in (down, across)])

    def taps(self, side: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """int32 and float32 [P, 4]: rows of a table of side x side positions, and their weights, by
        which each patch's position is interpolated. The corners of grid and table coincide.
        """
        row, column = self.places()
        low_r, high_r, part_r = _between(row, self.rows, side)
        low_c, high_c, part_c = _between(column, self.columns, side)
        rest_r, rest_c = np.float32(1) - part_r, np.float32(1) - part_c
        taps = [r * side + c for r in (low_r, high_r) for c in (low_c, high_c)]
        weights = [r * c for r in (rest_r, part_r) for c in (rest_c, part_c)]
        return np.stack(taps, axis=1).astype(np.int32), np.stack(weights, axis=1)

    def _merge_order(self, grid: Array) -> Array:
        rows, columns = self.merged
        blocks = grid.reshape(rows, MERGE, columns, MERGE, *grid.shape[2:])
        return blocks.swapaxes(1, 2).reshape(self.patches, *grid.shape[2:])

    def cut(self, pixels: Array) -> Array:
        """[height, width, 3] -> [P, 3, 16, 16], in merge order."""
        cells = pixels.reshape(self.rows, PATCH, self.columns, PATCH, 3)
        return self._merge_order(cells.transpose(0, 2, 4, 1, 3))


def _between(at: NDArray[np.int32], size: int, side: int) -> tuple[Array, Array, Array]:
    """The two table rows around each place, and its distance from the first; in float32."""
    source = at.astype(np.float32) * np.float32(side - 1) / np.float32(max(size - 1, 1))
    low = np.floor(source).astype(np.int64)
    return low, np.minimum(low + 1, side - 1), (source - low).astype(np.float32)


@dataclass(frozen=True, eq=False)
class Picture:
    """The resized pixels of an image, uint8 [height, width, 3]; sides are multiples of 32."""

    pixels: NDArray[np.uint8]

    @cached_property
    def digest(self) -> bytes:
        """Its identity: SHA-256 over size and pixels, so that the same frame in another file format
        is the same picture.
        """
        height, width, _ = self.pixels.shape
        head = b"tdp.image.1" + height.to_bytes(4, "little") + width.to_bytes(4, "little")
        return hashlib.sha256(head + self.pixels.tobytes()).digest()

    @property
    def grid(self) -> PatchGrid:
        """Its patches."""
        height, width, _ = self.pixels.shape
        return PatchGrid(height // PATCH, width // PATCH)

    def patches(self) -> NDArray[np.float32]:
        """float32 [P, 1536]: channel, frame, row and column of each patch; the one frame twice."""
        grid = self.grid
        cells = _VALUES[grid.cut(self.pixels)]
        twice = np.repeat(cells[:, :, None], FRAMES, axis=2)
        return twice.reshape(grid.patches, PATCH_COLUMNS)


_BYTES = np.arange(256, dtype=np.uint8).astype(np.float32)
_VALUES = (_BYTES / np.float32(255) - np.float32(0.5)) / np.float32(0.5)
"""The number of each byte of a pixel."""


def encoder_inputs(picture: Picture, tower: TowerDims, patches: int) -> dict[str, Array]:
    """The inputs of the vision graph for `patches`, float32 and int32; past the picture's own they
    are zeros.
    """
    grid = picture.grid
    row, column = grid.places()
    taps, weights = grid.taps(tower.positions)
    given: dict[str, Array] = {
        "patches": picture.patches(),
        "row": row,
        "column": column,
        "taps": taps,
        "tap_weights": weights,
    }
    padded = {
        name: np.concatenate([x, np.zeros((patches - len(x), *x.shape[1:]), x.dtype)])
        for name, x in given.items()
    }
    return padded | {"count": np.array([grid.patches], np.int32)}
