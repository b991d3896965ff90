"""The fixed names of the corpus: places, rooms, devices and arms. They are shared by training
and held-out tasks.
"""

from __future__ import annotations

TRAYS = tuple("tray bin box rack mat basket crate plate".split())
SUFFIXES = ("", "_a", "_b", "_c")
ROOMS = tuple("kitchen office lab storage workshop lobby bedroom garage".split())
SURFACES = tuple(
    "desk shelf bench counter cart stand sink sofa island ledge dresser table locker podium".split()
)
CONTAINERS = tuple("fridge cabinet drawer cupboard dishwasher chest".split())
OVENS = tuple("microwave oven washer dryer".split())
SWITCHES = tuple("lamp fan heater kettle radio".split())
ARM_PAIRS = (("left", "right"), ("ada", "bob"), ("north", "south"), ("one", "two"))

RESERVED = frozenset(
    [
        *TRAYS,
        *ROOMS,
        *SURFACES,
        *CONTAINERS,
        *OVENS,
        *SWITCHES,
        *(name for pair in ARM_PAIRS for name in pair),
        *"table dock hall robot arm door hand goal steps object scene place".split(),
        *"pick goto open close turn handover under".split(),
    ]
)
"""Words that are not used as object names."""
