"""A model so small that tests of `bench` take no time, and the options that select it."""

from __future__ import annotations

from thor_dflash.builders import synthetic
from thor_dflash.core.model_dims import DrafterDims, TargetDims

VOCABULARY = 2560
ARGUMENTS = ["bench", "--shape", "small", "--random-weights", "--engine", "cuda", "--json"]


def small() -> tuple[TargetDims, DrafterDims]:
    """Returns the 27B and its drafter with fewer layers, narrower rows and a smaller vocabulary.

    Layers of every kind are left, so that every operator is still called.
    """
    target = synthetic.QWEN36_27B
    target = TargetDims(
        vocab=VOCABULARY,
        hidden=1280,
        intermediate=2048,
        layers=target.layers[:4],
        attention=target.attention,
        gdn=target.gdn,
        eps=target.eps,
        tied=False,
        max_position=target.max_position,
    )
    old = synthetic.QWEN36_27B_DFLASH
    drafter = DrafterDims(
        vocab=VOCABULARY, hidden=1280, intermediate=2048, layers=old.layers[-2:],
        attention=old.attention, eps=old.eps, block=16, taps=(0, 1, 2), mask_token=5,
        target_layers=4, max_position=old.max_position,
    )  # fmt: skip
    return target, drafter
