"""`thor-dflash score`: teacher-forced logits of a list of token ids, as .npz."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from zipfile import ZipFile

from thor_dflash.cli import output_files
from thor_dflash.cli.input_files import in_vocabulary, read_tokens
from thor_dflash.config.tree import Config
from thor_dflash.core.progress import Progress
from thor_dflash.core.tensors import Array


def run(args: Namespace, config: Config, progress: Progress) -> None:
    """Score the tokens, write the file, print its contents."""
    from thor_dflash.runtime.measure.score import blocks, shapes
    from thor_dflash.runtime.session import open_session

    output_files.check(args.out, ".npz", "--out")
    tokens = read_tokens(args.tokens)
    with closing(open_session(args.package, config.engine, progress)) as session:
        in_vocabulary(tokens, session.manifest.target.vocab)
        made = shapes(session, tokens, args.taps)
        write_blocks(args.out, made, blocks(session, tokens, list(made), progress))
    progress.close()
    for name, shape in made.items():
        print(f"{args.out}: {name} float32 {list(shape)}")


def write(out: Path, arrays: Mapping[str, Array]) -> None:
    """Write the arrays to `out` atomically."""
    import numpy as np

    with output_files.whole(out) as file:
        np.savez(file, allow_pickle=False, **arrays)


def write_blocks(
    out: Path, shapes: Mapping[str, tuple[int, int]], blocks: Iterator[Mapping[str, Array]]
) -> None:
    """Write float32 arrays to `out` atomically, as their rows are computed. The file holds one
    array after the other, so the taps (a tenth of the logits) stay in memory until the logits are
    written.

    Raises:
        RequestError: it cannot be written.
    """
    taps: list[Array] = []

    def logits() -> Iterator[Array]:
        for block in blocks:
            if "taps" in block:
                taps.append(block["taps"])
            yield block["logits"]

    with output_files.whole(out) as file, ZipFile(file, "w") as arrays:
        for name, parts in (("logits", logits()), ("taps", taps)):
            if name in shapes:
                _write_array(arrays, name, shapes[name], parts)


def _write_array(
    arrays: ZipFile, name: str, shape: tuple[int, int], parts: Iterable[Array]
) -> None:
    """Write one array as numpy.savez does."""
    from numpy.lib import format as npy

    with arrays.open(f"{name}.npy", "w", force_zip64=True) as file:
        head = {"descr": "<f4", "fortran_order": False, "shape": shape}
        npy.write_array_header_1_0(file, head)
        for part in parts:
            file.write(part.data)
