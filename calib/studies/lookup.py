"""Lookup drafts beside planner-nano's drafter: replanning, copying, and text that repeats nothing.

python -m thor_dflash.calib.studies.lookup build/planner-nano [--json]

Each answer is decoded with every proposer, and must be the same. Replanning: the plan before is an
earlier answer of the session, as the model itself gave it. The weak drafter is simulated: each of
its tokens is the true one with probability WEAK. Copying: planner-nano cannot copy, so the edited
text is committed as a forced answer by cycles whose drafts are real.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from random import Random

from thor_dflash.calib import plan_requests
from thor_dflash.calib.planbench.again import CHANGES, again
from thor_dflash.calib.studies import script
from thor_dflash.config.engine import EngineConfig
from thor_dflash.core.progress import Progress, choose
from thor_dflash.core.results import DraftCounts
from thor_dflash.runtime.decoding.block import DecodeProgress
from thor_dflash.runtime.decoding.draft_chooser import DraftChooser
from thor_dflash.runtime.decoding.lookup import NO_TEXTS, LookupIndex, LookupTexts
from thor_dflash.runtime.decoding.proposers import (
    CallableDrafter,
    DflashDrafter,
    NoDrafter,
    Proposer,
)
from thor_dflash.runtime.policies.forced_answer import ForcedAnswer
from thor_dflash.runtime.session import Request, Session, open_session

WEAK = 0.75
"""Blocks of four tokens."""
COPIED = 600
"""Tokens of the text that is copied."""


@dataclass(slots=True)
class ProposerTally:
    """Sums over the answers of one proposer."""

    tokens: int = 0
    cycles: int = 0
    seconds: float = 0.0
    """Processor time of this process."""
    sources: dict[str, DraftCounts] = field(default_factory=dict[str, DraftCounts])

    @property
    def length(self) -> float:
        """Tokens a cycle."""
        return self.tokens / self.cycles


def run(session: Session, request: Request, proposer: Proposer, tally: ProposerTally) -> list[int]:
    """Answer a request and add it to a tally."""
    start = time.process_time()
    tokens = [t for chunk in session.run(request, proposer) for t in chunk.tokens]
    tally.seconds += time.process_time() - start
    report = session.report()
    tally.tokens += report.completion_tokens
    tally.cycles += report.spec.cycles
    for source, counts in report.spec.sources.items():
        tally.sources[source] = tally.sources.get(source, DraftCounts()).plus(counts)
    return tokens


def weak(truth: Sequence[int], seed: int) -> CallableDrafter:
    """A drafter whose tokens are each right with probability WEAK."""
    rng = Random(seed)

    def guess(progress: DecodeProgress) -> Sequence[int]:
        right = truth[len(progress.tokens) :]
        return [token if rng.random() < WEAK else 0 for token in right[:64]]

    return CallableDrafter(guess)


def proposers(
    truth: Sequence[int], prompt: tuple[int, ...], texts: LookupTexts, seed: int
) -> Iterator[tuple[str, Proposer]]:
    """What is compared."""
    yield "drafter", DflashDrafter()
    yield "lookup", DraftChooser(NoDrafter(), prompt, lambda: texts)
    yield "both", DraftChooser(DflashDrafter(), prompt, lambda: texts)
    yield "weak drafter", weak(truth, seed)
    yield "both, weak drafter", DraftChooser(weak(truth, seed), prompt, lambda: texts)


def replanning(
    session: Session, limit: int, progress: Progress
) -> Iterator[tuple[str, script.Table]]:
    """Tokens a cycle by what changed, and where the drafts came from."""
    tallies: dict[tuple[str, str], ProposerTally] = {}
    with progress.task("replanning", limit, "pairs") as bar:
        for seed, pair in enumerate(again(limit)):
            old, new = (
                plan_requests.request_of(session, task) for task in (pair.first, pair.second)
            )
            before = run(session, old, DflashDrafter(), ProposerTally())
            truth = run(session, new, DflashDrafter(), ProposerTally())
            texts = LookupTexts(session=((*old.prompt[-8:], *before),))
            for name, proposer in proposers(
                [*truth, *session.manifest.stop_tokens], new.prompt, texts, seed
            ):
                tally = tallies.setdefault((name, pair.change), ProposerTally())
                tokens = run(session, new, proposer, tally)
                assert tokens == truth, f"{pair.second.name}: {name} changed the answer"
            bar.advance(1)
    names = dict.fromkeys(name for name, _ in tallies)
    rows: list[Sequence[object]] = [("tokens a cycle", *CHANGES, "all", "cycles")]
    sources: list[Sequence[object]] = [("proposer", "source", "blocks", "drafted", "accepted")]
    for name in names:
        parts = [tallies[name, change] for change in CHANGES]
        count, cycles = sum(t.tokens for t in parts), sum(t.cycles for t in parts)
        rows.append((name, *(round(t.length, 2) for t in parts), round(count / cycles, 2), cycles))
        whole: dict[str, DraftCounts] = {}
        for source, counts in (pair for t in parts for pair in t.sources.items()):
            whole[source] = whole.get(source, DraftCounts()).plus(counts)
        sources += [(name, s, c.blocks, c.drafted, c.accepted) for s, c in whole.items()]
    yield "replanning", rows
    yield "sources", sources


def copying(session: Session) -> Iterator[tuple[str, script.Table]]:
    """Tokens a cycle of a JSON text with a few words edited, by where the old one is."""
    tokenizer = plan_requests.tokenizer_of(session)
    steps = [
        {"id": i, "skill": "pick", "args": {"object": f"item_{i * 7 % 31}"}, "on_fail": "retry"}
        for i in range(1, 60)
    ]
    old = tokenizer.encode(json.dumps({"steps": steps}, separators=(",", ":")))[:COPIED]
    new = list(old)
    for i in range(97, COPIED, 150):
        new[i] = old[i - 1]
    frame = tuple(tokenizer.encode("Edit this: "))
    rows: list[Sequence[object]] = [("the old text is", "tokens", "cycles", "tokens a cycle")]
    for where, prompt, drafts in (
        ("in drafts", frame, (frame[-2:] + tuple(old),)),
        ("in the prompt", (*frame, *old, *frame), ()),
    ):
        tally = ProposerTally()
        request = Request(prompt=prompt, max_tokens=len(new))
        proposer = DraftChooser(DflashDrafter(), prompt, partial(LookupTexts, drafts=drafts))
        start = session.run(request, proposer, (ForcedAnswer(tuple(new), None),))
        tokens = [t for chunk in start for t in chunk.tokens]
        assert tokens == new, "a forced answer is committed as it is"
        spec = session.report().spec
        tally.cycles = spec.cycles
        rows.append((where, len(new), spec.cycles, round(len(new) / spec.cycles, 2)))
    yield "copying", rows


def nothing_repeated(
    session: Session, limit: int, progress: Progress
) -> Iterator[tuple[str, script.Table]]:
    """The held-out tasks: cycles and processor time with and without lookup."""
    alone, both = ProposerTally(), ProposerTally()
    tasks = script.tasks(limit)
    with progress.task("held-out tasks", len(tasks), "tasks") as bar:
        for i, task in enumerate(tasks):
            request = plan_requests.request_of(session, task)
            pair: list[tuple[Proposer, ProposerTally]] = [
                (DflashDrafter(), alone),
                (DraftChooser(DflashDrafter(), request.prompt), both),
            ]
            tokens = [run(session, request, p, t) for p, t in (pair if i % 2 else pair[::-1])]
            assert tokens[0] == tokens[1], f"{task.name}: lookup changed the answer"
            bar.advance(1)
    yield "no repetition", [
        ("", "drafter", "both", "ratio"),
        ("cycles", alone.cycles, both.cycles, round(both.cycles / alone.cycles, 4)),
        ("processor s", round(alone.seconds, 2), round(both.seconds, 2),
         round(both.seconds / alone.seconds, 4)),
    ]  # fmt: skip


def host_cost(session: Session) -> Iterator[tuple[str, script.Table]]:
    """Processor time of the index, for ids as planner-nano's answers have them."""
    answers = [
        t for task in script.tasks() for t in plan_requests.tokenizer_of(session).encode(task.plan)
    ]
    half = len(answers) // 2
    text = tuple(answers[:half])
    start = time.process_time()
    index = LookupIndex(NO_TEXTS, text)
    built, at = time.process_time() - start, 0
    committing = drafting = 0.0
    output = answers[half:]
    for at in range(0, len(output), 12):
        start = time.process_time()
        index.commit(output[at : at + 12], None)
        between = time.process_time()
        index.drafts((), 15)
        drafting += time.process_time() - between
        committing += between - start
    yield (
        "host",
        [
            ("", "us"),
            ("indexing a token of a text", round(1e6 * built / len(text), 2)),
            ("appending a committed token", round(1e6 * committing / len(output), 2)),
            ("reading a draft of 15 tokens", round(1e6 * drafting / (len(output) / 12), 2)),
        ],
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Print the tables."""
    parser = script.parser(__doc__)
    parser.add_argument("--pairs", type=script.count, default=48, help="replanning tasks")
    parser.add_argument("--limit", type=script.count, default=24, help="held-out tasks")
    parser.add_argument("--replanning", action="store_true", help="no other tables")
    args = parser.parse_args(argv)
    progress = choose(sys.stderr)
    with closing(
        open_session(args.package, EngineConfig(threads=args.threads), progress)
    ) as session:
        tables = [*replanning(session, args.pairs, progress)]
        if not args.replanning:
            tables += copying(session)
            tables += nothing_repeated(session, args.limit, progress)
            tables += host_cost(session)
    progress.close()
    script.show(tables, as_json=args.json)


if __name__ == "__main__":
    sys.exit(script.run(main))
