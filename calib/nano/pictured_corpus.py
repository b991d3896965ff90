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
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from thor_dflash.calib.nano.corpus import (
    Document,
    Rows,
    Thinking,
    answered,
    bins,
    draw_documents,
    fill,
)
from thor_dflash.calib.nano.tokenizer import prompt_text
from thor_dflash.calib.planbench.drawing import (
    COLOURS,
    COLUMNS,
    LIDS,
    POWERS,
    SHAPES,
    SIDE,
    SLOTS,
    DrawnScene,
)
from thor_dflash.calib.planbench.pictured import (
    PICTURED_FAMILIES,
    PicturedTask,
    described,
    sample_pictured,
    sample_scene,
)
from thor_dflash.calib.planbench.task import Task
from thor_dflash.core.model_dims import PATCH
from thor_dflash.runtime.vision.picture import PatchGrid

GRID = PatchGrid(SIDE // PATCH, SIDE // PATCH)
"""Patches of every picture."""
IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
"""An image in the chat template."""
TOKENS = GRID.tokens
TURNS = (*PICTURED_FAMILIES, "tabletop", "household")
"""The cycle of task families."""
_LOOK = f"[{''.join(SHAPES)}]_(?:{'|'.join(COLOURS)})"
_STATE = r"(?:\(\w+(?:,\w+)?\))?"
_AT = rf"(?:On|The) \w+, area \d{_STATE}"
FACTS = {
    "area": r" in area (\d)",
    "stacked": rf'"(?: is|,) the {_LOOK}( in| on| under)',
    "on": rf" on the ({_LOOK}), ",
    "under": rf" under the ({_LOOK}), ",
    "state": r"\barea \d(?:, \w+)?(\([\w,]+\)|[,.: ])",
    "look": rf"{_AT} (?:is|are|has) (the {_LOOK}|nothing|several|empty)",
    "empty": rf"{_AT} (is|are|has)",
    "name": rf'{_LOOK}, ("\w+)',
    "look of a name": rf'"(?: is|,) the ({_LOOK})',
    "place": r" in area \d, (\w+)",
    "number": r"\w, area (\d)",
}
"""What a text says that a picture shows, or the legend of one: by kind, a pattern whose group is
the fact. All that goes before decides it."""
OTHER = 0.15
"""Loss weight of what is no fact of a picture, beside that of one."""
SIZES = (SLOTS + 1, len(LIDS), len(POWERS), *(len(COLOURS) + 1, len(SHAPES) + 1) * 2)
"""What a token of an image shows: the number of its area, lid, lamp, and the colour and the shape
of the object there and of the one on it. Values of each; 0 is none."""


@dataclass(frozen=True)
class PicturedDocument(Document):
    """A training sample with a picture."""

    kind: npt.NDArray[np.int8]
    """1 + index of FACTS of each token that is a fact, else 0."""
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
    kind: npt.NDArray[np.int8]
    """[R, ROW] as that of documents."""
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
    """What each token of a picture shows, [TOKENS, fields]. An area is as high as a token and as
    wide as two, of which each has a column.
    """
    found = np.zeros((TOKENS, len(SIZES)), np.uint8)
    for area in drawn.areas.values():
        for column, stack in enumerate(area.columns):
            row = found[area.slot * COLUMNS + column]
            row[:3] = area.number, LIDS.index(area.lid), POWERS.index(area.power)
            for height, look in enumerate(stack):
                colour, shape = COLOURS.index(look.colour), SHAPES.index(look.shape)
                row[3 + 2 * height : 5 + 2 * height] = colour + 1, shape + 1
    return found


def described_document(tokenizer: Tokenizer, seed: str) -> PicturedDocument:
    """A training document that describes a picture, and has little else."""
    rng = Random(seed)
    scene, drawn = sample_scene(rng)
    text, answer = described(scene, drawn, rng)
    task = Task(seed, "described", "train", (("user", text),), "", answer, scene, "", "")
    return _document(tokenizer, PicturedTask(task, drawn), "off", rng)


def planned_document(tokenizer: Tokenizer, task: PicturedTask, seed: str) -> PicturedDocument:
    """A training document of a task: 80 % think, 10 % do not, and in 10 % the thinking is cut
    short; 15 % have no system message.
    """
    rng = Random(seed)
    kind = rng.random()
    thinking: Thinking = "off" if kind < 0.1 else "cut" if kind < 0.2 else "on"
    if rng.random() < 0.15:
        task = replace(task, task=replace(task.task, messages=task.task.messages[1:]))
    return _document(tokenizer, task, thinking, rng)


def _document(
    tokenizer: Tokenizer, task: PicturedTask, thinking: Thinking, rng: Random
) -> PicturedDocument:
    prompt = prompt_ids(tokenizer, task, thinking != "off")
    made = answered(tokenizer, task.task, prompt, thinking, rng)
    kind = fact_kinds(tokenizer, made)
    # Else what no picture decides, above all the wording, would be most of the loss.
    weight = np.where(kind > 0, made.weight, OTHER * made.weight).astype(np.float32)
    return PicturedDocument(made.ids, weight, made.prompt, kind, task.drawn.pixels)


def fact_kinds(tokenizer: Tokenizer, doc: Document) -> npt.NDArray[np.int8]:
    """The kinds of facts of a document's tokens, 0 for those that are none."""
    pieces = [tokenizer.decode([i], skip_special_tokens=False) for i in doc.ids[doc.prompt :]]
    ends = np.cumsum([len(piece) for piece in pieces])
    kinds = np.zeros(len(doc.ids), np.int8)
    for number, pattern in enumerate(FACTS.values(), start=1):
        for found in re.finditer(pattern, "".join(pieces)):
            start, end = found.span(1)
            first, last = np.searchsorted(ends, (start, end - 1), side="right")
            kinds[doc.prompt + first : doc.prompt + last + 1] = number
    return kinds


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
        drawn.append(sample_scene(rng)[1])
    return np.stack([d.pixels for d in drawn]), np.stack([content_of(d) for d in drawn])


def pack_pictured(docs: Sequence[Document], seed: int, pad: int) -> PicturedRows:
    """Pack documents of both kinds into rows."""
    placed = bins(docs, seed)
    rows = fill(docs, placed)
    pictures = [doc for doc in docs if isinstance(doc, PicturedDocument)]
    number = {id(doc): index for index, doc in enumerate(pictures)}
    of_row: list[list[int]] = []
    turn = np.repeat(rows.pos[:, :, None], 3, axis=2)
    slot = np.full(rows.ids.shape, -1, np.int16)
    kind = np.zeros(rows.ids.shape, np.int8)
    for row, members in enumerate(placed):
        at, found = 0, list[int]()
        for doc in (docs[index] for index in members):
            part = slice(at, at + len(doc.ids))
            turn[row, part] = turns(doc.ids, pad)
            if isinstance(doc, PicturedDocument):
                kind[row, part] = doc.kind
                found.append(number[id(doc)])
            at = part.stop
        where = np.flatnonzero(rows.ids[row] == pad)
        slot[row, where] = np.arange(len(where))
        of_row.append(found)
    shown = np.zeros((len(placed), max(1, *map(len, of_row))), np.int32)
    for row, found in enumerate(of_row):
        shown[row, : len(found)] = found
    pixels = np.zeros((len(pictures), SIDE, SIDE), np.uint8)
    for index, doc in enumerate(pictures):
        pixels[index] = doc.pixels
    return PicturedRows(rows, turn, slot, shown, kind, pixels)


def draw_pictured(job: tuple[Path, str, int, int]) -> list[Document]:
    """Draw a part of the documents, as `corpus.draw_documents`: every other one of a task."""
    tokenizer_file, tag, start, stop = job
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    made: list[Document] = []
    for i in range(start, stop):
        seed, family = f"{tag}{i}", TURNS[i // 2 % len(TURNS)]
        if i % 2:
            made.append(described_document(tokenizer, seed))
        else:
            task = sample_pictured(family, seed, "train")
            made.append(planned_document(tokenizer, task, seed))
    return made


def draw_rows(job: tuple[Path, str, int, int, bool]) -> PicturedRows:
    """Draw a part of the documents, with pictures or in text, and pack them."""
    file, tag, start, stop, pictured = job
    (pad,) = Tokenizer.from_file(str(file)).encode("<|image_pad|>").ids
    if pictured:
        return pack_pictured(draw_pictured((file, tag, start, stop)), start, pad)
    docs = draw_documents((file, tag, start, stop))
    # With less weight, so that facts of pictures are most of the loss.
    return pack_pictured([replace(d, weight=2 * OTHER * d.weight) for d in docs], start, pad)


def join_rows(parts: Sequence[PicturedRows]) -> PicturedRows:
    """The rows of all parts, with their pictures."""

    def whole(name: str, source: Sequence[object] = parts) -> Any:
        return np.concatenate([getattr(part, name) for part in source])

    most = max(part.shown.shape[1] for part in parts)
    before, shown = 0, list[npt.NDArray[np.int32]]()
    for part in parts:
        more = most - part.shown.shape[1]
        shown.append(np.pad(part.shown + np.int32(before), ((0, 0), (0, more))))
        before += len(part.pixels)
    texts = [part.rows for part in parts]
    rows = Rows(*(whole(name, texts) for name in ("ids", "pos", "weight", "answer")))
    turn, slot, kind, pixels = map(whole, ("turn", "slot", "kind", "pixels"))
    # A row of the last part without pictures points behind them.
    found = np.minimum(np.concatenate(shown), max(0, before - 1))
    return PicturedRows(rows, turn, slot, found, kind, pixels)
