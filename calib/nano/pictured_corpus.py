"""Training rows of tasks with pictures, among text documents.

Dimensions: R packed rows of ROW tokens, P pictures, M most pictures of a row.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from thor_dflash.calib.nano.corpus import Document, Rows, Thinking, answered, bins, fill
from thor_dflash.calib.nano.tokenizer import prompt_text
from thor_dflash.calib.planbench.drawing import (
    COLOURS,
    LIDS,
    POWERS,
    SHAPES,
    SIDE,
    SLOTS,
    DrawnScene,
    Undrawable,
    draw_scene,
)
from thor_dflash.calib.planbench.pictured import (
    PICTURED_FAMILIES,
    PicturedTask,
    described,
    sample_pictured,
)
from thor_dflash.calib.planbench.worlds import household, tabletop
from thor_dflash.core.model_dims import PATCH
from thor_dflash.runtime.vision.picture import PatchGrid

GRID = PatchGrid(SIDE // PATCH, SIDE // PATCH)
"""Patches of every picture."""
IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
"""An image in the chat template."""
TOKENS = GRID.tokens
TURNS = (*PICTURED_FAMILIES, "tabletop", "household")
"""The cycle of task families."""
_LOOK = f"(?:{'|'.join(COLOURS)}) (?:{'|'.join(SHAPES)})"
FACT = re.compile(
    rf'(?<=area )\d|{_LOOK}(?:, "\w+"| on | in )?|nothing|empty'
    r"|(?<=is )(?:open|closed|locked|on|off)(?: and o\w+)?"
)
"""What a text says that a picture shows: an area's number, a look and whose it is, a state."""
OTHER = 0.15
"""Loss weight of what is no fact of a picture, beside that of one."""
LOOKS = len(COLOURS) * len(SHAPES)


@dataclass(frozen=True)
class PicturedDocument(Document):
    """A training sample with a picture."""

    pixels: npt.NDArray[np.uint8]
    """[128, 128] palette indices."""


@dataclass(frozen=True)
class PicturedRows:
    """Packed rows with pictures."""

    rows: Rows
    turn: npt.NDArray[np.int16]
    """[R, ROW, 3] positions by which heads turn: time, row and column."""
    slot: npt.NDArray[np.int16]
    """[R, ROW] row of the row's M * TOKENS image rows that takes the place of a token, or -1."""
    shown: npt.NDArray[np.int32]
    """[R, M] pictures of a row; 0 for none."""
    pixels: npt.NDArray[np.uint8]
    """[P, 128, 128]."""


def prompt_ids(
    tokenizer: Tokenizer, pictured: PicturedTask, thinking: bool, *, image: bool = True
) -> list[int]:
    """The prompt of a task as the runtime makes it, with the tokens of its image if it has one."""
    task = pictured.task
    *before, (role, content) = task.messages
    shown = replace(task, messages=(*before, (role, content + IMAGE * image)))
    pad = tokenizer.token_to_id("<|image_pad|>")
    found: list[int] = []
    for token in tokenizer.encode(prompt_text(shown, thinking)).ids:
        found += [token] * (TOKENS if token == pad else 1)
    return found


def turns(ids: npt.NDArray[np.int16], pad: int) -> npt.NDArray[np.int16]:
    """[T, 3] positions of a document with at most one image. Source: transformers models/qwen3_5
    get_rope_index.
    """
    found = np.repeat(np.arange(len(ids), dtype=np.int16)[:, None], 3, axis=1)
    at = np.flatnonzero(ids == pad)
    if len(at):
        side = GRID.merged[0]
        down, across = np.indices(GRID.merged).reshape(2, -1)
        found[at] = at[0] + np.stack([np.zeros_like(down), down, across], axis=1)
        found[at[-1] + 1 :] -= TOKENS - side
    return found


def content_of(drawn: DrawnScene) -> npt.NDArray[np.uint8]:
    """What a picture shows in each slot: the area's number (0: none), its lid and lamp, and for
    each look whether it stands there, and whether on another object.
    """
    found = np.zeros((SLOTS, 3 + 2 * LOOKS), np.uint8)
    for area in drawn.areas.values():
        row = found[area.slot]
        row[:3] = area.number, LIDS.index(area.lid), POWERS.index(area.power)
        for stack in area.columns:
            for height, look in enumerate(stack):
                index = COLOURS.index(look.colour) * len(SHAPES) + SHAPES.index(look.shape)
                row[3 + index] = 1
                row[3 + LOOKS + index] = height
    return found


