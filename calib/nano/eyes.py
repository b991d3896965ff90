"""Trains the target with a vision tower: first the tower by itself, on what pictures show, then
both on tasks with pictures, among text documents so that planning from text is kept.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thor_dflash.calib.nano import checkpoint, corpus
from thor_dflash.calib.nano.corpus import Document
from thor_dflash.calib.nano.dims import NanoTargetDims, NanoTowerDims
from thor_dflash.calib.nano.drafter import NanoDrafter
from thor_dflash.calib.nano.evaluate import GeneratedAnswer, accept_lengths, validity
from thor_dflash.calib.nano.loop import TrainingRun, compile_layers, mean_loss, optimise
from thor_dflash.calib.nano.pictured_corpus import (
    LOOKS,
    PicturedDocument,
    PicturedRows,
    drawings,
    pack_pictured,
    pictured_documents,
    prompt_ids,
    token_content,
    turns,
)
from thor_dflash.calib.nano.rollout import RolloutImages, rollout
from thor_dflash.calib.nano.target import PackedRows, packed_rows
from thor_dflash.calib.nano.vision import ImageRows, NanoTower, PictureTable, SeeingTarget
from thor_dflash.calib.planbench.drawing import LIDS, POWERS, SLOTS
from thor_dflash.calib.planbench.pictured import (
    PICTURED_FAMILIES,
    SHOWN,
    PicturedTask,
    Shown,
    heldout_pictured,
    shown_picture,
)

LONGEST = 768
"""Most tokens of a prompt and its answer."""
TEXT = 0.3
"""Share of text documents."""
PICTURES_PER_STEP = 512
"""Pictures of a step of the tower's own training."""
Inputs = Callable[..., tuple[Tensor, PackedRows]]
"""A batch of ids, positions and what belongs to images -> embedded tokens, and the packing."""


class PictureProbe(nn.Module):
    """The tower, and a linear layer that reads from each of its rows what the area there shows."""

    def __init__(self, dims: NanoTowerDims) -> None:
        super().__init__()
        self.visual = NanoTower(dims)
        self.sizes = (SLOTS + 1, len(LIDS), len(POWERS))
        self.read = nn.Linear(dims.out, sum(self.sizes) + 2 * LOOKS)

    def loss(self, patches: Tensor, content: Tensor) -> Tensor:
        """Cross entropy of what is shown [P, tokens, 3 + 2 * LOOKS]."""
        scores = self.read(self.visual(patches)).float().flatten(0, 1)
        wanted = content.flatten(0, 1)
        *kinds, looks = scores.split((*self.sizes, 2 * LOOKS), -1)
        total = F.binary_cross_entropy_with_logits(looks, wanted[:, 3:].float()) * 8
        for index, kind in enumerate(kinds):
            total = total + F.cross_entropy(kind, wanted[:, index].long())
        return total

    @torch.no_grad()
    def wrong(self, patches: Tensor, content: Tensor) -> float:
        """Share of the rows of which anything is read wrong."""
        scores = self.read(self.visual(patches)).float()
        *kinds, looks = scores.split((*self.sizes, 2 * LOOKS), -1)
        right = ((looks > 0) == (content[..., 3:] > 0)).all(-1)
        for index, kind in enumerate(kinds):
            right &= kind.argmax(-1) == content[..., index]
        return 1 - right.float().mean().item()


