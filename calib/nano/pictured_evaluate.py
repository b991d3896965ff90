"""Evaluates a target with a vision tower on held-out tasks with pictures, each with its own, with
that of another scene, with a grey one and with none.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from thor_dflash.calib.nano import checkpoint
from thor_dflash.calib.nano.dims import NanoTargetDims, NanoTowerDims
from thor_dflash.calib.nano.drafter import NanoDrafter
from thor_dflash.calib.nano.evaluate import (
    LONGEST,
    Context,
    GeneratedAnswer,
    accept_lengths,
    validity,
)
from thor_dflash.calib.nano.loop import TrainingRun
from thor_dflash.calib.nano.pictured_corpus import prompt_ids, turns
from thor_dflash.calib.nano.rollout import RolloutImages, rollout
from thor_dflash.calib.nano.vision import ImageRows, PictureTable, SeeingTarget
from thor_dflash.calib.planbench.pictured import (
    PICTURED_FAMILIES,
    SHOWN,
    Shown,
    heldout_pictured,
    shown_picture,
)

DRAFTED = 60
"""Answers whose accept length is measured."""


def load_seeing(run: TrainingRun) -> SeeingTarget:
    """Load the target with the weights of its exported checkpoint, frozen."""
    model = SeeingTarget(NanoTargetDims(), NanoTowerDims()).to(run.device)
    checkpoint.load_exported(model, "model.", run.target_dir)
    return model.requires_grad_(False)


@torch.no_grad()
def prompt_images(
    model: SeeingTarget, prompts: Sequence[Sequence[int]], pixels: np.ndarray, pad: int
) -> RolloutImages:
    """The images of prompts with one image each; `pixels` are palette indices [B, 128, 128]."""
    device = model.language_model.embed_tokens.weight.device
    ids = np.zeros((len(prompts), LONGEST), np.int16)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = prompt
    slot = np.where(ids == pad, np.cumsum(ids == pad, axis=1) - 1, -1)
    turn = torch.from_numpy(np.stack([turns(row, pad) for row in ids])).to(device).long()
    store = PictureTable(torch.from_numpy(pixels).to(device))
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        values = model.visual(store.patches(torch.arange(len(pixels), device=device)))
    return RolloutImages(ImageRows(torch.from_numpy(slot).to(device), values), turn)


def answers(
    model: SeeingTarget,
    run: TrainingRun,
    count: int,
    shown: Shown,
    *,
    thinking: bool,
) -> list[GeneratedAnswer]:
    """Decode the first held-out tasks greedily, with a picture or without."""
    tokenizer, image = run.tokenizer, shown != "none"
    # The last tasks are shown the scenes of those after them.
    tasks = heldout_pictured(count + len(PICTURED_FAMILIES))
    prompts = [prompt_ids(tokenizer, task, thinking, image=image) for task in tasks[:count]]
    pictures = [shown_picture(tasks, i, shown) for i in range(count)]
    pixels = [picture for picture in pictures if picture is not None]
    pad, images = tokenizer.token_to_id("<|image_pad|>"), None
    if pixels:
        images = prompt_images(model, prompts, np.stack(pixels), pad)
    usable, ends = tokenizer.get_vocab_size(), _ends(run)
    made = rollout(model.language_model, prompts, LONGEST, usable, ends, images)
    found: list[GeneratedAnswer] = []
    for i, task in enumerate(tasks[:count]):
        own = None if images is None else _one(images, i)
        found.append(GeneratedAnswer(task.task, prompts[i], made[i], own))
    return found


def _one(images: RolloutImages, index: int) -> RolloutImages:
    part = slice(index, index + 1)
    rows = ImageRows(images.rows.slot[part], images.rows.values[part])
    return RolloutImages(rows, images.turn[part])


def _ends(run: TrainingRun) -> tuple[int, ...]:
    return tuple(run.tokenizer.token_to_id(text) for text in ("<|im_end|>", "<|endoftext|>"))


def seeing_report(
    model: SeeingTarget, drafter: NanoDrafter, run: TrainingRun, taps: tuple[int, ...]
) -> dict[str, dict[str, float]]:
    """Measure validity with each kind of picture, and accept lengths with and without. Prints and
    returns the numbers.
    """
    modes = [(shown, True) for shown in SHOWN]
    result: dict[str, dict[str, float]] = {}
    made: dict[str, list[GeneratedAnswer]] = {}

    def add(name: str, numbers: dict[str, float]) -> None:
        result[name] = numbers
        print(name, " ".join(f"{k}={v:.3f}" for k, v in numbers.items()), flush=True)

    for shown, thinking in (*modes, (SHOWN[0], False)):
        label = f"{shown}, thinking {'on' if thinking else 'off'}"
        found = answers(model, run, run.held, shown, thinking=thinking)
        show = 8 if shown == "its own" else 0
        add(f"valid, {label}", validity(run.tokenizer, found, show, PICTURED_FAMILIES))
        made[label] = found[:DRAFTED]
    mask_id = run.tokenizer.token_to_id("<|audio_start|>")
    for label, found in made.items():
        contexts: list[Context] = ["index"]
        if label.startswith("its own"):
            contexts += ["without images", "time"]
        for context in contexts if not label.startswith(("another", "grey")) else ():
            lengths = accept_lengths(model.language_model, drafter, found, mask_id, taps, context)
            tokens = [len(answer.made) for answer in found]
            cycles = sum(n / x for n, x in zip(tokens, lengths, strict=True))
            add(f"accept, {label}, {context}", {"all": sum(tokens) / cycles})
    return result