def pictured_document(tokenizer: Tokenizer, family: str, seed: str) -> PicturedDocument:
    """Draw a training document: every other one describes its picture. Of the rest 80 % think,
    10 % do not, and of 10 % the thinking is cut short. 15 % of all have no system message.
    """
    pictured, rng = sample_pictured(family, seed, "train"), Random(seed)
    kind, drawn = rng.random(), pictured.drawn
    if rng.random() < 0.5:
        text, answer = described(pictured, rng)
        messages = (pictured.task.messages[0], ("user", text))
        task = replace(pictured.task, messages=messages, plan=answer)
        pictured, kind = PicturedTask(task, drawn), 0.0
    thinking: Thinking = "off" if kind < 0.1 else "cut" if kind < 0.2 else "on"
    if rng.random() < 0.15:
        task = replace(pictured.task, messages=pictured.task.messages[1:])
        pictured = PicturedTask(task, drawn)
    prompt = prompt_ids(tokenizer, pictured, thinking != "off")
    made = answered(tokenizer, pictured.task, prompt, thinking, rng)
    weight = fact_weights(tokenizer, made)
    return PicturedDocument(made.ids, weight, made.prompt, drawn.pixels)


def fact_weights(tokenizer: Tokenizer, doc: Document) -> npt.NDArray[np.float32]:
    """The loss weights of a document, all but the facts of its picture scaled down. Else what no
    picture decides, above all the wording, would be most of the loss.
    """
    pieces = [tokenizer.decode([i], skip_special_tokens=False) for i in doc.ids[doc.prompt :]]
    ends = np.cumsum([len(piece) for piece in pieces])
    fact = np.zeros(len(doc.ids), np.bool_)
    for found in FACT.finditer("".join(pieces)):
        first, last = np.searchsorted(ends, (found.start(), found.end() - 1), side="right")
        fact[doc.prompt + first : doc.prompt + last + 1] = True
    return np.where(fact, doc.weight, OTHER * doc.weight).astype(np.float32)


def drawings(
    count: int, tag: str, workers: int
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    """Draw pictures [P, 128, 128] of random scenes, and their content."""
    share = (count + workers - 1) // workers
    jobs = [(tag, w * share, min(count, (w + 1) * share)) for w in range(workers)]
    if workers == 1:
        parts = [_draw(jobs[0])]
    else:
        with ProcessPoolExecutor(workers) as pool:
            parts = list(pool.map(_draw, jobs))
    pixels, content = zip(*parts, strict=True)
    return np.concatenate(pixels), np.concatenate(content)


def _draw(job: tuple[str, int, int]) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    tag, start, stop = job
    drawn: list[DrawnScene] = []
    rng = Random(f"drawings/{tag}/{start}")
    while len(drawn) < stop - start:
        try:
            drawn.append(draw_scene(rng.choice((tabletop, household))(rng, False), rng))
        except Undrawable:
            continue
    return np.stack([d.pixels for d in drawn]), np.stack([content_of(d) for d in drawn])


def pack_pictured(docs: Sequence[Document], seed: int, pad: int) -> PicturedRows:
    """Pack documents of both kinds into rows."""
    placed = bins(docs, seed)
    rows = fill(docs, placed)
    seen = [doc for doc in docs if isinstance(doc, PicturedDocument)]
    number = {id(doc): index for index, doc in enumerate(seen)}
    of_row = [[docs[i] for i in members if id(docs[i]) in number] for members in placed]
    turn = np.repeat(rows.pos[:, :, None], 3, axis=2)
    slot = np.full(rows.ids.shape, -1, np.int16)
    shown = np.zeros((len(placed), max(1, *map(len, of_row))), np.int32)
    for row, (members, pictures) in enumerate(zip(placed, of_row, strict=True)):
        at = 0
        for index in members:
            size = len(docs[index].ids)
            turn[row, at : at + size] = turns(docs[index].ids, pad)
            at += size
        where = np.flatnonzero(rows.ids[row] == pad)
        slot[row, where] = np.arange(len(where))
        shown[row, : len(pictures)] = [number[id(doc)] for doc in pictures]
    pixels = np.stack([doc.pixels for doc in seen])
    return PicturedRows(rows, turn, slot, shown, pixels)


def token_content(content: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """[P, SLOTS, C] -> [P, TOKENS, C]: a slot is as high as a token and as wide as two."""
    rows, columns = GRID.merged
    return content.repeat(columns // (SLOTS // rows), axis=1)


def draw_pictured(job: tuple[Path, str, int, int]) -> list[PicturedDocument]:
    """Draw a part of the documents, as `corpus.draw_documents`."""
    tokenizer_file, tag, start, stop = job
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    names = [TURNS[i % len(TURNS)] for i in range(start, stop)]
    return [pictured_document(tokenizer, name, f"{tag}{i}") for i, name in enumerate(names, start)]