def train_tower(run: TrainingRun) -> None:
    """Train the tower by itself, and save it as `tower`."""
    start = time.time()
    pixels, content = drawings(run.pictures, "w", run.workers)
    print(f"pictures: {len(pixels)}, {time.time() - start:.0f} s", flush=True)
    store = PictureTable(torch.from_numpy(pixels).to(run.device))
    shows = torch.from_numpy(token_content(content)).to(run.device)
    model = PictureProbe(NanoTowerDims()).to(run.device)
    part = replace(run, rows=PICTURES_PER_STEP, seconds=run.tower_seconds, begin=0.0, finish=1.0)
    kept = max(1, len(pixels) // 50)

    def loss(index: Tensor) -> Tensor:
        return model.loss(store.patches(index), shows[index])

    optimise(part, model, "probe", loss, [torch.arange(kept, len(pixels), device=run.device)])
    held = torch.arange(kept, device=run.device)[: 4 * PICTURES_PER_STEP]
    wrong = model.wrong(store.patches(held), shows[held])
    print(f"tower: {100 * wrong:.2f} % of rows are read wrong", flush=True)
    checkpoint.save_master(model.visual, run.work, "tower")


def train_seeing(run: TrainingRun) -> None:
    """Train the target with its tower. It begins with the weights of `run.start` and those that
    `train_tower` saved.
    """
    start = time.time()
    file, tag = run.target_dir / "tokenizer.json", f"e{run.begin}/"
    few = round(TEXT * run.docs)
    docs: list[Document] = list(pictured_documents(file, run.docs - few, tag, run.workers))
    docs += corpus.documents(file, few, tag, run.workers)
    packed = pack_pictured(docs, 0, run.tokenizer.token_to_id("<|image_pad|>"))
    taken = time.time() - start
    print(f"corpus: {len(docs)} documents, {len(packed.slot)} rows, {taken:.0f} s", flush=True)
    model = SeeingTarget(NanoTargetDims(), NanoTowerDims()).to(run.device)
    store = PictureTable(torch.from_numpy(packed.pixels).to(run.device))
    resumed = checkpoint.load_master(model, run.work, "seeing")
    if not resumed and run.start is not None:
        _start(model, run, store)
    count = sum(p.numel() for p in model.parameters())
    print(f"target: {count:,} parameters, resumed: {resumed}", flush=True)
    entropy = compile_layers(run, model.language_model.layers, mean_loss)
    table = model.language_model.embed_tokens

    def loss(ids: Tensor, pos: Tensor, weight: Tensor, *images: Tensor) -> Tensor:
        x, rows = inputs(model, store, ids, pos, *images)
        hidden, _ = model.language_model(x, rows, run.quant)
        seen = weight[:, 1:] * (pos[:, 1:] > 0)
        return entropy(hidden[:, :-1], table.weight, ids[:, 1:].long(), seen)

    optimise(run, model, "seeing", loss, tensors(packed, packed.rows.weight, run.device))


def _start(model: SeeingTarget, run: TrainingRun, store: PictureTable) -> None:
    """Take the weights of an exported target: with its tower if it has one, else with the tower
    that was trained by itself, whose rows are made as large as embeddings.
    """
    assert run.start is not None
    if (run.start / "preprocessor_config.json").exists():
        checkpoint.load_exported(model, "model.", run.start)
        return
    checkpoint.load_exported(model.language_model, "model.", run.start)
    if not checkpoint.load_master(model.visual, run.work, "tower"):
        return
    with torch.no_grad():
        index = torch.arange(min(256, len(store.pixels)), device=run.device)
        rows = model.visual(store.patches(index))
        table = model.language_model.embed_tokens.weight
        factor = table.square().mean().sqrt() / rows.square().mean().sqrt()
        for part in model.visual.merger.linear_fc2.parameters():
            part.mul_(factor)


def drafter_rows(run: TrainingRun, model: SeeingTarget) -> tuple[list[Tensor], Inputs]:
    """Rows of the target's outputs and of the corpus, and how the target embeds them."""
    file = run.target_dir / "tokenizer.json"
    docs = seeing_documents(run, model)
    docs += corpus.documents(file, run.rollouts // 4, "c", run.workers)
    packed = pack_pictured(docs, 7, run.tokenizer.token_to_id("<|image_pad|>"))
    print(f"drafter corpus: {len(docs)} documents, {len(packed.slot)} rows", flush=True)
    store = PictureTable(torch.from_numpy(packed.pixels).to(run.device))

    def embedded(*batch: Tensor) -> tuple[Tensor, PackedRows]:
        return inputs(model, store, *batch)

    return tensors(packed, packed.rows.answer, run.device), embedded


def tensors(packed: PicturedRows, third: np.ndarray, device: torch.device) -> list[Tensor]:
    """The rows as the loop's data: ids, positions, a weight, and what `inputs` needs of images."""
    parts = (packed.rows.ids, packed.rows.pos, third, packed.turn, packed.slot, packed.shown)
    return [torch.from_numpy(part).to(device) for part in parts]


def inputs(
    model: SeeingTarget,
    store: PictureTable,
    ids: Tensor,
    pos: Tensor,
    turn: Tensor,
    slot: Tensor,
    shown: Tensor,
) -> tuple[Tensor, PackedRows]:
    """Embedded tokens of packed rows [B, T, D], and the packing."""
    x = model.embed(ids.long(), slot, store.patches(shown.long()))
    return x, packed_rows(pos.long(), turn.long())


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
    tasks: Sequence[PicturedTask],
    shown: Shown,
    *,
    thinking: bool,
) -> list[GeneratedAnswer]:
    """Decode greedily with a picture, or without."""
    tokenizer, image = run.tokenizer, shown != "none"
    prompts = [prompt_ids(tokenizer, task, thinking, image=image) for task in tasks]
    pictures = [shown_picture(tasks, i, shown) for i in range(len(tasks))]
    pixels = [picture for picture in pictures if picture is not None]
    pad, images = tokenizer.token_to_id("<|image_pad|>"), None
    if pixels:
        images = prompt_images(model, prompts, np.stack(pixels), pad)
    usable, ends = tokenizer.get_vocab_size(), _ends(run)
    made = rollout(model.language_model, prompts, LONGEST, usable, ends, images)
    found: list[GeneratedAnswer] = []
    for i, task in enumerate(tasks):
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
    tasks = heldout_pictured(run.held)
    result: dict[str, dict[str, float]] = {}
    mask_id = run.tokenizer.token_to_id("<|audio_start|>")
    names = (*PICTURED_FAMILIES,)
    for thinking in (True, False):
        for shown in SHOWN if thinking else SHOWN[:1]:
            found = answers(model, run, tasks, shown, thinking=thinking)
            label = f"{shown}, thinking {'on' if thinking else 'off'}"
            show = 8 if shown == "its own" else 0
            result[f"valid, {label}"] = validity(run.tokenizer, found, show, names)
            variants = ("index", "without images", "time") if shown == "its own" else ("index",)
            for context in variants if shown in ("its own", "none") else ():
                lengths = accept_lengths(
                    model.language_model, drafter, found, mask_id, taps, context
                )
                made = [len(answer.made) for answer in found]
                cycles = sum(n / x for n, x in zip(made, lengths, strict=True))
                result[f"accept, {label}, {context}"] = {"all": sum(made) / cycles}
    for name, numbers in result.items():
        print(name, " ".join(f"{k}={v:.3f}" for k, v in numbers.items()), flush=True)
    return result


def seeing_documents(run: TrainingRun, model: SeeingTarget) -> list[Document]:
    """Greedy outputs of the target on training prompts with pictures, as documents."""
    file, pad = run.target_dir / "tokenizer.json", run.tokenizer.token_to_id("<|image_pad|>")
    drawn = pictured_documents(file, run.rollouts, "r", run.workers)
    close = run.tokenizer.encode(corpus.CLOSE).ids
    made: list[Document] = []
    start = time.time()
    for first in range(0, len(drawn), 1024):
        part = drawn[first : first + 1024]
        prompts = [corpus.given(doc, close) for doc in part]
        images = prompt_images(model, prompts, np.stack([doc.pixels for doc in part]), pad)
        usable = run.tokenizer.get_vocab_size()
        outputs = rollout(model.language_model, prompts, LONGEST, usable, _ends(run), images)
        for doc, prompt, output in zip(part, prompts, outputs, strict=True):
            ids = np.array(prompt + output, np.int16)
            weight = np.ones(len(ids), np.float32)
            made.append(PicturedDocument(ids, weight, len(prompt), doc.pixels, doc.content))
    print(f"rollouts: {len(made)} outputs, {time.time() - start:.0f} s", flush=True)
    return made
