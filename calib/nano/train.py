"""Train planner-nano stage by stage: ``python -m thor_dflash.calib.nano.train --stage
tokenizer|target|drafter|export|eval``.

Master weights are kept in ``--work`` between stages and calls, so that an interrupted run resumes
from its last save.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from thor_dflash.calib.nano import checkpoint, corpus, evaluate, eyes, pictured_evaluate
from thor_dflash.calib.nano.dims import NanoTargetDims, NanoTowerDims, tap_layers
from thor_dflash.calib.nano.drafter import ContextRows, NanoDrafter, block_loss, draw_anchors
from thor_dflash.calib.nano.loop import TrainingRun, compile_layers, mean_loss, optimise
from thor_dflash.calib.nano.rollout import rollout
from thor_dflash.calib.nano.target import NanoTarget, packed_rows
from thor_dflash.calib.nano.tokenizer import SEEING_TEMPLATE, SPECIAL, train_tokenizer
from thor_dflash.calib.nano.vision import SeeingTarget


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
    parser.add_argument("--eyes", action="store_true", help="the target has a vision tower")
    parser.add_argument("--pictures", type=int, default=60_000, help="that its tower learns from")
    parser.add_argument(
        "--tower-seconds", type=float, default=30.0, help="training time of its tower"
    )
    parser.add_argument(
        "--drafter-seconds",
        type=float,
        default=60.0,
        help="training time of the drafter of a target with a tower",
    )
    parser.add_argument("--start", type=Path, help="exported target to start from")
    parser.add_argument("--held", type=int, default=600, help="held-out tasks to evaluate")
    return parser


def main(argv: list[str] | None = None) -> None:
    """Parse the command line and run one or more stages in order."""
    parser = _parser()
    args = parser.parse_args(argv)
    if args.eyes and (not args.quant or args.drafter == 2 or "drafter" in args.stage):
        parser.error(
            "--eyes must go without --no-quant, --drafter 2 and the stage drafter, whose work is "
            "part of the stage target"
        )
    options = vars(args)
    chosen = options.pop("stage")
    run = TrainingRun(**options)
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = True
    stages = {
        "tokenizer": lambda: train_tokenizer(run.target_dir, 4000),
        "target": lambda: eyes.train_seeing(run, export) if run.eyes else train_target(run),
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

    entropy = compile_layers(run, model.layers, mean_loss)

    def loss(ids: Tensor, pos: Tensor, weight: Tensor) -> Tensor:
        hidden, _ = model(model.embed(ids.long()), packed_rows(pos.long()), run.quant)
        seen = weight[:, 1:] * (pos[:, 1:] > 0)
        return entropy(hidden[:, :-1], model.embed_tokens.weight, ids[:, 1:].long(), seen)

    optimise(run, model, "target", loss, data)


def train_drafter(run: TrainingRun) -> None:
    """Train the drafter on greedy outputs of the frozen exported target; one in five documents is
    from the corpus instead.
    """
    target = load_target(run)
    docs = target_documents(run, target) + corpus.documents(
        run.target_dir / "tokenizer.json", run.rollouts // 4, "c", run.workers
    )
    rows = corpus.pack(docs, 7)
    print(f"drafter corpus: {len(docs)} documents, {len(rows.ids)} rows", flush=True)
    data = [torch.from_numpy(a).to(run.device) for a in (rows.ids, rows.pos, rows.answer)]
    model = _drafter(run)
    mask_id = run.tokenizer.token_to_id("<|audio_start|>")
    taps = tuple(tap_layers(target.dims.layers, model.dims.taps))
    compile_layers(run, target.layers, mean_loss)
    entropy = compile_layers(run, model.layers, mean_loss)

    def loss(ids: Tensor, pos: Tensor, answer: Tensor) -> Tensor:
        ids, pos = ids.long(), pos.long()
        with torch.no_grad():
            _, kept = target(target.embed(ids), packed_rows(pos), False, taps)
        anchors = draw_anchors(answer, run.anchors)
        rows = ContextRows(ids, pos, answer, torch.cat(kept, -1))
        return block_loss(model, target.embed_tokens.weight, rows, anchors, mask_id, entropy)

    optimise(run, model, model.dims.stem, loss, data)


def _drafter(run: TrainingRun) -> NanoDrafter:
    """The drafter with its master weights, or with those of the drafter that it begins as."""
    model = NanoDrafter(run.drafter_dims).to(run.device)
    resumed = checkpoint.load_master(model, run.work, model.dims.stem)
    if model.dims.second and not resumed:
        # A DFlash2 drafter is one of DFlash until what it has besides has learnt something.
        checkpoint.load_exported(model, "", run.models / "drafter", partly=True)
    count = sum(p.numel() for p in model.parameters())
    print(f"drafter: {count:,} parameters, resumed: {resumed}", flush=True)
    return model


def target_documents(run: TrainingRun, target: NanoTarget) -> list[corpus.Document]:
    """Return greedy outputs of the target on training prompts, as documents."""
    start = time.time()
    tokenizer = run.tokenizer
    drawn = corpus.documents(run.target_dir / "tokenizer.json", run.rollouts, "r", run.workers)
    close = tokenizer.encode(corpus.CLOSE).ids
    ends = (tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|endoftext|>"))
    made: list[corpus.Document] = []
    for first in range(0, len(drawn), 1024):
        prompts = [corpus.given(doc, close) for doc in drawn[first : first + 1024]]
        outputs = rollout(target, prompts, 640, tokenizer.get_vocab_size(), ends)
        for prompt, output in zip(prompts, outputs, strict=True):
            ids = np.array(prompt + output, np.int16)
            made.append(corpus.Document(ids, np.ones(len(ids), np.float32), len(prompt)))
    print(f"rollouts: {len(made)} outputs, {time.time() - start:.0f} s", flush=True)
    return made


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
    drafter = NanoDrafter(run.drafter_dims)
    dims, tower = NanoTargetDims(), NanoTowerDims()
    target = SeeingTarget(dims, tower) if run.eyes else NanoTarget(dims)
    if (
        checkpoint.load_master(target, run.work, "seeing" if run.eyes else "target")
        or not (run.target_dir / "model.safetensors").exists()
    ):
        checkpoint.export_weights(target, "model.", run.target_dir, quant=run.quant)
    if run.eyes:
        checkpoint.write_seeing_config(run.target_dir, dims, tower, special)
        (run.target_dir / "chat_template.jinja").write_text(SEEING_TEMPLATE)
    else:
        checkpoint.write_target_config(run.target_dir, dims, special, quant=run.quant)
    folder = run.models / drafter.dims.stem
    if (
        checkpoint.load_master(drafter, run.work, drafter.dims.stem)
        or not (folder / "model.safetensors").exists()
    ):
        checkpoint.export_weights(drafter, "", folder)
    checkpoint.write_drafter_config(folder, drafter.dims, dims, special["<|audio_start|>"])


def evaluate_all(run: TrainingRun) -> None:
    """Evaluate the exported checkpoints on held-out tasks; print the results and write them to
    ``<work>/eval.json``.
    """
    seeing = pictured_evaluate.load_seeing(run) if run.eyes else None
    target = load_target(run) if seeing is None else seeing.language_model
    drafter = NanoDrafter(run.drafter_dims).to(run.device)
    checkpoint.load_exported(drafter, "", run.models / drafter.dims.stem)
    taps = tuple(tap_layers(target.dims.layers, drafter.dims.taps))
    result: dict[str, dict[str, float]] = {}
    if seeing is not None:
        result |= pictured_evaluate.seeing_report(seeing, drafter, run, taps)
    result |= evaluate.report(target, drafter, run.tokenizer, run.held, taps)
    run.work.mkdir(parents=True, exist_ok=True)
    evaluate.write_report(run.work / "eval.json", result)


if __name__ == "__main__":
    main()
