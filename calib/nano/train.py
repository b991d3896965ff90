"""Train planner-nano stage by stage: ``python -m thor_dflash.calib.nano.train --stage
tokenizer|target|drafter|export|eval``.

Master weights are kept in ``--work`` between stages and calls, so that an interrupted run resumes
from its last save.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from thor_dflash.calib.nano import checkpoint, corpus, evaluate
from thor_dflash.calib.nano.dims import DFLASH2, NanoDrafterDims, NanoTargetDims, tap_layers
from thor_dflash.calib.nano.drafter import NanoDrafter, blocks
from thor_dflash.calib.nano.optim import Optimiser, rate_at
from thor_dflash.calib.nano.rollout import rollout
from thor_dflash.calib.nano.target import NanoTarget, packed_rows
from thor_dflash.calib.nano.tokenizer import SPECIAL, train_tokenizer

Loss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

SAVE_EVERY = 100
"""Steps between saves of the master weights."""


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
    start: Path | None
    """Exported target whose weights training starts from, if there are no master weights."""

    @property
    def drafter_dims(self) -> NanoDrafterDims:
        """Sizes of the drafter."""
        return DFLASH2 if self.drafter == 2 else NanoDrafterDims()

    @property
    def target_dir(self) -> Path:
        """The target's checkpoint directory."""
        return self.models / "target"

    @property
    def tokenizer(self) -> Tokenizer:
        """The trained tokenizer."""
        return Tokenizer.from_file(str(self.target_dir / "tokenizer.json"))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--stage",
        nargs="+",
        required=True,
        choices=["tokenizer", "target", "drafter", "export", "eval"],
    )
    parser.add_argument("--models", type=Path, default=Path("models/planner-nano"))
    parser.add_argument("--work", type=Path, default=Path("build/nano"))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--device", type=torch.device, default=device)
    parser.add_argument("--docs", type=int, default=400_000)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--anchors", type=int, default=48)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument(
        "--seconds", type=float, default=400.0, help="training time of each trained stage"
    )
    parser.add_argument(
        "--begin", type=float, default=0.0, help="share of the schedule at which this call starts"
    )
    parser.add_argument(
        "--finish", type=float, default=1.0, help="share of the schedule at which this call ends"
    )
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--no-compile", dest="compiled", action="store_false")
    parser.add_argument(
        "--rollouts", type=int, default=24_576, help="target outputs the drafter learns from"
    )
    parser.add_argument(
        "--drafter", type=int, choices=(1, 2), default=1, help="1: DFlash; 2: DFlash2"
    )
    parser.add_argument(
        "--no-quant", dest="quant", action="store_false", help="train and export a BF16 target"
    )
    parser.add_argument("--start", type=Path, help="exported target to start from")
    parser.add_argument("--held", type=int, default=600, help="held-out tasks to evaluate")
    return parser


def main(argv: list[str] | None = None) -> None:
    """Parse the command line and run one or more stages in order."""
    args = _parser().parse_args(argv)
    options = vars(args)
    chosen = options.pop("stage")
    run = TrainingRun(**options)
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = True
    stages = {
        "tokenizer": lambda: train_tokenizer(run.target_dir, 4000),
        "target": lambda: train_target(run),
        "drafter": lambda: train_drafter(run),
        "export": lambda: export(run),
        "eval": lambda: evaluate_all(run),
    }
    for stage in chosen:
        start = time.time()
        stages[stage]()
        print(f"stage {stage} took {time.time() - start:.0f} s", flush=True)


def train_target(run: TrainingRun) -> None:
    """Train the target on the corpus, unless `no-quant` with quantised weights in every forward
    pass.
    """
    start = time.time()
    docs = corpus.documents(
        run.target_dir / "tokenizer.json", run.docs, f"t{run.begin}/", run.workers
    )
    rows = corpus.pack(docs, 0)
    print(
        f"corpus: {len(docs)} documents, {len(rows.ids)} rows, {time.time() - start:.0f} s",
        flush=True,
    )
    model = NanoTarget(NanoTargetDims()).to(run.device)
    model.cache_as_fp8(run.quant)
    resumed = checkpoint.load_master(model, run.work, "target")
    if run.start is not None and not resumed:
        checkpoint.load_exported(model, "model.", run.start)
    print(
        f"target: {sum(p.numel() for p in model.parameters()):,} parameters, resumed: {resumed}",
        flush=True,
    )
    data = [torch.from_numpy(a).to(run.device) for a in (rows.ids, rows.pos, rows.weight)]

    entropy = _compile(run, model, mean_loss)

    def loss(ids: Tensor, pos: Tensor, weight: Tensor) -> Tensor:
        hidden, _ = model(ids, packed_rows(pos), run.quant)
        seen = weight[:, 1:] * (pos[:, 1:] > 0)
        return entropy(hidden[:, :-1], model.embed_tokens.weight, ids[:, 1:], seen)

    _optimise(run, model, "target", loss, data)


