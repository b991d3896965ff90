"""Wordings of requests and short thinking texts. The training and held-out splits share no request
wording; thinking varies freely.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from thor_dflash.calib.planbench.scene import Goal
from thor_dflash.calib.planbench.words import held_out

OPENINGS = (
    "",
    "Please ",
    "Robot, ",
    "Could you ",
    "I need you to ",
    "Next, ",
    "Now ",
    "Kindly ",
    "Task: ",
    "Go and ",
)
MOVES = (
    ("put", "on"),
    ("move", "to"),
    ("bring", "to"),
    ("place", "on"),
    ("set", "on"),
    ("transfer", "to"),
    ("take", "to"),
    ("carry", "over to"),
    ("get", "onto"),
    ("deliver", "to"),
)
JOINERS = (" and ", ", then ", ", and also ", ", after that ", "; ", " and then ")
CLOSINGS = (
    ".",
    " please.",
    ", thanks.",
    " right away.",
    " when you can.",
    " for me.",
    ", that is all.",
)
OTHER_KINDS = {
    "open": ("open", "leave open"),
    "closed": ("close", "shut"),
    "on": ("turn on", "switch on"),
    "off": ("turn off", "switch off"),
}


@dataclass(frozen=True)
class Wording:
    """One wording of a request: everything except the names."""

    opening: str
    verb: str
    link: str
    joiner: str
    closing: str
    other: int
    """Which of the two verbs is used for goals that are not moves."""

    def render(self, goals: tuple[Goal, ...], objects: frozenset[str]) -> str:
        """The request text for goals; names in ``objects`` are quoted."""
        text = (
            self.opening
            + self.joiner.join(self._clause(goal, objects) for goal in goals)
            + self.closing
        )
        return text[0].upper() + text[1:]

    def template(self, goals: tuple[Goal, ...]) -> str:
        """The request with every name replaced, the text on which the split is made."""
        return self.render(tuple(Goal(goal.kind, "X", "Y") for goal in goals), frozenset())

    def _clause(self, goal: Goal, objects: frozenset[str]) -> str:
        subject = say(goal.subject, objects)
        if goal.kind == "at":
            return f"{self.verb} {subject} {self.link} {say(goal.where, objects)}"
        return f"{OTHER_KINDS[goal.kind][self.other]} {subject}"


def say(name: str, objects: frozenset[str]) -> str:
    """Return a name as written in text: objects in quotes, places bare.

    With a space and a quote before it, an object's name has the same tokens here, in the scene
    lines and in the plan.
    """
    return f'"{name}"' if name in objects else name


def draw_wording(rng: Random, goals: tuple[Goal, ...], held: bool) -> Wording:
    """Draw a wording whose template for these goals is on the given side of the split; one template
    in six is held out.
    """
    while True:
        verb, link = rng.choice(MOVES)
        wording = Wording(
            rng.choice(OPENINGS),
            verb,
            link,
            rng.choice(JOINERS),
            rng.choice(CLOSINGS),
            rng.randrange(2),
        )
        if held_out(wording.template(goals), 6) == held:
            return wording


THOUGHTS: dict[str, tuple[str, ...]] = {
    "start": (
        "Let me work this out.",
        "I will plan this step by step.",
        "First I look at the scene.",
        "Goals to reach: {n}.",
        "Count of goals: {n}, one after the other.",
    ),
    "at": (
        'Object "{o}" is on {p} and has to get to {t}.',
        'I see "{o}" on {p}, it should go to {t}.',
        'Take "{o}" from {p} to {t}.',
        'The item "{o}" sits on {p}; target {t}.',
    ),
    "held": (
        'I already hold "{o}", it goes to {t}.',
        'The hand holds "{o}" now, so bring it to {t}.',
        'Since "{o}" is in the hand, only {t} is left.',
    ),
    "handover": (
        "Robot {r} cannot reach {t}, so {r} hands it to {s}.",
        "That needs a handover from {r} to {s}.",
        "Only {s} reaches {t}, so {r} gives it to {s}.",
    ),
    "shut": (
        "The {p} is closed, so open it first.",
        "Open {p} before that.",
        "Since {p} is shut it must be opened.",
    ),
    "blocked": (
        'But "{b}" stands on it and must be moved away to {p}.',
        'The top item "{b}" comes off first, onto {p}.',
        'Clear "{b}" from it, put that on {p}.',
    ),
    "done": (
        "The part {t} is already true.",
        "Nothing to do for {t}.",
        "The goal {t} holds already.",
    ),
    "state": ("Then {v} {t}.", "After that {v} {t}.", "And {v} {t} at the right time."),
    "trouble": (
        "The last step failed.",
        "Something went wrong, so I plan again.",
        "I continue after the failure.",
    ),
    "ask_object": (
        'I look for "{o}" but no line of the scene has it.',
        'The scene does not list "{o}".',
        'There is no object "{o}" here.',
    ),
    "ask_place": (
        "I look for {p} but the scene has no such place.",
        "The scene does not list {p}.",
        "There is no place {p} here.",
    ),
    "ask_which": (
        'The name "{o}" fits both "{a}" and "{b}".',
        'Two objects could be "{o}", namely "{a}" and "{b}".',
        'It is unclear whether "{o}" means "{a}" or "{b}".',
    ),
    "ask_locked": (
        "The way is blocked since {p} is locked.",
        "I would need {p} but it is locked.",
        "No skill opens {p}, it is locked.",
    ),
    "ask": (
        "That does not work, so I ask.",
        "This cannot be planned; I need to ask.",
        "So there is no plan, better ask the user.",
    ),
    "end": (
        "That is the plan.",
        "Now write the plan.",
        "This gives the steps.",
        "Done, answer now.",
    ),
}
"""Sentences of the thinking text. Object names follow a space and a quote, so that their tokens are
the same as in the plan.
"""


def think(rng: Random, kind: str, **names: str | int) -> str:
    """Return a sentence of a kind, its wording drawn at random."""
    return rng.choice(THOUGHTS[kind]).format(**names)
