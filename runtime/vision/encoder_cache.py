"""Runs the vision tower once per image, and keeps its rows for later prompts."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from thor_dflash.core.errors import RequestError
from thor_dflash.core.model_dims import PATCH, VisionDims
from thor_dflash.core.tensors import Array
from thor_dflash.runtime.vision.picture import Picture
from thor_dflash.runtime.vision.prompt_images import ImageNumbers, PromptImages, place_images

BUDGET = 256 << 20
"""Default memory for rows, bytes: 80 images of 640 x 480 of the 27B."""


@dataclass(slots=True)
class EncoderTotals:
    """Counts since the session was opened."""

    images: int = 0
    """Images that prompts needed rows of."""
    hits: int = 0
    """Of them, those whose rows were kept."""


class EncoderCache:
    """The images of one session. `insert` is thread-safe, `read` is for the decoding thread."""

    def __init__(self, vision: VisionDims, sizes: Sequence[int]) -> None:
        self.vision = vision
        self._sizes = tuple(sorted(sizes))
        self.most_pixels = max(sizes) * PATCH**2
        """Most pixels of a resized image, for which there is a graph."""
        self.budget = BUDGET
        """Memory for rows, bytes."""
        self.totals = EncoderTotals()
        self._numbers = ImageNumbers()
        self._rows: OrderedDict[bytes, Array] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def insert(self, ids: Sequence[int], pictures: Sequence[Picture]) -> PromptImages | None:
        """A prompt, in which the template's marks of images are replaced by their tokens; None for
        a prompt without images.

        Raises:
            RequestError: there are other numbers of marks and images, the prompt ends with one, or
                no graph takes one.
        """
        token = self.vision.image_token
        if (found := list(ids).count(token)) != len(pictures):
            raise RequestError(
                f"images must be as many as the prompt has <|image_pad|>, {found} "
                f"(got {len(pictures)})"
            )
        if not pictures:
            return None
        # Resizing keeps narrow images a token wide, whatever the limit.
        if wide := [x for x in pictures if x.grid.patches * PATCH**2 > self.most_pixels]:
            height, width, _ = wide[0].pixels.shape
            rule = f"at most {self.most_pixels} pixels after resizing, build.image_patches"
            raise RequestError(f"images must have {rule} (got {width} x {height})")
        if ids[-1] == token:
            raise RequestError("a prompt must end with a text (got an image)")
        rest, prompt = iter(pictures), list[int]()
        for each in ids:
            prompt += self._numbers.ids(next(rest)) if each == token else (each,)
        return place_images(prompt, pictures, self._numbers)

    def pending(self, images: PromptImages | None, held: int) -> list[int]:
        """The patches of each graph that is to run for a prompt of which `held` tokens are read."""
        if images is None:
            return []
        needed = [images.pictures[number] for number in images.missing(images.prompt[held:])]
        with self._lock:
            return [self._graph(x) for x in needed if x.digest not in self._rows]

    def _graph(self, picture: Picture) -> int:
        return next(size for size in self._sizes if size >= picture.grid.patches)

    def read(self, images: PromptImages, number: int, run: Callable[[Picture], Array]) -> int:
        """Put the rows of one image into `images.encoded`: those kept, or what `run` makes. Returns
        the patches of the graph that ran, 0 if the rows were kept.
        """
        picture, began = images.pictures[number], time.perf_counter()
        with self._lock:
            rows = self._rows.get(picture.digest)
            if kept := rows is not None:
                self._rows.move_to_end(picture.digest)
        if rows is None:
            rows = run(picture)
            self._keep(picture.digest, rows)
        spent = 1e3 * (time.perf_counter() - began)
        images.encoded[number] = rows
        if not kept:
            images.encode_ms[number] = spent
        self.totals.images += 1
        self.totals.hits += kept
        return 0 if kept else self._graph(picture)

    def _keep(self, digest: bytes, rows: Array) -> None:
        with self._lock:
            self._rows[digest] = rows
            self._bytes += rows.nbytes
            while self._bytes > self.budget:
                self._bytes -= self._rows.popitem(last=False)[1].nbytes
