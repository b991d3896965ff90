"""`thor-dflash draft-vocab`: chooses the ids that a drafter may propose, if fewer of them pay."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import TYPE_CHECKING

from thor_dflash.cli import exit_status, output_files
from thor_dflash.cli.input_files import read_schema
from thor_dflash.config.tree import Config
from thor_dflash.core.errors import ConfigError, RequestError
from thor_dflash.core.progress import Progress, amount

if TYPE_CHECKING:
    from thor_dflash.calib.draft_vocab.selection import AnswerTokens, Candidates
    from thor_dflash.calib.draft_vocab.trade import CycleCost, TradeOff

FEW = 30
"""Answers that are not counted; fewer get a note. Of the default's tasks it is a third."""
ROLLOUTS = 120
"""Default number of tasks that the package answers."""


def run(args: Namespace, config: Config, progress: Progress) -> int:
    """Print the comparison, write the list. Status 1 and no list if it would lose speed."""
    from thor_dflash.core.extras import extra

    with extra("build"):
        from thor_dflash.calib.draft_vocab import trade
        from thor_dflash.calib.draft_vocab.selection import candidates

    _check(args)
    output_files.check(args.out, ".json", "--out")
    schemas = [read_schema(args.schema)] if args.schema else []
    cost = trade.cycle_cost(args.target, args.drafter)
    _check_early(args, cost)
    answers, length = _answers(args, config, cost.block, progress)
    with progress.task("ordering ids"):
        found = candidates(args.target, answers, schemas)
        if args.size is not None:
            found.list_of(args.size)
        listed = [args.size] if args.size else trade.sizes(found, cost)
        rows = [trade.trade_off(found, cost, size) for size in listed]
    progress.close()
    chosen = trade.best(rows) or (rows[0] if args.size and args.force else None)
    print("\n".join(_text(found, cost, rows, length, assumed=args.package is None)))
    if chosen is None:
        which = "this size" if args.size else "each size"
        print(
            f"no list is written, since no reduced vocabulary pays here: {which} loses more than "
            f"{trade.LOSS:.0%} of the accept length, or saves too little"
        )
        return exit_status.WRONG
    ids = found.list_of(chosen.size)
    with output_files.whole(args.out) as file:
        file.write(json.dumps(ids).encode())
    print(f"{args.out}: {len(ids)} ids, predicted speed {chosen.speed:.4f} of that with all ids")
    return exit_status.OK


def _check(args: Namespace) -> None:
    if args.corpus is None and args.package is None:
        raise ConfigError("--corpus or --package must be given (got neither)")
    if (args.package is None) == (args.accept_length is None):
        got = "none" if args.package is None else f"{args.accept_length}"
        raise ConfigError(
            f"--accept-length must be given without --package, which measures it (got {got})"
        )
    if args.accept_length is not None and not 1 <= args.accept_length <= 1024:
        raise ConfigError(f"--accept-length must be 1 to 1024 (got {args.accept_length})")
    if args.rollouts is not None and args.rollouts < 1:
        raise ConfigError(f"--rollouts must be at least 1 (got {args.rollouts})")
    if args.force and args.size is None:
        raise ConfigError("--force must go with --size (got none)")


def _check_early(args: Namespace, cost: CycleCost) -> None:
    """Refuse what would else be refused after the package has answered all tasks."""
    from thor_dflash.package import manifest
    from thor_dflash.package.tokenizer_files import TOKENIZER

    if args.size is not None and (args.size % 2 or not 0 < args.size <= cost.ids):
        raise ConfigError(f"--size must be an even number up to {cost.ids} (got {args.size})")
    if args.package is not None and (path := args.target / TOKENIZER).is_file():
        entry = manifest.read(args.package).files.get(TOKENIZER)
        have, want = entry.sha256[:12] if entry else "none", manifest.hash_file(path).sha256[:12]
        if have != want:
            raise ConfigError(
                f"--package must have the target's {TOKENIZER} (got {have}, not {want})"
            )


def _answers(
    args: Namespace, config: Config, block: int, progress: Progress
) -> tuple[list[AnswerTokens], float]:
    """The answers to count, and their accept length, assumed or measured."""
    from thor_dflash.builders.checkpoint.target import read_target
    from thor_dflash.calib.documents import read_documents
    from thor_dflash.calib.draft_vocab.rollouts import roll_out
    from thor_dflash.calib.draft_vocab.selection import AnswerTokens
    from thor_dflash.calib.draft_vocab.trade import drawn
    from thor_dflash.runtime.session import open_session
    from thor_dflash.runtime.text.tokenizer import Tokenizer

    made: list[AnswerTokens] = []
    rolled: list[AnswerTokens] = []
    length = args.accept_length or 0.0
    if args.corpus is not None:
        vocab, text = read_target(args.target).dims.vocab, Tokenizer.load(args.target)
        for one in read_documents(args.corpus, text, vocab, answers=True):
            made.append(AnswerTokens(one.label or "text", one.tokens[one.begin :]))
        if not any(answer.tokens for answer in made):
            raise RequestError(f"{args.corpus} must hold an answer (got chats of requests alone)")
    if args.package is not None:
        with closing(open_session(args.package, config.engine, progress)) as session:
            found = roll_out(session, args.rollouts or ROLLOUTS, progress)
            rolled, length = found.answers, found.accept_length
    return [*rolled, *(drawn(one, length, block, i) for i, one in enumerate(made))], length


def _text(
    found: Candidates,
    cost: CycleCost,
    rows: Sequence[TradeOff],
    length: float,
    *,
    assumed: bool,
) -> Iterator[str]:
    from thor_dflash.core.text_table import columns

    how = "assumed" if assumed else "measured"
    yield (
        f"{len(found.forced):,} ids must be there, of {cost.ids:,}; accept length {length:.2f} "
        f"({how}), block {cost.block}"
    )
    labels = list(rows[0].coverage)
    head = ("ids", *(f"covers {x}" for x in labels), "head, ms", "cycle", "accept length", "speed")
    table: list[tuple[str, ...]] = [head]
    for row in rows:
        shares = (f"{row.coverage[label].share:.2%}" for label in labels)
        table.append(
            (
                f"{row.size:,}",
                *shares,
                f"{row.head_ms:.3f}",
                f"-{row.gain:.2%}",
                f"-{row.loss:.2%}",
                f"{row.speed:.4f}",
            )
        )
    yield from columns(table)
    tokens = rows[0].coverage["all"].tokens
    held = amount(len(found.held), "answers")
    yield f"coverage: of {tokens:,} tokens in {held} that were not counted"
    yield "head and cycle: predicted for a Jetson AGX Thor from bytes alone"
    yield "accept length: an estimate from the drafts of these answers; measure it with `quality`"
    if len(found.held) < FEW:
        yield f"note: {FEW} answers that were not counted, or more, are better: a few may be alike"
