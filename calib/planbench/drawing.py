"""Draws a scene as a small picture: areas are frames with a number, objects are coloured letters.

A picture has 128 x 128 pixels, in 2 columns and 4 rows of 64 x 32, each with room for one area: a
frame with its number in the left, a lid above (ticks: open; hatched: closed; hatched with a lock:
locked), a lamp below the number if it is a device (filled: on; hollow: off), and in each half one
object, or two of which one stands on the other. Where an area is, the halves and the looks are
drawn at random. 32 x 32 pixels, one token of an image, never show more than one column.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from random import Random

import numpy as np
from numpy.typing import NDArray

from thor_dflash.calib.planbench.scene import Place, Scene

SIDE = 128
SLOTS = 8
"""Most areas of a picture."""
COLUMNS = 2
"""Most objects that stand side by side in an area."""
COLOURS = tuple("red blue green black white yellow pink gray".split())
"""Names that are tags of objects, too: `mug_red` is drawn red."""
SHAPES = tuple("TOCINA")
"""Letters: planner-nano's tokenizer would spell `circle` in four tokens."""
LIDS = ("none", "open", "closed", "locked")
POWERS = ("none", "off", "on")

GROUND, INSIDE, INK, LOCK, LIGHT, FIRST_COLOUR = range(6)
PALETTE = np.array(
    [
        [176, 196, 210], [226, 206, 170], [60, 48, 40], [200, 120, 0], [255, 236, 120],
        [214, 30, 30], [30, 70, 220], [20, 140, 50], [0, 0, 0], [255, 255, 255], [240, 200, 0],
        [250, 120, 190], [128, 128, 128],
    ],
    np.uint8,
)  # fmt: skip
"""[colours, 3] RGB of the indices of a picture: ground, inside, ink, lock, light, then COLOURS."""

