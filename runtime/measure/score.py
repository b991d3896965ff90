"""Teacher-forced logits from the verify step, block by block, for checking an engine externally."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from thor_dflash.core.errors import RequestError
from thor_dflash.core.progress import Progress
from thor_dflash.core.tensors import Array
from thor_dflash.runtime.decoding.loop import check_owner
from thor_dflash.runtime.decoding.model_runner import ModelRunner
from thor_dflash.runtime.session import Session


def score(
    session: Session, tokens: Sequence[int], taps: bool, progress: Progress
) -> dict[str, Array]:
    """Return float32 `logits` [T, V]: row t holds the unmasked logits after tokens[0..t].

    With `taps`, also `taps` [T, taps * H]: the residual stream after each tapped layer, as the
    drafter reads it.

    Raises:
        RequestError: as `shapes`.
    """
    made = shapes(session, tokens, taps)
    out = {name: np.empty(shape, np.float32) for name, shape in made.items()}
    at = 0
    for block in blocks(session, tokens, list(made), progress):
        for name, rows in block.items():
            out[name][at : at + len(rows)] = rows
        at += len(block["logits"])
    return out


def shapes(session: Session, tokens: Sequence[int], taps: bool) -> dict[str, tuple[int, int]]:
    """Check the tokens; return the shapes of the arrays that `score` makes of them.

    Raises:
        RequestError: no tokens, an id outside the vocabulary, more tokens than the context less one
        block, or taps of a package without a drafter.
    """
    _check(session, tokens, taps)
    outputs = session.model.graphs["verify"].outputs
    names = ["logits", "taps"] if taps else ["logits"]
    return {name: (len(tokens), outputs[name].at({})[1]) for name in names}


def blocks(
    session: Session,
    tokens: Sequence[int],
    names: Sequence[str],
    progress: Progress,
    begin: int = 0,
) -> Iterator[dict[str, Array]]:
    """Yield the rows of the arrays of `score` a block at a time, for tokens that `shapes` accepted.
    The whole arrays would take a megabyte per token at V = 248,320. The tokens before `begin` are
    only read, as a prompt is, and have no rows.

    Raises:
        TransactionError: a request or a prefix has taken the state meanwhile.
    """
    model = session.model
    with model.alone:
        model.state.reset()
        begun = model.state.begun
    with progress.task("scoring", len(tokens), "tokens") as task:
        for start in range(0, begin, model.chunk):
            part = tokens[start : min(start + model.chunk, begin)]
            with model.alone:
                check_owner(model, begun)
                model.prefill(part, observe=False)
            task.advance(len(part))
        for start in range(begin, len(tokens), model.block):
            part = tokens[start : start + model.block]
            yield _block(model, begun, part, names)
            task.advance(len(part))


def _block(
    model: ModelRunner, begun: int, part: Sequence[int], names: Sequence[str]
) -> dict[str, Array]:
    with model.alone:
        check_owner(model, begun)
        model.write_tokens(part)
        model.verify()
        model.state.commit(len(part))
        return {name: model.read(name)[: len(part)].astype(np.float32) for name in names}


def _check(session: Session, tokens: Sequence[int], taps: bool) -> None:
    vocab, limit = session.manifest.target.vocab, session.model.limit
    if not tokens:
        raise RequestError("tokens must have at least one id (got none)")
    if len(tokens) > limit:
        raise RequestError(
            f"tokens must be at most {limit}, the context of "
            f"{session.model.capacity} less one block (got {len(tokens)})"
        )
    for i, token in enumerate(tokens):
        if not 0 <= token < vocab:
            raise RequestError(f"tokens[{i}] must be 0 to {vocab - 1} (got {token})")
    if taps and session.manifest.drafter is None:
        raise RequestError("taps must be used with a package that has a drafter (got one without)")
