"""Pictures of scenes: what the text lacks can be read from them, and only from them."""

from __future__ import annotations

import hashlib
import re
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from thor_dflash.calib.planbench import judge
from thor_dflash.calib.planbench.drawing import (
    COLOURS,
    FIRST_COLOUR,
    HEIGHT,
    INK,
    LIGHT,
    LOCK,
    PALETTE,
    SHAPES,
    SLOTS,
    WIDTH,
    Undrawable,
    digit,
    draw_scene,
    glyph,
)
from thor_dflash.calib.planbench.families import Rejected
from thor_dflash.calib.planbench.pictured import (
    PICTURED_FAMILIES,
    SHOWN,
    PicturedTask,
    described,
    heldout_pictured,
    pictured_text,
    rearranged,
    sample_pictured,
    sample_scene,
    shown_picture,
)
from thor_dflash.calib.planbench.scene import Place, Robot, Scene
from thor_dflash.calib.planbench.words import noun_is_held_out, noun_of

TASKS = heldout_pictured(24)
Objects = dict[str, str]


def frames(pixels: NDArray[np.uint8]) -> list[NDArray[np.uint8]]:
    """Finds frames by their ink, wherever they are, and returns the inside of each."""
    found: list[NDArray[np.uint8]] = []
    ink = pixels == INK
    for y, x in np.argwhere(ink[: -HEIGHT + 1, : -WIDTH + 1]):
        part = ink[y : y + HEIGHT, x : x + WIDTH]
        if part[0].all() and part[-1].all() and part[:, 0].all() and part[:, -1].all():
            found.append(pixels[y + 1 : y + HEIGHT - 1, x + 1 : x + WIDTH - 1])
    return found


