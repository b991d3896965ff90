"""Random initial scenes with goals: a table, several rooms, a household, two arms."""

from __future__ import annotations

from random import Random

from thor_dflash.calib.planbench.places import (
    ARM_PAIRS,
    CONTAINERS,
    OVENS,
    ROOMS,
    SUFFIXES,
    SURFACES,
    SWITCHES,
    TRAYS,
)
from thor_dflash.calib.planbench.scene import HALL, Goal, Place, Robot, Scene, door_of
from thor_dflash.calib.planbench.words import draw_objects


def tabletop(rng: Random, held: bool) -> Scene:
    """One fixed arm, trays and bins; sometimes one object stands on another."""
    places = _tray_places(rng, rng.randint(3, 5))
    names = draw_objects(rng, rng.randint(3, 6), held)
    where = {name: rng.choice(places).name for name in names}
    if len(names) > 3 and rng.random() < 0.4:
        top, below = rng.sample(names, 2)
        where[top] = below
    goals = _moves(rng, where, [p.name for p in places], rng.randint(1, 3))
    if rng.random() < 0.25:
        mover = goals[-1].subject
        target = rng.choice([n for n in names if n != mover])
        if where[mover] != target and where[target] != mover and not _covered(where, goals, target):
            goals = (*goals[:-1], Goal("at", mover, target))
    return Scene((Robot("arm"),), places, _shuffled(rng, where), ("pick", "place"), goals)


def mobile(rng: Random, held: bool) -> Scene:
    """One mobile robot, rooms around a hall, doors that may be closed."""
    rooms = tuple(rng.sample(ROOMS, rng.randint(2, 3)))
    surfaces = rng.sample(SURFACES, 6)
    places = [Place("dock", HALL)]
    for room in rooms:
        places += [Place(surfaces.pop(), room) for _ in range(rng.randint(1, 2))]
    spots = [p.name for p in places if p.name != "dock"]
    opened = tuple(door_of(room) for room in rooms if rng.random() < 0.5)
    names = draw_objects(rng, rng.randint(2, 5), held)
    where = {name: rng.choice(spots) for name in names}
    goals = _moves(rng, where, [p.name for p in places], rng.randint(1, 2))
    robot = Robot("robot", place=rng.choice(["dock", "dock", *spots]))
    skills = ("goto", "pick", "place", "open")
    return Scene(
        (robot,), tuple(places), _shuffled(rng, where), skills, goals, doors=rooms, opened=opened
    )


def household(rng: Random, held: bool) -> Scene:
    """One mobile robot in one room with containers that open and devices that run."""
    places = [Place(name) for name in rng.sample(SURFACES, 2)]
    places += [Place(name, openable=True) for name in rng.sample(CONTAINERS, rng.randint(1, 2))]
    places += [Place(name, openable=True, device=True) for name in rng.sample(OVENS, 1)]
    places += [Place(name, device=True) for name in rng.sample(SWITCHES, 1)]
    rng.shuffle(places)
    spots = [p.name for p in places if p.openable or not p.device]
    lids = [p.name for p in places if p.openable]
    opened = tuple(name for name in lids if rng.random() < 0.3)
    running = tuple(
        p.name for p in places if p.device and p.name not in opened and rng.random() < 0.25
    )
    names = draw_objects(rng, rng.randint(2, 5), held)
    where = {name: rng.choice(spots) for name in names}
    goals = list(_moves(rng, where, spots, rng.randint(1, 2)))
    if rng.random() < 0.5:
        goals = goals[:1] + _second(rng, places, goals[0], where)
    robot = Robot("robot", place=rng.choice(spots))
    skills = ("goto", "pick", "place", "open", "close", "turn_on", "turn_off")
    locked = tuple(
        n
        for n in lids
        if rng.random() < 0.15 and n not in _needed(goals, where) and n not in opened
    )
    return Scene(
        (robot,),
        tuple(places),
        _shuffled(rng, where),
        skills,
        tuple(goals),
        opened=opened,
        on=running,
        locked=locked,
    )


def pair(rng: Random, held: bool) -> Scene:
    """Two fixed arms with different reach, which hand objects over to each other."""
    places = _tray_places(rng, rng.randint(4, 5))
    names = [p.name for p in places if p.name != "table"]
    split = rng.randint(2, len(names) - 1) if len(names) > 2 else 1
    first, second = rng.choice(ARM_PAIRS)
    arms = (Robot(first, reach=tuple(names[:split])), Robot(second, reach=tuple(names[split:])))
    where = {name: rng.choice(names) for name in draw_objects(rng, rng.randint(3, 5), held)}
    goals = _moves(rng, where, names, rng.randint(1, 3))
    kept = tuple(p for p in places if p.name in names)
    return Scene(arms, kept, _shuffled(rng, where), ("pick", "place", "handover"), goals)


def _tray_places(rng: Random, count: int) -> tuple[Place, ...]:
    drawn: list[str] = ["table"]
    while len(drawn) < count:
        name = rng.choice(TRAYS) + rng.choice(SUFFIXES)
        if name not in drawn:
            drawn.append(name)
    return tuple(Place(name) for name in drawn)


def _moves(rng: Random, where: dict[str, str], spots: list[str], count: int) -> tuple[Goal, ...]:
    """Draw goals that each move a different object to another place."""
    chosen = rng.sample(sorted(where), min(count, len(where)))
    return tuple(Goal("at", o, rng.choice([s for s in spots if s != where[o]])) for o in chosen)


def _second(rng: Random, places: list[Place], move: Goal, where: dict[str, str]) -> list[Goal]:
    """Draw a second household goal that is not a move, more often one related to the first."""
    lids = [p.name for p in places if p.openable]
    related = [n for n in (where[move.subject], move.where) if n in lids]
    device = rng.choice([p.name for p in places if p.device])
    options = [Goal("on", device), Goal("off", device), Goal("closed", rng.choice(lids))]
    options += [Goal("closed", n) for n in related] * 2
    options += [Goal("on", p.name) for p in places if p.device and p.name == move.where] * 3
    return [rng.choice(options)]


def _needed(goals: list[Goal], where: dict[str, str]) -> set[str]:
    return {w for g in goals for w in (g.subject, g.where, where.get(g.subject, ""))}


def _covered(where: dict[str, str], goals: tuple[Goal, ...], target: str) -> bool:
    """Whether stacking on a target would conflict with another goal or object."""
    return target in where.values() or any(g.subject == target for g in goals)


def _shuffled(rng: Random, where: dict[str, str]) -> tuple[tuple[str, str], ...]:
    pairs = list(where.items())
    rng.shuffle(pairs)
    return tuple(pairs)
