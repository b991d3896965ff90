"""What an image in a prompt costs: reading it, the vision tower, the time to the first tokens."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass

import numpy as np

from thor_dflash.core.errors import ConfigError, RequestError
from thor_dflash.core.model_dims import PATCH, PATCH_COLUMNS, TowerDims
from thor_dflash.core.progress import Progress
from thor_dflash.package.manifest import encoder_name
from thor_dflash.runtime.decoding.mtp import own_drafter
from thor_dflash.runtime.measure.bench_report import Figure
from thor_dflash.runtime.session import Request, Session
from thor_dflash.runtime.session.turn_cache import Conversation
from thor_dflash.runtime.vision.decoder import RawSize, read_picture
from thor_dflash.runtime.vision.picture import PatchGrid, Picture, PixelLimits

ROUNDS = 7
TEXT = 64
"""Tokens before an image, behind it, and of the next turn."""
ANSWER = 16
"""Tokens of each answer."""
REUSE = 4 << 30
"""Memory for the states of earlier turns, bytes."""
THOR_TFLOPS = 55.0
"""Implied by the predicted prefill of 2,048 tokens in 1.8 s: see docs/performance/prefill.md."""


@dataclass(frozen=True, slots=True)
class ImageTimes:
    """Milliseconds; medians."""

    read: float
    """Resizing raw pixels, and their digest."""
    tower: float
    cold: float
    """To the first tokens of a prompt with a picture that was never sent."""
    cached: float
    """With the same picture behind another text: the tower does not run."""
    reused: float
    """Of the next turn, whose picture is read already."""


@dataclass(frozen=True, slots=True)
class ImageBench:
    """What one size of a camera costs."""

    grid: PatchGrid
    tflop: float
    """Work of the tower."""
    times: ImageTimes


def flop(grid: PatchGrid, dims: TowerDims, out: int) -> float:
    """Floating-point operations of a tower for one image; `out`: columns of its rows."""
    c, p = dims.hidden, grid.patches
    block = 2 * p * (4 * c * c + 2 * c * dims.intermediate) + 4 * p * p * c
    merger = 2 * grid.tokens * (16 * c * c + 4 * c * out)
    return dims.depth * block + merger + 2 * p * PATCH_COLUMNS * c


class _Inputs:
    """Frames and texts of one session, never one twice."""

    def __init__(self, session: Session, size: tuple[int, int]) -> None:
        manifest = session.manifest
        if manifest.vision is None:
            raise ConfigError("--image must go with a package that has a vision tower (got none)")
        most = max(manifest.image_patches) * PATCH**2
        self._limits = PixelLimits(manifest.vision.shortest, manifest.vision.longest).under(most)
        self._vocab, self._size = manifest.vocab_limit, size
        self._mark, self._rng = manifest.vision.image_token, np.random.default_rng(0)

    def picture(self) -> tuple[Picture, float]:
        """A new picture, and the milliseconds to read it."""
        width, height = self._size
        pixels = self._rng.integers(0, 256, (height, width, 3), dtype=np.uint8).tobytes()
        start = time.perf_counter()
        found = read_picture(pixels, "rgb8", self._limits, RawSize(width=width, height=height))
        assert found.digest
        return found, 1e3 * (time.perf_counter() - start)

    def text(self) -> list[int]:
        """New tokens, none of which stands for an image."""
        ids = self._rng.integers(1, self._vocab, TEXT)
        return [int(i) if i != self._mark else 0 for i in ids]

    def prompt(self) -> list[int]:
        """A text, the mark of an image, a text."""
        return [*self.text(), self._mark, *self.text()]


def measure_image(session: Session, size: tuple[int, int], rounds: int = ROUNDS) -> ImageBench:
    """Measure a camera of width and height `size` on a session that keeps states of turns.

    Raises:
        ConfigError: the package sees no images, or none of this size.
    """
    inputs, found = _Inputs(session, size), list[tuple[float, ...]]()
    assert session.manifest.vision is not None
    try:
        picture, _ = inputs.picture()
        for _ in range(rounds + 1):
            picture, read = inputs.picture()
            tower = _tower_ms(session, inputs.picture()[0])
            cold, _ = _first_token_ms(session, inputs.prompt(), picture)
            ids = inputs.prompt()
            cached, answer = _first_token_ms(session, ids, picture)
            reused, _ = _first_token_ms(session, [*ids, *answer, *inputs.text()], picture)
            found.append((read, tower, cold, cached, reused))
    except RequestError as e:
        raise ConfigError(f"--image: {e}") from e
    times = ImageTimes(*(statistics.median(column) for column in zip(*found[1:], strict=True)))
    work = flop(picture.grid, session.manifest.vision.tower, session.manifest.target.hidden)
    return ImageBench(picture.grid, work / 1e12, times)


def _tower_ms(session: Session, picture: Picture) -> float:
    """Time of the tower's graph."""
    model = session.model
    name = encoder_name(next(s for s in model.manifest.image_patches if s >= picture.grid.patches))
    before = model.engine.busy().get(name, 0.0)
    model.encode(picture)
    return 1e3 * (model.engine.busy()[name] - before)


def _first_token_ms(session: Session, ids: list[int], picture: Picture) -> tuple[float, list[int]]:
    """Time to the first tokens, and the tokens."""
    start = time.perf_counter()
    images = session.images(ids, [picture])
    assert images is not None
    ends = Conversation(boundaries=((len(images.prompt), "prompt"),))
    request = Request(prompt=images.prompt, images=images, max_tokens=ANSWER, conversation=ends)
    proposer = own_drafter(session.manifest)
    spent, answer = 0.0, list[int]()
    for chunk in session.run(request, proposer):
        answer += chunk.tokens
        spent = spent or bool(answer) * 1e3 * (time.perf_counter() - start)
    return spent, answer


def image_figures(
    session: Session, sizes: Sequence[tuple[int, int]], progress: Progress, *, predict: bool
) -> Iterator[Figure]:
    """The figures of cameras of these widths and heights; with `predict` also those of a Thor."""
    predicted = list[Figure]()
    for width, height in sizes:
        name = f"{width}x{height}"
        with progress.task(f"measuring images of {name}"):
            found = measure_image(session, (width, height))
        section = f"an image of {name}, {found.grid.tokens} tokens"
        ms, tflop = found.times, found.tflop
        notes = (
            "raw pixels: resizing and digest",
            f"{tflop:.3g} TFLOP, {1e3 * tflop / ms.tower:.3g} TFLOP/s",
            f"{TEXT} tokens, the image, {TEXT} tokens",
            "the same picture behind another text",
            "the next turn of the conversation",
        )
        rows = ("reading", "tower", "first token, cold", "picture cached", "turn reused")
        for row, value, note in zip(rows, astuple(ms), notes, strict=True):
            yield Figure(section, row, value, "ms", note)
        thor, note = 1e3 * tflop / THOR_TFLOPS, f"at {THOR_TFLOPS:g} TFLOP/s"
        predicted.append(Figure("predicted on a Jetson Thor", f"tower, {name}", thor, "ms", note))
    yield from predicted if predict else ()
