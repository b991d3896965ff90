"""`thor-dflash score`: teacher-forced logits of a list of token ids, as .npz."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Generator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path

from thor_dflash.config import Config
from thor_dflash.errors import RequestError
from thor_dflash.manifest import check_outside
from thor_dflash.progress import Progress
from thor_dflash.tensors import Array
from thor_dflash.verbs.inputs import in_vocabulary, read_tokens


def run(args: Namespace, config: Config, progress: Progress) -> None:
    """Score the tokens, write the file, say what it holds."""
    from thor_dflash.runtime.score import score
    from thor_dflash.runtime.session import open_session

    check(args.out)
    tokens = read_tokens(args.tokens)
    with closing(open_session(args.package, config.engine, progress)) as session:
        in_vocabulary(tokens, session.manifest.target.vocab)
        arrays = score(session, tokens, args.taps, progress)
    write(args.out, arrays)
    progress.close()
    for name, array in arrays.items():
        print(f"{args.out}: {name} {array.dtype} {list(array.shape)}")


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

    with _beside(out) as partial:
        with partial.open("wb") as file:
            np.savez(file, allow_pickle=False, **arrays)
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