def train_drafter(run: TrainingRun) -> None:
    """Train the drafter on greedy outputs of the frozen exported target; one in five documents is
    from the corpus instead.
    """
    target = load_target(run)
    tokenizer = run.tokenizer
    docs = target_documents(run, target) + corpus.documents(
        run.target_dir / "tokenizer.json", run.rollouts // 4, "c", run.workers
    )
    rows = corpus.pack(docs, 7)
    print(f"drafter corpus: {len(docs)} documents, {len(rows.ids)} rows", flush=True)
    model = NanoDrafter(run.drafter_dims).to(run.device)
    stem = model.dims.stem
    resumed = checkpoint.load_master(model, run.work, stem)
    if model.dims.second and not resumed:
        # As a DFlash drafter until its convolutions and its selector have learnt something.
        checkpoint.load_exported(model, "", run.models / "drafter", partly=True)
    print(
        f"drafter: {sum(p.numel() for p in model.parameters()):,} parameters, resumed: {resumed}",
        flush=True,
    )
    data = [torch.from_numpy(a).to(run.device) for a in (rows.ids, rows.pos, rows.answer)]
    mask_id = tokenizer.token_to_id("<|audio_start|>")
    taps = tuple(tap_layers(target.dims.layers, model.dims.taps))
    size = model.dims.block
    _compile(run, target, mean_loss)
    entropy = _compile(run, model, mean_loss)
    decay = torch.exp(-torch.arange(size - 1, device=run.device) / model.dims.gamma)

    selector = model.candidate_selector

    def loss(ids: Tensor, pos: Tensor, answer: Tensor) -> Tensor:
        with torch.no_grad():
            _, kept = target(ids, packed_rows(pos), False, taps)
        anchors = torch.topk(
            torch.rand(ids.shape, device=ids.device) * answer, run.anchors, dim=1
        ).indices
        placed = blocks(model.dims, ids, pos, anchors, mask_id)
        out = model(target.embed_tokens.weight, torch.cat(kept, -1), pos, placed, True)
        hidden = out.unflatten(1, (-1, size))[:, :, 1:]
        ahead = anchors[:, :, None] + torch.arange(1, size, device=ids.device)
        inside = (ahead < ids.shape[1]) & answer.gather(
            1, (ahead - 1).clamp(max=ids.shape[1] - 1).flatten(1)
        ).view(ahead.shape)
        wanted = ids.gather(1, ahead.clamp(max=ids.shape[1] - 1).flatten(1))
        # The first False in `answer` ends the document; later tokens belong to the next one.
        weight = inside.int().cumprod(-1) * decay * answer.gather(1, anchors)[..., None]
        value = entropy(hidden, target.embed_tokens.weight, wanted, weight)
        if selector is None:
            return value
        before = ids.gather(1, (ahead - 1).clamp(max=ids.shape[1] - 1).flatten(1))
        chosen = (before.view(ahead.shape), wanted.view(ahead.shape), weight)
        return value + selector.loss(hidden, target.embed_tokens.weight, *chosen)

    _optimise(run, model, stem, loss, data)


def mean_loss(hidden: Tensor, table: Tensor, wanted: Tensor, weight: Tensor) -> Tensor:
    """Return the weighted mean cross entropy of normed rows [.., D] for ids [..], tied head."""
    scores = F.linear(hidden, table).float().flatten(0, -2)
    each = F.cross_entropy(scores, wanted.flatten(), reduction="none")
    return (each * weight.flatten()).sum() / weight.sum()


def _compile(run: TrainingRun, model: NanoTarget | NanoDrafter, loss: Loss) -> Loss:
    """Compile the loss, and the model layer by layer, which takes a tenth of the time of compiling
    it as a whole.
    """
    if not run.compiled:
        return loss
    for layer in model.layers:
        layer.compile()
    return torch.compile(loss)


