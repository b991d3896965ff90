"""`thor-dflash score`: teacher-forced logits of a list of token ids, as .npz."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

from thor_dflash.config import Config
from thor_dflash.progress import Progress
from thor_dflash.tensors import Array
from thor_dflash.verbs import outputs
from thor_dflash.verbs.inputs import in_vocabulary, read_tokens


def run(args: Namespace, config: Config, progress: Progress) -> None:
    """Score the tokens, write the file, say what it holds."""
    from thor_dflash.runtime.score import score
    from thor_dflash.runtime.session import open_session

    outputs.check(args.out, ".npz", args.package, "--out")
    tokens = read_tokens(args.tokens)
    with closing(open_session(args.package, config.engine, progress)) as session:
        in_vocabulary(tokens, session.manifest.target.vocab)
        arrays = score(session, tokens, args.taps, progress)
    write(args.out, arrays)
    progress.close()
    for name, array in arrays.items():
        print(f"{args.out}: {name} {array.dtype} {list(array.shape)}")


def write(out: Path, arrays: Mapping[str, Array]) -> None:
    """Write the arrays to `out`, whole or not at all."""
    import numpy as np

    outputs.write(out, lambda file: np.savez(file, allow_pickle=False, **arrays))
