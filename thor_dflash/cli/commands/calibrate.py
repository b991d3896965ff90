"""`thor-dflash calibrate`: measures what a target's linears receive and its cache holds."""

from __future__ import annotations

from argparse import Namespace

from thor_dflash.cli import output_files
from thor_dflash.config.tree import Config
from thor_dflash.core.progress import Progress

FEW = 16384
"""Tokens below which a channel's energy is still uncertain."""


def run(args: Namespace, config: Config, progress: Progress) -> None:
    """Write the file, print what it holds.

    Raises:
        CheckpointError: the checkpoint is not supported, or its activations are not finite.
        RequestError: the documents cannot be read.
    """
    from thor_dflash.core.extras import extra

    with extra("build"), extra("ort"):
        from thor_dflash.builders.checkpoint.target import read_target
        from thor_dflash.calib.calibrate.calibrate import beginnings, calibrate
        from thor_dflash.calib.documents import read_documents
        from thor_dflash.package.tokenizer_files import tokenizer_files
        from thor_dflash.runtime.text.tokenizer import Tokenizer

    output_files.check(args.out, ".safetensors", "--out")
    with progress.task("reading documents"):
        dims = read_target(args.target).dims
        tokenizer = Tokenizer.load(args.target) if tokenizer_files(args.target) else None
        found = read_documents(args.prompts, tokenizer, dims.vocab)
        tokens = [one.tokens for one in found]
        documents = beginnings(tokens, config.calibrate, dims.max_position)
    calibrate(args.target, documents, args.out, config.calibrate, progress)
    progress.close()
    count = sum(map(len, documents))
    print(f"{args.out}: activations of {count:,} tokens in {len(documents)} documents")
    if count < FEW:
        print(f"note: {FEW:,} tokens or more are better, of the kind that the model will meet")
