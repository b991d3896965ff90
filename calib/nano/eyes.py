"""Trains the target with a vision tower: first the tower by itself, on what pictures show, then the
target on tasks with pictures, among text documents so that planning from text is kept, then its
drafter.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thor_dflash.calib.nano import checkpoint, corpus
from thor_dflash.calib.nano.dims import NanoDrafterDims, NanoTargetDims, NanoTowerDims, tap_layers
from thor_dflash.calib.nano.drafter import ContextRows, NanoDrafter, block_loss, draw_anchors
from thor_dflash.calib.nano.loop import (
    Loss,
    TrainingRun,
    autocast,
    compile_layers,
    mean_loss,
    optimise,
)
from thor_dflash.calib.nano.pictured_corpus import (
    FACTS,
    SIZES,
    TOKENS,
    PicturedRows,
    draw_rows,
    drawings,
    join_rows,
)
from thor_dflash.calib.nano.target import packed_rows
from thor_dflash.calib.nano.vision import (
    ImageRows,
    NanoTower,
    PictureTable,
    SeeingTarget,
    replaced,
)

DRAFTER = Path("models/planner-nano/drafter")
"""The drafter whose weights that of a target with a tower begins with."""
TEXT = 0.15
"""Share of text documents."""
PICTURES_PER_STEP = 512
"""Pictures of a step of the tower's own training."""
ROW_SIZE = 0.1
"""Size of a direction: the root mean square of planner-nano's embeddings is 0.085."""
EXPORT_EVERY = 60.0
"""Seconds between exports while the target is trained."""
DOCS_PER_ROW = 6
"""More documents than a row holds."""


def directions(width: int) -> Tensor:
    """What each value of each field adds to the row of an image's token, [sum of SIZES, D]: a
    random direction of its own, but nothing for no lid, lamp or object.
    """
    found = torch.randn(sum(SIZES), width, generator=torch.Generator().manual_seed(0)) * ROW_SIZE
    found[_first(found)[1:]] = 0
    return found


def rows_of(content: Tensor, table: Tensor) -> Tensor:
    """The rows [.., D] of what tokens show [.., fields], by the table of `directions`."""
    return F.embedding(content.long() + _first(content), table).sum(-2)


def _first(like: Tensor) -> Tensor:
    """The number of each field's first value."""
    return torch.tensor([sum(SIZES[:i]) for i in range(len(SIZES))], device=like.device)


class PictureProbe(nn.Module):
    """The tower, and a linear layer that reads from each of its rows what the area there shows."""

    table: Tensor

    def __init__(self, dims: NanoTowerDims) -> None:
        super().__init__()
        self.visual = NanoTower(dims)
        self.read = nn.Linear(dims.out, sum(SIZES))
        # Rows of size 1 suit the optimiser's steps.
        self.register_buffer("table", directions(dims.out) / ROW_SIZE)

    def loss(self, patches: Tensor, content: Tensor) -> Tensor:
        """Of what tokens show [P, tokens, fields]: the cross entropy of reading it from the rows,
        and the squared distance of these from the sums of directions, as a share of that of 0.
        """
        rows, wanted = self.visual(patches).float(), rows_of(content, self.table)
        total = 20 * F.mse_loss(rows, wanted) / wanted.square().mean()
        scores = self.read(rows).float().flatten(0, 1)
        for index, kind in enumerate(scores.split(SIZES, -1)):
            total = total + F.cross_entropy(kind, content[..., index].flatten().long())
        return total

    @torch.no_grad()
    def wrong(self, patches: Tensor, content: Tensor) -> tuple[float, float]:
        """Share of the rows of which anything is read wrong, and their distance from the sums of
        directions, relative to these.
        """
        rows, wanted = self.visual(patches).float(), rows_of(content, self.table)
        kinds = self.read(rows).float().split(SIZES, -1)
        read = torch.stack([kind.argmax(-1) for kind in kinds], -1)
        right = (read == content).all(-1).float().mean()
        return 1 - right.item(), ((rows - wanted).norm() / wanted.norm()).item()


