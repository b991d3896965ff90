"""The STRIPS-like executor: runs steps on a scene and tells which precondition fails.

Preconditions
    goto(place)         mobile robot; every door on the way (own room, target room) is open
    pick(object)        hand empty, object reachable, nothing on it, its container open
    place(object, on)   object in this hand; target reachable, open, not full; if the target is an
                        object, nothing on it
    open/close(target)  target reachable, not locked, not already in that state; a running device
                        cannot be opened
    turn_on/turn_off    device reachable, not already in that state; turn_on: closed if it has a lid
    handover(object,to) object in this hand, the other hand empty
"""

from __future__ import annotations

from dataclasses import dataclass

from thor_dflash.calib.planbench.scene import HALL, Goal, Place, Robot, Scene, door_of


@dataclass(frozen=True)
class PlanStep:
    """One step of a plan: a skill and its arguments, all strings."""

    skill: str
    args: dict[str, str]


class World:
    """The mutable state of one scene while a plan runs. ``apply`` changes it only when the step
    is allowed.
    """

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.robots: dict[str, Robot] = {r.name: r for r in scene.robots}
        self.places: dict[str, Place] = {p.name: p for p in scene.places}
        self.doors: dict[str, str] = {door_of(room): room for room in scene.doors}
        self.where: dict[str, str] = dict(scene.objects)
        self.standing: dict[str, str] = {
            r.name: r.place for r in scene.robots if r.place is not None
        }
        self.holding: dict[str, str] = {
            r.name: r.holding for r in scene.robots if r.holding is not None
        }
        self.opened = set(scene.opened)
        self.on = set(scene.on)

    def apply(self, step: PlanStep) -> str | None:
        """Run one step. Returns None, or the reason why it is impossible; then nothing changes."""
        if step.skill not in self.scene.skills:
            return f"skill must be one of {', '.join(self.scene.skills)} (got {step.skill})"
        name = step.args["robot"] if "robot" in step.args else self.scene.robots[0].name
        if name not in self.robots:
            return f"robot must be in the scene (got {name})"
        act = {
            "goto": self._goto,
            "pick": self._pick,
            "place": self._place,
            "open": self._open,
            "close": self._close,
            "turn_on": self._turn_on,
            "turn_off": self._turn_off,
            "handover": self._handover,
        }[step.skill]
        return act(self.robots[name], step.args)

    def holds(self, goal: Goal) -> bool:
        """Whether one wanted fact is true now."""
        if goal.kind == "at":
            return self.where.get(goal.subject) == goal.where
        if goal.kind in ("open", "closed"):
            return (goal.subject in self.opened) == (goal.kind == "open")
        return (goal.subject in self.on) == (goal.kind == "on")

    def base(self, thing: str) -> str:
        """The place or robot at the bottom of a stack of objects; a place is its own base."""
        while thing in self.where:
            thing = self.where[thing]
        return thing

    def room(self, robot: str) -> str:
        """The room a mobile robot is in; the hall for a fixed arm."""
        return self.places[self.standing[robot]].room if robot in self.standing else HALL

    def blocked_door(self, robot: str, room: str) -> str | None:
        """The first closed door between a robot and a room, or None when the way is free."""
        here = self.room(robot)
        if here == room:
            return None
        for passed in (here, room):
            if passed in self.scene.doors and door_of(passed) not in self.opened:
                return door_of(passed)
        return None

    def on_top(self, thing: str) -> str | None:
        """The object that stands directly on an object, if any."""
        return next((o for o, w in self.where.items() if w == thing), None)

    def _reachable(self, robot: Robot, place: str) -> str | None:
        if place not in self.places:
            return f"{place} must be put down before another robot can take it"
        if robot.name in self.standing:
            here = self.standing[robot.name]
            return None if here == place else f"{robot.name} must be at {place} (got {here})"
        if robot.reach and place not in robot.reach:
            return f"{place} must be within reach of {robot.name}"
        return None

    def _shut(self, place: str) -> bool:
        return self.places[place].openable and place not in self.opened

    def _goto(self, robot: Robot, args: dict[str, str]) -> str | None:
        place = args["place"]
        if robot.name not in self.standing:
            return f"goto needs a mobile robot (got {robot.name})"
        if place not in self.places:
            return f"place must be in the scene (got {place})"
        door = self.blocked_door(robot.name, self.places[place].room)
        if door is not None:
            return f"{door} must be open before going to {place}"
        self.standing[robot.name] = place
        return None

    def _pick(self, robot: Robot, args: dict[str, str]) -> str | None:
        thing = args["object"]
        if thing not in self.where:
            return f"object must be in the scene (got {thing})"
        if robot.name in self.holding:
            return f"hand of {robot.name} must be empty (holds {self.holding[robot.name]})"
        base = self.base(thing)
        reason = self._reachable(robot, base)
        if reason is not None:
            return reason
        if self._shut(base):
            return f"{base} must be open before picking {thing}"
        top = self.on_top(thing)
        if top is not None:
            return f"{thing} must be clear (has {top} on it)"
        self.where[thing] = robot.name
        self.holding[robot.name] = thing
        return None

    def _place(self, robot: Robot, args: dict[str, str]) -> str | None:
        thing, target = args["object"], args["on"]
        if self.holding.get(robot.name) != thing:
            return f"{robot.name} must hold {thing} (holds {self.holding.get(robot.name)})"
        if target not in self.places and target not in self.where:
            return f"on must be a place or object in the scene (got {target})"
        base = self.base(target)
        reason = self._reachable(robot, base)
        if reason is not None:
            return reason
        if self._shut(base):
            return f"{base} must be open before placing {thing}"
        if target in self.scene.full:
            return f"{target} must have room (is full)"
        if target in self.where and self.on_top(target) is not None:
            return f"{target} must be clear (has {self.on_top(target)} on it)"
        self.where[thing] = target
        del self.holding[robot.name]
        return None

    def _lid(self, robot: Robot, target: str, wanted_open: bool) -> str | None:
        if target in self.doors:
            here, room = self.room(robot.name), self.doors[target]
            own = door_of(here)
            if here != room and here in self.scene.doors and own not in self.opened:
                return f"{own} must be open before reaching {target}"
        elif target in self.places and self.places[target].openable:
            reason = self._reachable(robot, target)
            if reason is not None:
                return reason
        else:
            return f"target must be a door or a container (got {target})"
        if target in self.scene.locked:
            return f"{target} must be unlocked"
        if (target in self.opened) == wanted_open:
            return f"{target} must be {'closed' if wanted_open else 'open'} before this step"
        return None

    def _open(self, robot: Robot, args: dict[str, str]) -> str | None:
        target = args["target"]
        reason = self._lid(robot, target, wanted_open=True)
        if reason is not None:
            return reason
        if target in self.on:
            return f"{target} must be off before opening"
        self.opened.add(target)
        return None

    def _close(self, robot: Robot, args: dict[str, str]) -> str | None:
        reason = self._lid(robot, args["target"], wanted_open=False)
        if reason is None:
            self.opened.remove(args["target"])
        return reason

    def _switch(self, robot: Robot, device: str, wanted_on: bool) -> str | None:
        if device not in self.places or not self.places[device].device:
            return f"device must be a device in the scene (got {device})"
        reason = self._reachable(robot, device)
        if reason is not None:
            return reason
        if (device in self.on) == wanted_on:
            return f"{device} must be {'off' if wanted_on else 'on'} before this step"
        if wanted_on and device in self.opened:
            return f"{device} must be closed before turning on"
        return None

    def _turn_on(self, robot: Robot, args: dict[str, str]) -> str | None:
        reason = self._switch(robot, args["device"], wanted_on=True)
        if reason is None:
            self.on.add(args["device"])
        return reason

    def _turn_off(self, robot: Robot, args: dict[str, str]) -> str | None:
        reason = self._switch(robot, args["device"], wanted_on=False)
        if reason is None:
            self.on.remove(args["device"])
        return reason

    def _handover(self, robot: Robot, args: dict[str, str]) -> str | None:
        thing, other = args["object"], args["to"]
        if self.holding.get(robot.name) != thing:
            return f"{robot.name} must hold {thing} (holds {self.holding.get(robot.name)})"
        if other not in self.robots or other == robot.name:
            return f"to must be another robot in the scene (got {other})"
        if other in self.holding:
            return f"hand of {other} must be empty (holds {self.holding[other]})"
        del self.holding[robot.name]
        self.holding[other] = thing
        self.where[thing] = other
        return None