GLYPH = 7
"""Side of an object, pixels."""
WIDTH, HEIGHT = 61, 29
"""Size of an area's frame; it moves by up to 2 pixels in its 64 x 32."""
SLOT = (SIDE * 2 // SLOTS, SIDE // 2)
"""Height and width of what an area may take."""
DIGITS = (0o75557, 0o26227, 0o71747, 0o71717, 0o55711, 0o74717, 0o74757, 0o71111, 0o75757)
"""Rows of 3 x 5 pixels of the digits 0 to 8, three bits each."""
ZOOM = 2
"""Pixels of a digit's dot."""
DIGIT_AT, LAMP_AT = (7, 3), (19, 3)
LAMP = 7
FLOOR_AT, TOP_AT = 21, 12
"""First rows of objects on an area and on another object, from the frame's corner."""
COLUMN_AT = ((12, 22), (33, 51))
"""First and last place of each column."""
LID_ROWS = slice(1, 5)


@dataclass(frozen=True, slots=True)
class Look:
    """How an object is drawn."""

    colour: str
    shape: str

    def __str__(self) -> str:
        return f"{self.shape}_{self.colour}"


@dataclass(frozen=True, slots=True)
class DrawnArea:
    """What a picture shows of one place."""

    slot: int
    """Where it is: row by row, two in a row."""
    number: int
    lid: str
    """One of LIDS."""
    power: str
    """One of POWERS."""
    columns: tuple[tuple[Look, ...], ...]
    """What stands in each column, from below; empty columns are ()."""


@dataclass(frozen=True)
class DrawnScene:
    """A scene's picture, and the names of what is in it."""

    pixels: NDArray[np.uint8]
    """[128, 128] indices of PALETTE."""
    areas: dict[str, DrawnArea]
    """By the names of the places, in the order of their numbers."""
    looks: dict[str, Look]
    """By the names of the objects."""

    @property
    def rgb(self) -> NDArray[np.uint8]:
        """[128, 128, 3]."""
        return PALETTE[self.pixels]


class Undrawable(Exception):
    """A scene has more than a picture can show."""


@cache
def glyph(shape: str) -> NDArray[np.bool_]:
    """The pixels of a shape, [7, 7]."""
    y, x = np.indices((GLYPH, GLYPH))
    left, right, middle, top = x < 2, x > 4, abs(x - 3) < 1.5, y < 2
    return {
        "T": top | middle,
        "O": top | (y > 4) | left | right,
        "C": top | (y > 4) | left,
        "I": middle,
        "N": left | right | (abs(x - y) < 1.5),
        "A": (y < 1) | left | right | (abs(y - 4) < 1.5),
    }[shape]


@cache
def digit(number: int) -> NDArray[np.bool_]:
    """The pixels of a digit, [10, 6]."""
    bits = [DIGITS[number] >> shift & 1 for shift in range(14, -1, -1)]
    dots = np.array(bits, bool).reshape(5, 3)
    return dots.repeat(ZOOM, 0).repeat(ZOOM, 1)


def hatch(rows: int, columns: int) -> NDArray[np.bool_]:
    """Diagonal lines."""
    y, x = np.indices((rows, columns))
    return (x + y) % 4 < 2


def draw_scene(scene: Scene, rng: Random, looks: dict[str, Look] | None = None) -> DrawnScene:
    """Draw a scene in which no robot holds an object, with looks of its own if none are given.

    Raises:
        Undrawable: it has too many places or objects, or stacks of more than two.
    """
    looks = looks or _looks([name for name, _ in scene.objects], rng)
    areas: dict[str, DrawnArea] = {}
    if len(scene.places) > SLOTS or any(robot.holding for robot in scene.robots):
        raise Undrawable(f"a scene must have at most {SLOTS} places and empty hands")
    slots = rng.sample(range(SLOTS), len(scene.places))
    for number, (place, slot) in enumerate(zip(scene.places, slots, strict=True), 1):
        lid, power = _state(scene, place)
        columns = _columns(scene, place.name, looks, rng)
        areas[place.name] = DrawnArea(slot, number, lid, power, columns)
    pixels = np.full((SIDE, SIDE), GROUND, np.uint8)
    for area in areas.values():
        _draw_area(pixels, area, rng)
    return DrawnScene(pixels, areas, looks)


def _looks(names: list[str], rng: Random) -> dict[str, Look]:
    """Draw a look for each object, all different; one named by a colour has it."""
    found: dict[str, Look] = {}
    for name in names:
        tag = name.rpartition("_")[2]
        colours = [tag] if tag in COLOURS else COLOURS
        used = {(look.colour, look.shape) for look in found.values()}
        free = [(c, s) for c in colours for s in SHAPES if (c, s) not in used]
        if not free:
            raise Undrawable(f"at most {len(SHAPES)} objects may be {tag}")
        found[name] = Look(*rng.choice(free))
    return found


def _state(scene: Scene, place: Place) -> tuple[str, str]:
    lid = "none"
    if place.openable:
        lid = "open" if place.name in scene.opened else "closed"
        lid = "locked" if place.name in scene.locked else lid
    return lid, ("on" if place.name in scene.on else "off") if place.device else "none"


def _columns(
    scene: Scene, place: str, looks: dict[str, Look], rng: Random
) -> tuple[tuple[Look, ...], ...]:
    below = [name for name, where in scene.objects if where == place]
    if len(below) > COLUMNS:
        raise Undrawable(f"at most {COLUMNS} objects may stand side by side (got {len(below)})")
    on = {where: name for name, where in scene.objects}
    columns: list[tuple[Look, ...]] = [()] * COLUMNS
    for column, name in zip(rng.sample(range(COLUMNS), len(below)), below, strict=True):
        top = on.get(name)
        if top is not None and top in on:
            raise Undrawable(f"a stack may have two objects (got one on {top})")
        columns[column] = (looks[name],) if top is None else (looks[name], looks[top])
    return tuple(columns)


def _draw_area(pixels: NDArray[np.uint8], area: DrawnArea, rng: Random) -> None:
    top = area.slot // 2 * SLOT[0] + rng.randint(0, 2)
    left = area.slot % 2 * SLOT[1] + rng.randint(0, 2)
    frame = pixels[top : top + HEIGHT, left : left + WIDTH]
    frame[...] = INK
    frame[1:-1, 1:-1] = INSIDE
    _stamp(frame, DIGIT_AT, digit(area.number), INK)
    if area.lid != "none":
        lid = frame[LID_ROWS, 1:-1]
        lines = hatch(*lid.shape)
        if area.lid == "open":
            lines[:, 8:-8] = False
        lid[lines] = INK
        if area.lid == "locked":
            lid[:, 24:-24] = LOCK
    if area.power != "none":
        y, x = LAMP_AT
        lamp = frame[y : y + LAMP, x : x + LAMP]
        lamp[...] = INK
        lamp[1:-1, 1:-1] = LIGHT if area.power == "on" else INSIDE
    for stack, where in zip(area.columns, COLUMN_AT, strict=True):
        x = rng.randint(*where)
        for look, y in zip(stack, (FLOOR_AT, TOP_AT), strict=False):
            colour = FIRST_COLOUR + COLOURS.index(look.colour)
            _stamp(frame, (y, x), glyph(look.shape), colour)


def _stamp(
    frame: NDArray[np.uint8], at: tuple[int, int], mask: NDArray[np.bool_], colour: int
) -> None:
    height, width = mask.shape
    frame[at[0] : at[0] + height, at[1] : at[1] + width][mask] = colour
