"""What the training stages share: the command line's values, compilation, and the loop of steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor, nn

from thor_dflash.calib.nano import checkpoint
from thor_dflash.calib.nano.dims import DFLASH2, NanoDrafterDims
from thor_dflash.calib.nano.optim import Optimiser, rate_at

Loss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

SAVE_EVERY = 100
"""Steps between saves of the master weights."""
WATCH_EVERY = 50
"""Steps between calls of what watches a run."""


@dataclass(frozen=True)
class TrainingRun:
    """The parsed command line."""

    models: Path
    work: Path
    device: torch.device
    docs: int
    rows: int
    """Packed rows per step."""
    anchors: int
    """Blocks per packed row, for the drafter."""
    steps: int
    seconds: float
    begin: float
    """Fraction of the learning-rate schedule at which this call starts; a long run may be split
    into several calls.
    """
    finish: float
    """Fraction at which it ends."""
    workers: int
    compiled: bool
    rollouts: int
    held: int
    drafter: int
    """1: DFlash; 2: DFlash2."""
    quant: bool
    """Whether the target is trained through NVFP4 and an FP8 cache, and exported as NVFP4. If not,
    it is a BF16 model, to test quantising after training.
    """
    eyes: bool
    """Whether the target has a vision tower."""
    pictures: int
    """Pictures that the tower is trained on by itself."""
    tower_seconds: float
    """Time of that training."""
    drafter_seconds: float
    """Time in which the drafter of a target with a tower is trained."""
    start: Path | None
    """Exported target whose weights training starts from, if there are no master weights."""

    @property
    def drafter_dims(self) -> NanoDrafterDims:
        """Sizes of the drafter."""
        if self.drafter == 2:
            return DFLASH2
        # Beside a tower, a layer less keeps the model small enough for git.
        return NanoDrafterDims(layers=2) if self.eyes else NanoDrafterDims()

    @property
    def target_dir(self) -> Path:
        """The target's checkpoint directory."""
        return self.models / "target"

    @property
    def tokenizer(self) -> Tokenizer:
        """The trained tokenizer."""
        return Tokenizer.from_file(str(self.target_dir / "tokenizer.json"))


def mean_loss(hidden: Tensor, table: Tensor, wanted: Tensor, weight: Tensor) -> Tensor:
    """Return the weighted mean cross entropy of normed rows [.., D] for ids [..], tied head."""
    scores = F.linear(hidden, table).float().flatten(0, -2)
    each = F.cross_entropy(scores, wanted.flatten(), reduction="none")
    return (each * weight.flatten()).sum() / weight.sum()


def compile_layers(run: TrainingRun, layers: nn.ModuleList, loss: Loss) -> Loss:
    """Compile the loss, and a model layer by layer, which takes a tenth of the time of compiling
    it as a whole.
    """
    if not run.compiled:
        return loss
    for layer in layers:
        layer.compile()
    return torch.compile(loss)


def autocast(run: TrainingRun) -> torch.autocast:
    """Products in BF16 on a GPU."""
    return torch.autocast(run.device.type, torch.bfloat16, enabled=run.device.type == "cuda")


def optimise(
    run: TrainingRun,
    model: nn.Module,
    stem: str,
    loss: Callable[..., Tensor],
    data: Sequence[Tensor],
    watch: Callable[[int], None] = lambda step: None,
) -> None:
    """Minimise `loss(*batch)` on batches of rows of `data`, for the run's time or steps. Master
    weights are saved as `stem`. `watch` is called now and then.
    """
    optimiser = Optimiser(model)
    cast = autocast(run)
    total, order = data[0].shape[0], torch.empty(0, dtype=torch.long)
    rng = Random(1)
    begun = start = time.time()
    for step in range(run.steps):
        if len(order) < run.rows:
            generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
            order = torch.randperm(total, generator=generator)
        chosen, order = order[: run.rows].to(run.device), order[run.rows :]
        with cast:
            value = loss(*(part[chosen] for part in data))
        value.backward()
        progress = max(step / run.steps, (time.time() - start) / run.seconds)
        place = run.begin + (run.finish - run.begin) * min(1.0, progress)
        optimiser.step(rate_at(place) * min(1.0, (step + 1) / 50))
        if step % 100 == 0 or step == 5:
            print(
                f"{stem} step {step} loss {value.item():.4f} progress {progress:.3f} "
                f"{time.time() - begun:.0f} s",
                flush=True,
            )
        if step == 5:
            # Compilation is done: the schedule's time starts here.
            start = time.time()
        if step % SAVE_EVERY == SAVE_EVERY - 1:
            checkpoint.save_master(model, run.work, stem)
        if step % WATCH_EVERY == 0:
            watch(step)
        if progress >= 1.0:
            break
    checkpoint.save_master(model, run.work, stem)
    print(f"{stem}: {step + 1} steps of {run.rows} rows, {time.time() - begun:.0f} s", flush=True)
