"""Training rows: tasks as token ids with loss weights, drawn in several processes and packed into
rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Literal

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from thor_dflash.calib.nano.tokenizer import CLOSE, prompt_text
from thor_dflash.calib.planbench import FAMILIES, Task, sample

ROW = 1024
"""Tokens of a packed row."""
TURNS = (*FAMILIES, "mobile", "tabletop")
"""The cycle of task families; the two that need look-ahead (doors, stacks) come twice."""
PROMPT_WEIGHT = 0.1
"""Loss weight of prompt tokens: enough to learn copying from the request, too little to spend
capacity on noise.
"""

Thinking = Literal["on", "off", "cut"]


@dataclass(frozen=True)
class Document:
    """One training sample."""

    ids: npt.NDArray[np.int16]
    weight: npt.NDArray[np.float32]
    """Loss weight of each token as a prediction."""
    prompt: int
    """Number of prompt tokens."""


@dataclass(frozen=True)
class Rows:
    """Packed rows, [R, ROW] each."""

    ids: npt.NDArray[np.int16]
    pos: npt.NDArray[np.int16]
    weight: npt.NDArray[np.float32]
    answer: npt.NDArray[np.bool_]
    """True where a draft may start: from a document's last prompt token to its last but one token.
    """


def document(tokenizer: Tokenizer, family: str, seed: str) -> Document:
    """Draw a training document: 64 % with thinking, 21 % without, 15 % with thinking cut short by
    the budget's closing text.
    """
    task = sample(family, seed, "train")
    rng = Random(seed)
    kind = rng.random()
    prompt = tokenizer.encode(prompt_text(task, kind >= 0.21)).ids
    thinking: Thinking = "off" if kind < 0.21 else "cut" if kind < 0.36 else "on"
    return answered(tokenizer, task, prompt, thinking, rng)


def answered(
    tokenizer: Tokenizer, task: Task, prompt: list[int], thinking: Thinking, rng: Random
) -> Document:
    """A document of a task's prompt and its canonical answer."""
    answer = tokenizer.encode(task.plan + "<|im_end|>").ids
    forced: list[int] = []
    thought: list[int] = []
    if thinking == "cut":
        whole = tokenizer.encode(task.thinking + "\n").ids
        thought = whole[: rng.randint(0, len(whole) - 1)]
        forced = tokenizer.encode(CLOSE).ids
    elif thinking == "on":
        thought = tokenizer.encode(task.thinking + "\n</think>\n\n").ids
    ids = [*prompt, *thought, *forced, *answer]
    weight = (
        [PROMPT_WEIGHT] * len(prompt)
        + [1.0] * len(thought)
        + [0.0] * len(forced)
        + [1.0] * len(answer)
    )
    return Document(np.array(ids, np.int16), np.array(weight, np.float32), len(prompt))


def documents(tokenizer_file: Path, count: int, tag: str, workers: int) -> list[Document]:
    """Draw ``count`` documents, alternating the families, in ``workers`` processes."""
    share = (count + workers - 1) // workers
    jobs = [(tokenizer_file, tag, w * share, min(count, (w + 1) * share)) for w in range(workers)]
    if workers == 1:
        return draw_documents(jobs[0])
    with ProcessPoolExecutor(workers) as pool:
        return [doc for part in pool.map(draw_documents, jobs) for doc in part]


def pack(docs: list[Document], seed: int) -> Rows:
    """Shuffle documents and pack them into rows without splitting any; the rest of a row is padding
    of weight 0.
    """
    return fill(docs, bins(docs, seed))


def bins(docs: Sequence[Document], seed: int) -> list[list[int]]:
    """Shuffle documents into rows; the indices of the documents of each."""
    order = list(range(len(docs)))
    Random(seed).shuffle(order)
    found: list[list[int]] = []
    open_bins: list[tuple[int, int]] = []
    for index in order:
        size = len(docs[index].ids)
        place = next((i for i, (_, space) in enumerate(open_bins) if space >= size), None)
        if place is None:
            found.append([index])
            open_bins.append((len(found) - 1, ROW - size))
        else:
            which, space = open_bins.pop(place)
            found[which].append(index)
            open_bins.append((which, space - size))
        # Only recent rows stay open, so that packing is linear in the number of documents.
        if len(open_bins) > 64:
            open_bins.pop(0)
    Random(seed + 1).shuffle(found)
    return found


def fill(docs: Sequence[Document], rows: list[list[int]]) -> Rows:
    """The packed rows of documents."""
    shape = (len(rows), ROW)
    ids, pos = np.zeros(shape, np.int16), np.zeros(shape, np.int16)
    weight, answer = np.zeros(shape, np.float32), np.zeros(shape, np.bool_)
    for row, members in enumerate(rows):
        at = 0
        for index in members:
            doc = docs[index]
            end = at + len(doc.ids)
            ids[row, at:end], weight[row, at:end] = doc.ids, doc.weight
            pos[row, at:end] = np.arange(len(doc.ids))
            answer[row, at + doc.prompt - 1 : end - 1] = True
            at = end
        pos[row, at:] = np.arange(ROW - at)
    return Rows(ids, pos, weight, answer)


def given(doc: Document, close: list[int]) -> list[int]:
    """Return the prompt for the target: the document's prompt, followed by its cut thinking and the
    closing text if it has those.
    """
    ids: list[int] = doc.ids.tolist()
    forced = np.flatnonzero(doc.weight == 0)
    return ids[: int(forced[0]) + len(close)] if len(forced) else ids[: doc.prompt]


def draw_documents(job: tuple[Path, str, int, int]) -> list[Document]:
    """Draw a part of the documents: tokenizer file, tag, first and end."""
    tokenizer_file, tag, start, stop = job
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    return [document(tokenizer, TURNS[i % len(TURNS)], f"{tag}{i}") for i in range(start, stop)]
