"""`thor-dflash score`: teacher-forced logits of a list of token ids, as .npz."""

from __future__ import annotations

import os
import shutil
from argparse import Namespace
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import IO
from zipfile import ZipFile

from thor_dflash.config import Config
from thor_dflash.errors import RequestError
from thor_dflash.manifest import check_outside
from thor_dflash.progress import Progress
from thor_dflash.tensors import Array
from thor_dflash.verbs.inputs import in_vocabulary, read_tokens


def run(args: Namespace, config: Config, progress: Progress) -> None:
    """Score the tokens, write the file, say what it holds."""
    from thor_dflash.runtime.score import blocks, shapes
    from thor_dflash.runtime.session import open_session

    check(args.out)
    tokens = read_tokens(args.tokens)
    with closing(open_session(args.package, config.engine, progress)) as session:
        in_vocabulary(tokens, session.manifest.target.vocab)
        made = shapes(session, tokens, args.taps)
        write_blocks(args.out, made, blocks(session, tokens, list(made), progress))
    progress.close()
    for name, shape in made.items():
        print(f"{args.out}: {name} float32 {list(shape)}")


def check(out: Path, option: str = "--out") -> None:
    """Refuse a path that could not or must not be written, before the work that would be lost."""
    check_outside(option, out)
    if out.suffix != ".npz":
        raise RequestError(f"{option} must be a path ending in .npz (got {out})")
    if out.is_dir() or not out.parent.is_dir():
        raise RequestError(f"{option} must be a file in a directory that exists (got {out})")
    with _beside(out) as partial:
        partial.touch()


def write(out: Path, arrays: Mapping[str, Array]) -> None:
    """Write the arrays to `out` in one rename: whole, or not at all."""
    import numpy as np

    with _whole(out) as file:
        np.savez(file, allow_pickle=False, **arrays)


def write_blocks(
    out: Path, shapes: Mapping[str, tuple[int, int]], blocks: Iterator[Mapping[str, Array]]
) -> None:
    """Write float32 arrays to `out` as their rows are made: whole, or not at all. The file holds
    one after the other, so that the taps, a tenth of the logits, are kept until these are written.

    Raises:
        RequestError: it cannot be written, or the disk has no room; then not a row is made.
    """
    need = sum(4 * rows * columns for rows, columns in shapes.values())
    if (free := shutil.disk_usage(out.parent).free) < need:
        raise RequestError(f"--out must have room for {need:,} bytes (got {free:,})")
    taps: list[Array] = []

    def logits() -> Iterator[Array]:
        for block in blocks:
            if "taps" in block:
                taps.append(block["taps"])
            yield block["logits"]

    with _whole(out) as file, ZipFile(file, "w") as arrays:
        for name, parts in (("logits", logits()), ("taps", taps)):
            if name in shapes:
                _write_array(arrays, name, shapes[name], parts)


def _write_array(
    arrays: ZipFile, name: str, shape: tuple[int, int], parts: Iterable[Array]
) -> None:
    """As numpy.savez writes it."""
    from numpy.lib import format as npy

    with arrays.open(f"{name}.npy", "w", force_zip64=True) as file:
        head = {"descr": "<f4", "fortran_order": False, "shape": shape}
        npy.write_array_header_1_0(file, head)
        for part in parts:
            file.write(part.data)


@contextmanager
def _whole(out: Path) -> Generator[IO[bytes]]:
    """A file to write, which is `out` once it is whole: in one rename."""
    with _beside(out) as partial:
        with partial.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(out)


@contextmanager
def _beside(out: Path) -> Generator[Path]:
    """Where `out` is written before it has its name; gone afterwards."""
    partial = out.with_name(f".{out.name}.{os.getpid()}.partial")
    try:
        try:
            yield partial
        finally:
            partial.unlink(missing_ok=True)
    except OSError as e:
        raise RequestError(f"{out} must be writable (got: {e.strerror or e})") from e