def _drawings(run: TrainingRun) -> tuple[np.ndarray, np.ndarray]:
    start = time.time()
    found = drawings(run.pictures, "w", run.workers)
    print(f"pictures: {len(found[0])}, {time.time() - start:.0f} s", flush=True)
    return found


def _train_tower(run: TrainingRun, pixels: np.ndarray, content: np.ndarray) -> None:
    """Train the tower on pictures [P, side, side] and what their tokens show. Saved as `tower`."""
    store = PictureTable(torch.from_numpy(pixels).to(run.device))
    shows = torch.from_numpy(content).to(run.device)
    model = PictureProbe(NanoTowerDims()).to(run.device)
    checkpoint.load_master(model, run.work, "probe")
    seconds = run.tower_seconds
    alone = replace(run, rows=PICTURES_PER_STEP, seconds=seconds, begin=0.0, finish=1.0)
    kept = max(1, len(pixels) // 50)

    def loss(index: Tensor) -> Tensor:
        return model.loss(store.patches(index), shows[index])

    optimise(alone, model, "probe", loss, [torch.arange(kept, len(pixels), device=run.device)])
    held = torch.arange(kept, device=run.device)[: 4 * PICTURES_PER_STEP]
    with autocast(run):
        wrong, far = model.wrong(store.patches(held), shows[held])
    print(f"tower: {100 * wrong:.2f} % of rows are read wrong, distance {far:.3f}", flush=True)
    with torch.no_grad():
        for part in model.visual.merger.linear_fc2.parameters():
            part.mul_(ROW_SIZE)
    checkpoint.save_master(model.visual, run.work, "tower")


class SeeingPair(nn.Module):
    """The target and its drafter."""

    def __init__(self, run: TrainingRun) -> None:
        super().__init__()
        self.target = SeeingTarget(NanoTargetDims(), NanoTowerDims())
        # The steps of the optimiser are far too large for a tower that can see already.
        self.target.visual.requires_grad_(False)
        self.drafter = NanoDrafter(run.drafter_dims)


def train_seeing(run: TrainingRun, export: Callable[[TrainingRun], None]) -> None:
    """Train the target to use its tower, and then the drafter for it. They begin with the weights
    of `run.start`, of an exported drafter, and of a tower that is trained by itself before.

    The corpus is drawn while the tower is trained, if there is none, and the layers are compiled.
    `export` is called now and then.
    """
    start, pair = time.time(), SeeingPair(run)
    ready = _start(pair, run)
    # Processes start before anything is on a GPU.
    pictures = None if ready else _drawings(run)
    with ProcessPoolExecutor(run.workers) as pool:
        drawn = _corpus(run, pool)
        pair.to(run.device)
        if pictures is not None:
            _train_tower(run, *pictures)
            checkpoint.load_master(pair.target.visual, run.work, "tower")
        losses = _Losses(run, pair)
        losses.compile()
        pair.zero_grad(set_to_none=True)
        print(f"compiled: {time.time() - start:.0f} s", flush=True)
        held, *parts = (part.result() for part in drawn)
    packed = join_rows(parts)
    print(f"corpus: {len(packed.slot)} rows, {time.time() - start:.0f} s", flush=True)
    data, unseen = _tensors(run, packed), [part[: run.rows] for part in _tensors(run, held)]
    losses.images = _picture_rows(pair.target, run, packed.pixels)
    other = _picture_rows(pair.target, run, held.pixels)
    print(f"training begins: {time.time() - start:.0f} s", flush=True)
    exported = time.time()

    def watch(step: int) -> None:
        nonlocal exported
        losses.facts(other, unseen)
        if time.time() - exported > EXPORT_EVERY:
            _export(run, pair, export)
            exported = time.time()

    optimise(run, pair.target, "seeing", losses.target, data, watch)
    losses.facts(other, unseen)
    _export(run, pair, export)
    if run.drafter_seconds > 0:
        part = replace(run, seconds=run.drafter_seconds)
        optimise(part, pair.drafter, pair.drafter.dims.stem, losses.drafter, data)


def _export(run: TrainingRun, pair: SeeingPair, export: Callable[[TrainingRun], None]) -> None:
    checkpoint.save_master(pair.target, run.work, "seeing")
    checkpoint.save_master(pair.drafter, run.work, pair.drafter.dims.stem)
    export(run)


def _corpus(run: TrainingRun, pool: ProcessPoolExecutor) -> list[Future[PicturedRows]]:
    """Have rows drawn: some only for measuring, then pictured ones, and few in text."""
    file, tag = run.target_dir / "tokenizer.json", f"e{run.begin}/"
    few = round(TEXT * run.docs)
    found = [pool.submit(draw_rows, (file, "h", 0, DOCS_PER_ROW * run.rows, True))]
    for pictured, count in ((True, run.docs - few), (False, few)):
        share = -(-count // (4 * run.workers))
        for first in range(0, count, share):
            part = (file, tag, first, min(count, first + share), pictured)
            found.append(pool.submit(draw_rows, part))
    return found


class _Losses:
    """The losses of batches of packed rows: ids, pos, weight, kind, answer, turn, slot, shown."""

    def __init__(self, run: TrainingRun, pair: SeeingPair) -> None:
        self.run, self.pair = run, pair
        self.images = torch.zeros(1, TOKENS, NanoTargetDims().hidden, device=run.device)
        """[P, TOKENS, D] rows of the pictures."""
        self.entropy: Loss = compile_layers(run, pair.target.language_model.layers, mean_loss)
        dims = pair.drafter.dims
        self.taps = tuple(tap_layers(NanoTargetDims().layers, dims.taps))
        self.mask_id = run.tokenizer.token_to_id("<|audio_start|>")
        for layer in pair.drafter.layers if run.compiled else ():
            layer.compile()

    def hidden(self, images: Tensor, batch: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """The target's last rows [B, T, D], and those of the taps."""
        ids, pos, *_, turn, slot, shown = batch
        model = self.pair.target.language_model
        rows = ImageRows(slot, images[shown.long()].flatten(1, 2))
        x = replaced(model.embed(ids.long()), rows)
        return model(x, packed_rows(pos.long(), turn.long()), self.run.quant, self.taps)

    def target(self, *batch: Tensor) -> Tensor:
        """Of the target's next tokens."""
        ids, pos, weight, *_ = batch
        hidden, _ = self.hidden(self.images, [*batch])
        seen = weight[:, 1:] * (pos[:, 1:] > 0)
        table = self.pair.target.language_model.embed_tokens.weight
        return self.entropy(hidden[:, :-1], table, ids.long()[:, 1:], seen)

    def drafter(self, *batch: Tensor) -> Tensor:
        """Of the drafter's blocks; the target stays as it is."""
        ids, pos, _, _, answer, *_ = batch
        # With gradients, as otherwise the layers would be compiled once more.
        _, kept = self.hidden(self.images, [*batch])
        context = ContextRows(ids.long(), pos.long(), answer, torch.cat(kept, -1).detach())
        table = self.pair.target.language_model.embed_tokens.weight.detach()
        anchors = draw_anchors(answer, self.run.anchors)
        return block_loss(self.pair.drafter, table, context, anchors, self.mask_id, mean_loss)

    def compile(self) -> None:
        """Run a step of both on rows of nothing."""
        run, size = self.run, (self.run.rows, corpus.ROW)
        # Layers are compiled for the strides that they see: none of these may be a view.
        pos = torch.arange(corpus.ROW, device=run.device).repeat(run.rows, 1)
        answer = torch.ones(size, dtype=torch.bool, device=run.device)
        slot = torch.full(size, -1, device=run.device)
        turn, shown = pos[..., None].repeat(1, 1, 3), torch.zeros_like(pos[:, :1])
        batch = (torch.zeros_like(pos), pos, answer.float(), pos, answer, turn, slot, shown)
        with autocast(run):
            value = self.target(*batch) + self.drafter(*batch)
        value.backward()

    def facts(self, images: Tensor, batch: list[Tensor]) -> None:
        """Print the share of the facts of each kind whose tokens are all the target's best ones."""
        ids, kind = batch[0][:, 1:].long(), batch[3][:, 1:]
        with autocast(self.run):
            hidden, _ = self.hidden(images, batch)
            scores = F.linear(hidden[:, :-1][kind > 0].detach(), self._table)
        right = scores.argmax(-1) == ids[kind > 0]
        kinds = kind[kind > 0]
        shares = [100 * right[kinds == n].float().mean().item() for n in range(1, len(FACTS) + 1)]
        named = ", ".join(f"{n} {x:.1f}" for n, x in zip(FACTS, shares, strict=True))
        print(f"  right, %: {100 * right.float().mean().item():.2f}; {named}", flush=True)

    @property
    def _table(self) -> Tensor:
        return self.pair.target.language_model.embed_tokens.weight.detach()


def _start(pair: SeeingPair, run: TrainingRun) -> bool:
    """Load master weights, or take the weights of an exported target, of an exported drafter, and
    of the tower that was trained by itself. Returns whether there is a tower.
    """
    dims = pair.drafter.dims
    resumed = checkpoint.load_master(pair.target, run.work, "seeing")
    if not checkpoint.load_master(pair.drafter, run.work, dims.stem):
        _start_drafter(pair.drafter, run)
    count = sum(p.numel() for p in pair.target.parameters())
    print(f"target: {count:,} parameters, resumed: {resumed}", flush=True)
    if resumed:
        return True
    if run.start is not None and (run.start / "preprocessor_config.json").exists():
        checkpoint.load_exported(pair.target, "model.", run.start)
        return True
    if run.start is not None:
        checkpoint.load_exported(pair.target.language_model, "model.", run.start)
    return checkpoint.load_master(pair.target.visual, run.work, "tower")


def _start_drafter(drafter: NanoDrafter, run: TrainingRun) -> None:
    """Take the weights of the drafter beside the exported target, if that sees, or those of the
    first and the last layers of planner-nano's.
    """
    if run.start is not None and (run.start / "preprocessor_config.json").exists():
        checkpoint.load_exported(drafter, "", run.start.parent / "drafter")
        return
    first = NanoDrafter(NanoDrafterDims())
    checkpoint.load_exported(first, "", DRAFTER)
    _without_middle(first, drafter)


def _without_middle(first: NanoDrafter, short: NanoDrafter) -> None:
    """Give a drafter of fewer layers the weights of the first ones and of the last one."""
    last, end = len(first.layers) - 1, len(short.layers) - 1
    state = first.state_dict()
    short.load_state_dict(
        {n: state[n.replace(f"layers.{end}.", f"layers.{last}.")] for n in short.state_dict()}
    )


def _tensors(run: TrainingRun, packed: PicturedRows) -> list[Tensor]:
    """The rows as the loop's data."""
    rows = packed.rows
    parts = (rows.ids, rows.pos, rows.weight, packed.kind, rows.answer)
    more = (packed.turn, packed.slot, packed.shown)
    return [torch.from_numpy(part).to(run.device) for part in (*parts, *more)]


@torch.no_grad()
def _picture_rows(model: SeeingTarget, run: TrainingRun, pixels: np.ndarray) -> Tensor:
    """The tower's rows [P, TOKENS, D] of pictures [P, side, side]; it stays as it is."""
    found: list[Tensor] = []
    for first in range(0, len(pixels), PICTURES_PER_STEP):
        part = torch.from_numpy(pixels[first : first + PICTURES_PER_STEP]).to(run.device)
        store = PictureTable(part)
        with autocast(run):
            found.append(model.visual(store.patches(torch.arange(len(part), device=run.device))))
    return torch.cat(found)
