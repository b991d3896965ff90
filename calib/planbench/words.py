"""The nouns of the corpus, each in either the training or the held-out split."""

from __future__ import annotations

import zlib
from random import Random

from thor_dflash.calib.planbench.places import RESERVED

TRAIN_NOUNS = tuple(
    """apple banana lemon orange pear peach plum cherry carrot potato onion tomato pepper mug cup
    bowl fork spoon
    knife pan pot jug jar bottle can carton soap sponge towel brush comb razor book pen pencil
    marker eraser ruler
    stapler tape glue paper notebook folder phone charger cable battery camera laptop mouse keyboard
    remote headset
    hammer wrench screwdriver drill saw chisel bolt nut screw nail gear spring hinge bracket pulley
    lever
    motor sensor valve pipe hose filter fuse relay resistor chip board wire clamp vise file level
    block cube ball
    ring disk cone cylinder brick tile plank rod hat scarf glove sock shoe belt wallet key coin card
    ticket watch
    candle vase frame clock toy doll puzzle dice kite drum flute bread butter cheese milk egg rice
    pasta
    soup salad cake cookie candy tea coffee sugar salt flour honey juice water medicine bandage
    syringe vial beaker
    flask tube swab mask gown sample specimen reagent parcel letter package envelope stamp label
    pallet toolbox""".split()
)
HELD_NOUNS = tuple(
    """mango kiwi grape papaya cabbage radish spatula ladle whisk teapot thermos napkin stylus
    binder tablet speaker
    router pliers mallet crowbar rivet gasket piston bearing solenoid prism wedge marble bracelet
    jacket mitten
    lantern trophy violin waffle muffin yogurt pickle ointment pipette goggles crystal magnet
    ribbon""".split()
)
TAGS = tuple("red blue green black white yellow pink gray a b c d big small old new".split())
"""Tags that distinguish objects with the same noun; appended to it, as in ``mug_red``."""

_ONSETS = "b c d f g h j k l m n p qu r s t v w x z br cr dr gl kr pl st tr zh sk".split()
_VOWELS = "a e i o u ai ee io ou ua y".split()
_CODAS = ["", "", "", "n", "r", "x", "k", "l", "s", "m", "t", "b", "p", "nd", "rt", "g"]
_HALVES = (*TRAIN_NOUNS, *sorted(RESERVED))
"""Words whose halves make new words. Place names are included, so that parts of them occur in
object names, too.
"""
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def held_out(text: str, parts: int) -> bool:
    """Whether a text is in the held-out fraction 1/parts. Depends only on the text, so that both
    splits agree.
    """
    return zlib.crc32(text.encode()) % parts == 0


def noun_of(name: str) -> str:
    """Return the noun of an object id, without its tag."""
    return name.split("_")[0]


def noun_is_held_out(noun: str) -> bool:
    """Whether a noun, real or invented, belongs to the held-out split."""
    if noun in HELD_NOUNS:
        return True
    return noun not in TRAIN_NOUNS and held_out(noun, 5)


def draw_nouns(rng: Random, count: int, held: bool) -> list[str]:
    """Draw distinct nouns of one split, a mix of real and invented ones.

    Training uses mostly invented words: a model that learns to copy any word can copy unseen ones.
    """
    pool = HELD_NOUNS if held else TRAIN_NOUNS
    real = 0.5 if held else 0.3
    chosen: list[str] = []
    while len(chosen) < count:
        noun = rng.choice(pool) if rng.random() < real else invent(rng)
        if len(noun) < 3 or noun in chosen or noun in RESERVED or noun_is_held_out(noun) != held:
            continue
        chosen.append(noun)
    return chosen


def draw_objects(rng: Random, count: int, held: bool) -> list[str]:
    """Draw distinct object ids: bare and tagged nouns, sometimes two with the same noun."""
    names: list[str] = []
    for noun in draw_nouns(rng, count, held):
        if rng.random() < 0.6:
            names.append(noun)
            continue
        twins = 2 if rng.random() < 0.3 else 1
        names.extend(f"{noun}_{tag}" for tag in rng.sample(TAGS, twins))
    return names[:count]


def invent(rng: Random) -> str:
    """Invent a word from syllables, from parts of two real words, or from random letters."""
    kind = rng.random()
    if kind < 0.15:
        return "".join(rng.choice(_LETTERS) for _ in range(rng.randint(3, 6)))
    if kind < 0.55:
        head, tail = rng.choice(_HALVES), rng.choice(_HALVES)
        return head[: rng.randint(1, 4)] + tail[-rng.randint(2, 5) :]
    parts = rng.randint(1, 3)
    return "".join(
        rng.choice(_ONSETS) + rng.choice(_VOWELS) + rng.choice(_CODAS) for _ in range(parts)
    )