def matches(mask: NDArray[np.bool_], wanted: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Where a window of a mask is exactly these pixels: row and column."""
    windows = sliding_window_view(mask, wanted.shape)
    return [(int(y), int(x)) for y, x in np.argwhere((windows == wanted).all((2, 3)))]


class Reader:
    """Reads a picture with the help of a task's text, and of nothing else."""

    def __init__(self, pixels: NDArray[np.uint8], text: str) -> None:
        numbered = re.findall(r"(\d) (\w+)", re.findall("^Places: (.*)$", text, re.M)[0])
        self.places = {int(number): name for number, name in numbered}
        legend = re.findall(r'"(\w+)" (\w+)', re.findall("^Objects: (.*)$", text, re.M)[0])
        self.names = {look: name for name, look in legend}
        self.objects: Objects = {}
        self.lids: dict[str, str] = {}
        self.powers: dict[str, str] = {}
        for inside in frames(pixels):
            self._read(inside)

    def _read(self, inside: NDArray[np.uint8]) -> None:
        ink = inside == INK
        [number] = [n for n in range(1, SLOTS + 1) if matches(ink[5:18, :9], digit(n))]
        place = self.places[number]
        self._read_state(inside, place)
        seen: dict[int, list[tuple[int, str]]] = {}
        for c, colour in enumerate(COLOURS, FIRST_COLOUR):
            mask = inside[:, 10:] == c
            for shape in SHAPES if mask.any() else ():
                for y, x in matches(mask, glyph(shape)):
                    seen.setdefault(x, []).append((y, self.names[f"{shape}_{colour}"]))
        for stack in seen.values():
            under = place
            for _, name in sorted(stack, reverse=True):
                self.objects[name], under = under, name

    def _read_state(self, inside: NDArray[np.uint8], place: str) -> None:
        above, lamp = inside[:4], inside[18:, :10]
        if (above == LOCK).any():
            self.lids[place] = "locked"
        elif (above == INK).any():
            self.lids[place] = "closed" if (above[:, 20:-20] == INK).any() else "open"
        if (lamp == INK).any():
            self.powers[place] = "on" if (lamp == LIGHT).any() else "off"


def read(pictured: PicturedTask) -> Reader:
    return Reader(pictured.drawn.pixels, pictured.task.messages[1][1])


@pytest.mark.parametrize("pictured", TASKS, ids=lambda t: t.task.name)
def test_what_the_text_lacks_is_in_the_picture(pictured: PicturedTask) -> None:
    found, scene = read(pictured), pictured.task.scene
    assert found.objects == dict(scene.objects)
    lids = {p.name: "open" if p.name in scene.opened else "closed" for p in scene.places
            if p.openable}  # fmt: skip
    assert found.lids == lids | dict.fromkeys(scene.locked, "locked")
    devices = [p.name for p in scene.places if p.device]
    assert found.powers == {name: "on" if name in scene.on else "off" for name in devices}


def test_the_text_lacks_what_the_picture_shows() -> None:
    """Scenes that differ only in that have the same text."""
    for pictured in TASKS:
        scene, drawn = pictured.task.scene, pictured.drawn
        somewhere = tuple((name, scene.places[0].name) for name, _ in scene.objects)
        other = replace(scene, objects=somewhere, opened=(), on=(), locked=())
        text = pictured_text(other, drawn)
        assert pictured.task.messages[1][1].startswith(text + "\nRequest: ")


def test_a_tag_that_is_a_colour_is_the_colour() -> None:
    tagged = [
        (name.rpartition("_")[2], look) for t in TASKS for name, look in t.drawn.looks.items()
    ]
    colours = [(tag, look.colour) for tag, look in tagged if tag in COLOURS]
    assert colours
    assert all(tag == colour for tag, colour in colours)
    assert all(len(set(t.drawn.looks.values())) == len(t.drawn.looks) for t in TASKS)


def test_tasks_are_the_same_on_every_machine() -> None:
    again = [sample_pictured(t.task.family, i // 3, "heldout") for i, t in enumerate(TASKS)]
    digest = hashlib.sha256()
    for one, two in zip(TASKS, again, strict=True):
        assert one.task == two.task
        assert np.array_equal(one.drawn.pixels, two.drawn.pixels)
        digest.update(one.task.messages[1][1].encode() + one.drawn.pixels.tobytes())
    assert digest.hexdigest()[:16] == "6c6596c88ce59e59"


def test_canonical_plans_are_valid_and_held_out_nouns_are() -> None:
    seen = [sample_pictured(f, i, "train") for f in PICTURED_FAMILIES for i in range(8)]
    assert all(judge(t.task, t.task.plan).valid for t in (*TASKS, *seen))
    for tasks, held in ((TASKS, True), (seen, False)):
        nouns = {noun_of(name) for t in tasks for name in t.drawn.looks}
        assert {noun_is_held_out(noun) for noun in nouns} == {held}
    assert not {t.task.goal_key for t in TASKS} & {t.task.goal_key for t in seen}


def test_a_tabletop_task_needs_its_picture() -> None:
    """By names alone it could be planned, wherever things are: so a request says where, or there is
    a stack to be undone.
    """
    for i in range(20):
        task = sample_pictured("tabletop", i, "train").task
        moved = {goal.subject for goal in task.scene.goals}
        request = task.messages[1][1].partition("Request: ")[2]
        steps = re.findall('"skill":"pick","args":{"object":"(.*?)"', task.plan)
        assert "what is on" in request or set(steps) - moved


def test_descriptions_say_what_is_there() -> None:
    rng = Random(0)
    scenes = [sample_scene(rng) for _ in range(6)]
    assert sum(where in dict(s.objects) for s, _ in scenes for _, where in s.objects) > 3
    for scene, drawn in (*scenes, *((t.task.scene, t.drawn) for t in TASKS[:4])):
        found, seen = Reader(drawn.pixels, pictured_text(scene, drawn)), set[str]()
        numbers = {name: number for number, name in found.places.items()}
        above = {under: name for name, under in found.objects.items()}
        looks = {name: look for look, name in found.names.items()}
        for seed in range(4):
            text, answer = described(scene, drawn, Random(seed))
            seen.add(text.rpartition(" ")[2])
            if text.endswith("places."):
                for place in found.places.values():
                    lid, power = found.lids.get(place), found.powers.get(place)
                    states = ",".join(filter(None, (lid, power)))
                    state = f"({states})" if states else ""
                    assert f"{place}, area {numbers[place]}{state} " in answer
                continue
            for name, look in looks.items():
                where, top, stacked = found.objects[name], above.get(name), ""
                base = found.objects.get(where, where)
                if where in looks:
                    stacked = f' on the {looks[where]}, "{where}",'
                elif top is not None:
                    stacked = f' under the {looks[top]}, "{top}",'
                sentence = f'Object "{name}" is the {look}{stacked} in area {numbers[base]}, {base}'
                assert sentence in answer
        assert seen == {"places.", "objects."}


def test_a_scene_that_cannot_be_drawn_is_refused() -> None:
    place = Place("table")
    crowd = tuple((f"cup_{i}", "table") for i in range(6))
    tower = (("a", "table"), ("b", "a"), ("c", "b"))
    for objects in (crowd, tower, tuple((f"n{i}_red", "table") for i in range(7))):
        with pytest.raises(Undrawable):
            draw_scene(Scene((Robot("arm"),), (place,), objects, (), ()), Random(0))
    holding = Robot("arm", holding="a")
    with pytest.raises(Undrawable):
        draw_scene(Scene((holding,), (place,), (("a", "arm"),), (), ()), Random(0))


def test_what_is_shown_instead() -> None:
    own, other, grey, none = (shown_picture(TASKS, 2, shown) for shown in SHOWN)
    assert own is TASKS[2].drawn.pixels
    assert other is TASKS[5].drawn.pixels
    assert TASKS[5].task.family == TASKS[2].task.family
    assert grey is not None
    assert PALETTE[grey].min() == PALETTE[grey].max()
    assert none is None
    with pytest.raises(IndexError):
        shown_picture(TASKS[:3], 2, "another scene's")


def test_a_text_with_two_pictures_needs_two_plans() -> None:
    found: list[PicturedTask] = []
    for first in TASKS:
        if first.task.family == "infeasible":
            with pytest.raises(ValueError, match="can be met"):
                rearranged(first)
            continue
        try:
            second = rearranged(first)
        except Rejected:
            continue
        found.append(second)
        assert second.task.messages == first.task.messages
        assert read(second).objects == dict(second.task.scene.objects)
        assert judge(first.task, first.task.plan).valid
        assert judge(second.task, second.task.plan).valid
        assert not judge(second.task, first.task.plan).valid
    assert len(found) > 12