def target_documents(run: TrainingRun, target: NanoTarget) -> list[corpus.Document]:
    """Return greedy outputs of the target on training prompts, as documents."""
    start = time.time()
    tokenizer = run.tokenizer
    drawn = corpus.documents(run.target_dir / "tokenizer.json", run.rollouts, "r", run.workers)
    close = tokenizer.encode(corpus.CLOSE).ids
    ends = (tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|endoftext|>"))
    made: list[corpus.Document] = []
    for first in range(0, len(drawn), 1024):
        prompts = [_given(doc, close) for doc in drawn[first : first + 1024]]
        outputs = rollout(target, prompts, 640, tokenizer.get_vocab_size(), ends)
        for prompt, output in zip(prompts, outputs, strict=True):
            ids = np.array(prompt + output, np.int16)
            made.append(corpus.Document(ids, np.ones(len(ids), np.float32), len(prompt)))
    print(f"rollouts: {len(made)} outputs, {time.time() - start:.0f} s", flush=True)
    return made


def _given(doc: corpus.Document, close: list[int]) -> list[int]:
    """Return the prompt for the target: the document's prompt, followed by its cut thinking and the
    closing text if it has those.
    """
    ids = doc.ids.tolist()
    forced = np.flatnonzero(doc.weight == 0)
    return ids[: int(forced[0]) + len(close)] if len(forced) else ids[: doc.prompt]


def _optimise(
    run: TrainingRun,
    model: torch.nn.Module,
    stem: str,
    loss: Callable[[Tensor, Tensor, Tensor], Tensor],
    data: list[Tensor],
) -> None:
    optimiser = Optimiser(model)
    cast = torch.autocast(run.device.type, torch.bfloat16, enabled=run.device.type == "cuda")
    total, order = data[0].shape[0], torch.empty(0, dtype=torch.long)
    rng = Random(1)
    begun = time.time()
    start = begun
    for step in range(run.steps):
        if len(order) < run.rows:
            generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
            order = torch.randperm(total, generator=generator)
        chosen, order = order[: run.rows].to(run.device), order[run.rows :]
        ids, pos, third = (part[chosen] for part in data)
        with cast:
            value = loss(ids.long(), pos.long(), third)
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
        if progress >= 1.0:
            break
    checkpoint.save_master(model, run.work, stem)
    print(f"{stem}: {step + 1} steps of {run.rows} rows, {time.time() - begun:.0f} s", flush=True)


def load_target(run: TrainingRun) -> NanoTarget:
    """Load the target with the weights of its exported checkpoint, frozen."""
    target = NanoTarget(NanoTargetDims()).to(run.device)
    target.cache_as_fp8(run.quant)
    checkpoint.load_exported(target, "model.", run.target_dir)
    return target.requires_grad_(False)


def export(run: TrainingRun) -> None:
    """Write the checkpoint directories from the master weights. Without those, existing exported
    weights are kept, or initial weights are exported if there are none.
    """
    tokenizer = run.tokenizer
    special = {text: tokenizer.token_to_id(text) for text in SPECIAL}
    target, drafter = NanoTarget(NanoTargetDims()), NanoDrafter(run.drafter_dims)
    if (
        checkpoint.load_master(target, run.work, "target")
        or not (run.target_dir / "model.safetensors").exists()
    ):
        checkpoint.export_weights(target, "model.", run.target_dir, quant=run.quant)
    checkpoint.write_target_config(run.target_dir, target.dims, special, quant=run.quant)
    folder = run.models / drafter.dims.stem
    if (
        checkpoint.load_master(drafter, run.work, drafter.dims.stem)
        or not (folder / "model.safetensors").exists()
    ):
        checkpoint.export_weights(drafter, "", folder)
    checkpoint.write_drafter_config(folder, drafter.dims, target.dims, special["<|audio_start|>"])


def evaluate_all(run: TrainingRun) -> None:
    """Evaluate the exported checkpoints on held-out tasks; print the results and write them to
    ``<work>/eval.json``.
    """
    target = load_target(run)
    drafter = NanoDrafter(run.drafter_dims).to(run.device)
    checkpoint.load_exported(drafter, "", run.models / drafter.dims.stem)
    taps = tuple(tap_layers(target.dims.layers, drafter.dims.taps))
    result = evaluate.report(target, drafter, run.tokenizer, run.held, taps)
    run.work.mkdir(parents=True, exist_ok=True)
    evaluate.write_report(run.work / "eval.json", result)


if __name__ == "__main__":
    main()
