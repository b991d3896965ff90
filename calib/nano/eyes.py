"""Trains the target with a vision tower: first the tower by itself, on what pictures show, then
both on tasks with pictures, among text documents so that planning from text is kept.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thor_dflash.calib.nano import checkpoint, corpus
from thor_dflash.calib.nano.corpus import Document
from thor_dflash.calib.nano.dims import NanoDrafterDims, NanoTargetDims, NanoTowerDims, tap_layers
from thor_dflash.calib.nano.drafter import ContextRows, NanoDrafter, block_loss, draw_anchors
from thor_dflash.calib.nano.evaluate import GeneratedAnswer, accept_lengths, validity
from thor_dflash.calib.nano.loop import (
    TrainingRun,
    autocast,
    compile_layers,
    mean_loss,
    optimise,
)
from thor_dflash.calib.nano.pictured_corpus import (
    LOOKS,
    OTHER,
    PicturedDocument,
    PicturedRows,
    draw_pictured,
    drawings,
    pack_pictured,
    prompt_ids,
    token_content,
    turns,
)
from thor_dflash.calib.nano.rollout import RolloutImages, rollout
from thor_dflash.calib.nano.target import PackedRows, packed_rows
from thor_dflash.calib.nano.vision import ImageRows, NanoTower, PictureTable, SeeingTarget
from thor_dflash.calib.planbench.drawing import LIDS, POWERS, SIDE, SLOTS
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
DRAFTER = Path("models/planner-nano/drafter")
"""The drafter whose weights that of a target with a tower begins with."""
TEXT = 0.2
"""Share of text documents."""
PICTURES_PER_STEP = 512
"""Pictures of a step of the tower's own training."""


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
        total = F.binary_cross_entropy_with_logits(looks, wanted[:, 3:].float()) * 40
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
    checkpoint.load_master(model, run.work, "probe")
    part = replace(run, rows=PICTURES_PER_STEP, seconds=run.tower_seconds)
    kept = max(1, len(pixels) // 50)

    def loss(index: Tensor) -> Tensor:
        return model.loss(store.patches(index), shows[index])

    optimise(part, model, "probe", loss, [torch.arange(kept, len(pixels), device=run.device)])
    held = torch.arange(kept, device=run.device)[: 4 * PICTURES_PER_STEP]
    wrong = model.wrong(store.patches(held), shows[held])
    print(f"tower: {100 * wrong:.2f} % of rows are read wrong", flush=True)
    checkpoint.save_master(model.visual, run.work, "tower")


class SeeingPair(nn.Module):
    """The target and its drafter, which learns from the target's taps while these change."""

    def __init__(self, run: TrainingRun) -> None:
        super().__init__()
        self.target = SeeingTarget(NanoTargetDims(), NanoTowerDims())
        # The steps of the optimiser are far too large for a tower that can see already.
        self.target.visual.requires_grad_(False)
        self.drafter = NanoDrafter(run.drafter_dims)


def train_seeing(run: TrainingRun) -> None:
    """Train the target to use its tower, and the drafter with it. They begin with the weights of
    `run.start`, of the exported drafter, and of the tower that `train_tower` saved.

    The corpus is drawn while the layers are compiled.
    """
    start, pad = time.time(), run.tokenizer.token_to_id("<|image_pad|>")
    with ProcessPoolExecutor(run.workers) as pool:
        drawn = _corpus(run, pool)
        pair = SeeingPair(run).to(run.device)
        loss = _pair_loss(run, pair)
        _compile(run, loss)
        pair.zero_grad(set_to_none=True)
        print(f"compiled: {time.time() - start:.0f} s", flush=True)
        docs = [_weighted(doc) for part in drawn for doc in part.result()]
        packed = pack_pictured(docs, 0, pad)
    print(f"corpus: {len(packed.slot)} rows, {time.time() - start:.0f} s", flush=True)
    store = PictureTable(torch.from_numpy(packed.pixels).to(run.device))
    resumed = checkpoint.load_master(pair, run.work, "pair")
    if not resumed:
        _start(pair, run, store)
    count = sum(p.numel() for p in pair.target.parameters())
    print(f"target: {count:,} parameters, resumed: {resumed}", flush=True)
    data = tensors(packed, (packed.rows.weight, packed.rows.answer), run.device)
    optimise(run, pair, "pair", lambda *batch: loss(store, *batch), data)
    checkpoint.save_master(pair.target, run.work, "seeing")
    checkpoint.save_master(pair.drafter, run.work, pair.drafter.dims.stem)


def _corpus(run: TrainingRun, pool: ProcessPoolExecutor) -> list[Future[list[Document]]]:
    """Have documents drawn: pictured ones, and few in text."""
    file, tag = run.target_dir / "tokenizer.json", f"e{run.begin}/"
    few = round(TEXT * run.docs)
    found: list[Future[list[Document]]] = []
    for draw, count in ((draw_pictured, run.docs - few), (corpus.draw_documents, few)):
        share = -(-count // run.workers)
        for first in range(0, count, share):
            found.append(pool.submit(draw, (file, tag, first, min(count, first + share))))
    return found


def _weighted(doc: Document) -> Document:
    """A document in text with less weight, so that facts of pictures are most of the loss."""
    if isinstance(doc, PicturedDocument):
        return doc
    return replace(doc, weight=2 * OTHER * doc.weight)


def _pair_loss(run: TrainingRun, pair: SeeingPair) -> Callable[..., Tensor]:
    """The loss of a batch: (pictures, ids, pos, weight, answer, turn, slot, shown) -> scalar."""
    model, drafter = pair.target.language_model, pair.drafter
    entropy = compile_layers(run, model.layers, mean_loss)
    taps = tuple(tap_layers(model.dims.layers, drafter.dims.taps))
    mask_id, table = run.tokenizer.token_to_id("<|audio_start|>"), model.embed_tokens

    def loss(
        store: PictureTable,
        ids: Tensor,
        pos: Tensor,
        weight: Tensor,
        answer: Tensor,
        *images: Tensor,
    ) -> Tensor:
        ids, pos = ids.long(), pos.long()
        x, rows = inputs(pair.target, store, ids, pos, *images)
        hidden, kept = model(x, rows, run.quant, taps)
        seen = weight[:, 1:] * (pos[:, 1:] > 0)
        value = entropy(hidden[:, :-1], table.weight, ids[:, 1:], seen)
        context = ContextRows(ids, pos, answer, torch.cat(kept, -1).detach())
        anchors = draw_anchors(answer, run.anchors)
        fixed = table.weight.detach()
        return value + block_loss(drafter, fixed, context, anchors, mask_id, mean_loss)

    return loss


def _compile(run: TrainingRun, loss: Callable[..., Tensor]) -> None:
    """Run a step on rows of nothing."""
    size = (run.rows, corpus.ROW)
    # Layers are compiled for the strides that they see: none of these may be a view.
    pos = torch.arange(corpus.ROW, device=run.device).repeat(run.rows, 1)
    store = PictureTable(torch.zeros(1, SIDE, SIDE, dtype=torch.uint8, device=run.device))
    answer = torch.ones(size, dtype=torch.bool, device=run.device)
    slot = torch.full(size, -1, device=run.device)
    batch = (
        torch.zeros_like(pos),
        pos,
        answer.float(),
        answer,
        pos[..., None].repeat(1, 1, 3),
        slot,
    )
    with autocast(run):
        value = loss(store, *batch, torch.zeros(run.rows, 1, device=run.device))
    value.backward()


def _start(pair: SeeingPair, run: TrainingRun, store: PictureTable) -> None:
    """Take the weights of an exported target, of an exported drafter, and of the tower that was
    trained by itself. Its rows are made about as large as embeddings.
    """
    first = NanoDrafter(NanoDrafterDims()).to(run.device)
    checkpoint.load_exported(first, "", DRAFTER)
    _without_middle(first, pair.drafter)
    if run.start is not None:
        seeing = (run.start / "preprocessor_config.json").exists()
        prefix = "model.language_model." if seeing else "model."
        checkpoint.load_exported(pair.target.language_model, prefix, run.start)
    visual = pair.target.visual
    if not checkpoint.load_master(visual, run.work, "tower"):
        raise ValueError(f"{run.work} must hold a tower, of the stage `tower` (got none)")
    with torch.no_grad():
        index = torch.arange(min(256, len(store.pixels)), device=run.device)
        rows = visual(store.patches(index))
        table = pair.target.language_model.embed_tokens.weight
        factor = 2 * table.square().mean().sqrt() / rows.square().mean().sqrt()
        for part in visual.merger.linear_fc2.parameters():
            part.mul_(factor)


def _without_middle(first: NanoDrafter, short: NanoDrafter) -> None:
    """Give a drafter of fewer layers the weights of the first ones and of the last one."""
    last, end = len(first.layers) - 1, len(short.layers) - 1
    state = first.state_dict()
    short.load_state_dict(
        {n: state[n.replace(f"layers.{end}.", f"layers.{last}.")] for n in short.state_dict()}
    )


def tensors(
    packed: PicturedRows, more: tuple[np.ndarray, ...], device: torch.device
) -> list[Tensor]:
    """The rows as the loop's data: ids, positions, `more`, and what `inputs` needs of images."""
    parts = (packed.rows.ids, packed.rows.pos, *more, packed.turn, packed.slot, packed.shown)
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
