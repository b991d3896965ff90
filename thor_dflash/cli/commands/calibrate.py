"""`thor-dflash calibrate`: measures what a target's linears receive and its cache holds."""

from __future__ import annotations

from argparse import Namespace
from contextlib import closing
from typing import TYPE_CHECKING

from thor_dflash.cli import output_files
from thor_dflash.config.tree import Config
from thor_dflash.core.errors import ConfigError
from thor_dflash.core.progress import Progress, amount
from thor_dflash.package import manifest as package_manifest

if TYPE_CHECKING:
    from thor_dflash.runtime.session.admission import PackageText

FEW = 16384
"""Tokens below which a channel's energy is still uncertain."""

Documents = list[tuple[int, ...]]


def run(args: Namespace, config: Config, progress: Progress) -> None:
    """Write the file, print what it holds.

    Raises:
        CheckpointError: the checkpoint is not supported, or its activations are not finite.
        ConfigError: the package is of an engine whose steps cannot be seen.
        RequestError: the documents cannot be read.
    """
    output_files.check(args.out, ".safetensors", "--out")
    if args.package is not None:
        documents = _of_package(args, config, progress)
    else:
        documents = _of_checkpoint(args, config, progress)
    progress.close()
    count = sum(map(len, documents))
    of = f"{amount(count, 'tokens')} in {amount(len(documents), 'documents')}"
    print(f"{args.out}: activations of {of}")
    if count < FEW:
        print(f"note: {FEW:,} tokens or more are better, of the kind that the model will meet")


def _of_checkpoint(args: Namespace, config: Config, progress: Progress) -> Documents:
    from thor_dflash.core.extras import extra

    with extra("build"), extra("ort"):
        from thor_dflash.builders.checkpoint.target import read_target
        from thor_dflash.calib.calibrate.calibrate import calibrate
        from thor_dflash.calib.documents import beginnings, read_documents
        from thor_dflash.package.tokenizer_files import tokenizer_files
        from thor_dflash.runtime.text.tokenizer import Tokenizer

    with progress.task("reading documents"):
        dims = read_target(args.target).dims
        tokenizer = Tokenizer.load(args.target) if tokenizer_files(args.target) else None
        found = read_documents(args.prompts, tokenizer, dims.vocab)
        tokens = [one.tokens for one in found]
        documents = beginnings(tokens, config.calibrate, dims.max_position)
    calibrate(args.target, documents, args.out, config.calibrate, progress)
    return documents


def _of_package(args: Namespace, config: Config, progress: Progress) -> Documents:
    from thor_dflash.calib.calibrate.package_statistics import observer, package_statistics
    from thor_dflash.calib.check.compare import need
    from thor_dflash.calib.documents import beginnings, read_documents
    from thor_dflash.runtime.session import open_session

    engine = package_manifest.read(args.package).engine
    if engine == "tensorrt":
        raise ConfigError(
            "--package must be of engine ort or cuda, whose steps can be seen (got tensorrt)"
        )
    need(engine)
    documents: Documents = []

    def check(text: PackageText) -> None:
        """Read the documents before the package is loaded."""
        dims = text.manifest.target
        with progress.task("reading documents"):
            found = read_documents(args.prompts, text.tokenizer, dims.vocab)
        tokens, longest = [one.tokens for one in found], min(dims.max_position, text.limit)
        documents.extend(beginnings(tokens, config.calibrate, longest))
        if longest < min(config.calibrate.context, max(map(len, tokens))):
            progress.close()
            print(f"note: documents are cut to {longest:,} tokens, the context of the package")

    with closing(open_session(args.package, config.engine, progress, check=check)) as session:
        show = observer(args.package, session.model.engine)
        made = package_statistics(session, show, documents, config.calibrate.threads, progress)
    with output_files.whole(args.out) as file:
        file.write(made)
    return documents
