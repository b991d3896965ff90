"""Lookup drafts over the answers of a recorded trace, simulated: no model, the recorded tokens.

python -m thor_dflash.calib.studies.lookup_trace TRACE.jsonl --tokenizer DIR [--json]

Every turn's prompt and answer are tokens of one frame (ChatML, the answer's thinking before its
call). The texts are those of the runtime: the last answers of the conversation, and the prompt. A
drafter is simulated, each of whose tokens is right with the same probability.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from thor_dflash.calib.replay.recorded_trace import (
    Message,
    RecordedConversation,
    RecordedTurn,
    read_trace,
)
from thor_dflash.calib.studies import script
from thor_dflash.core.progress import Progress, choose
from thor_dflash.core.results import DraftCounts
from thor_dflash.runtime.decoding.draft_chooser import FIRST, HELD, DraftChoice, DraftWorth
from thor_dflash.runtime.decoding.lookup import LookupIndex, LookupTexts
from thor_dflash.runtime.session.recent_answers import BEFORE
from thor_dflash.runtime.text.tokenizer import Tokenizer

ROWS = 16
DRAFTERS = {"none": 0.0, "of 2.8 tokens": 0.645, "of 4.5 tokens": 0.78}
"""Name -> probability that a drafted token is right. Multi-token prediction and DFlash have such
lengths on code (docs/performance)."""
RECENT = 4


@dataclass(slots=True)
class SimulatedBlocks:
    """Blocks of some answers."""

    tokens: int = 0
    cycles: int = 0
    sources: dict[str, DraftCounts] = field(default_factory=dict[str, DraftCounts])

    def add(self, source: str, drafted: int, count: int) -> None:
        """Add a block that committed `count` tokens."""
        self.tokens += count
        self.cycles += 1
        counts = DraftCounts(1, drafted, min(drafted, count - 1))
        self.sources[source] = self.sources.get(source, DraftCounts()).plus(counts)


def text_of(message: Message) -> str:
    """A message as a prompt has it."""
    inner = str(message.get("content") or "")
    if message["role"] == "assistant":
        inner = f"<think>\n{message.get('reasoning_content', '')}\n</think>\n\n{inner}"
        for call in message.get("tool_calls", ()):
            function = call["function"]
            values = json.loads(function["arguments"])
            given = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in values.items())
            inner += f"<tool_call>\n<function={function['name']}>\n{given}</function>\n</tool_call>"
    return f"<|im_start|>{message['role']}\n{inner}<|im_end|>\n"


@dataclass(slots=True)
class TraceTokens:
    """Token ids of messages."""

    tokenizer: Tokenizer
    _known: dict[str, list[int]] = field(default_factory=dict[str, list[int]])

    def of(self, text: str) -> list[int]:
        """The ids of a text."""
        if text not in self._known:
            self._known[text] = self.tokenizer.encode(text)
        return self._known[text]

    def turns(self, conversation: RecordedConversation) -> Iterator[tuple[list[int], list[int]]]:
        """Prompt and answer of every turn."""
        for turn in conversation.turns:
            yield self._turn(turn)

    def _turn(self, turn: RecordedTurn) -> tuple[list[int], list[int]]:
        begin = self.of("<|im_start|>assistant\n")
        prompt = [token for message in turn.messages for token in self.of(text_of(message))]
        answer = text_of(turn.answer).removeprefix("<|im_start|>assistant\n").removesuffix("\n")
        return [*prompt, *begin], self.of(answer)


def simulate(
    answer: Sequence[int], choice: DraftChoice, right: float, lookup: bool, found: SimulatedBlocks
) -> None:
    """Decode an answer."""
    rng, done = Random(len(answer)), 0
    while done < len(answer):
        rest = answer[done : done + ROWS]
        draft = choice.choose((), ROWS - 1, drafter=right > 0) if lookup else None
        if draft is not None:
            pairs = zip(draft.tokens, rest, strict=False)
            agreed = next((i for i, (x, y) in enumerate(pairs) if x != y), len(draft.tokens))
            source, drafted = str(draft.source), len(draft.tokens)
        else:
            drafted = ROWS - 1 if right else 0
            agreed = next((i for i in range(drafted) if rng.random() >= right), drafted)
            source = "drafter" if right else "none"
        count = min(agreed + 1, len(rest))
        found.add(source, drafted, count)
        if lookup:
            choice.learn(answer[done : done + count])
        done += count


def measure(
    conversations: Sequence[RecordedConversation], tokens: TraceTokens, progress: Progress
) -> list[tuple[str, script.Table]]:
    """The tables."""
    found = {(n, lookup): SimulatedBlocks() for n in DRAFTERS for lookup in (False, True)}
    with progress.task("turns", sum(len(c.turns) for c in conversations), "turns") as bar:
        for conversation in conversations:
            recent: list[tuple[int, ...]] = []
            held = 0
            for prompt, answer in tokens.turns(conversation):
                # Of a prompt that is reused only the end is searched, as in the runtime.
                part = prompt[max(0, held - HELD) :]
                for (name, lookup), blocks in found.items():
                    texts = LookupTexts(session=tuple(recent))
                    index = LookupIndex(texts, part if lookup else ())
                    choice = DraftChoice(index, DraftWorth(FIRST * ROWS), ROWS)
                    simulate(answer, choice, DRAFTERS[name], lookup, blocks)
                recent = [*recent, (*prompt[-BEFORE:], *answer)][-RECENT:]
                held = len(prompt)
                bar.advance(1)
    rows: list[Sequence[object]] = [("drafter", "alone", "with lookup", "cycles, ratio")]
    sources: list[Sequence[object]] = [("drafter", "source", "blocks", "drafted", "accepted")]
    for name in DRAFTERS:
        alone, both = found[name, False], found[name, True]
        lengths = (round(b.tokens / b.cycles, 2) for b in (alone, both))
        rows.append((name, *lengths, round(both.cycles / alone.cycles, 3)))
        sources += [(name, s, c.blocks, c.drafted, c.accepted) for s, c in both.sources.items()]
    facts = found["none", True]
    count = [
        ("", ""),
        ("turns", sum(len(c.turns) for c in conversations)),
        ("tokens", facts.tokens),
    ]
    return [("trace", count), ("trace lookup", rows), ("trace sources", sources)]


def main(argv: Sequence[str] | None = None) -> None:
    """Print the tables."""
    parser = script.parser(__doc__, package=False)
    parser.add_argument("trace", type=Path)
    parser.add_argument(
        "--tokenizer", type=Path, required=True, help="a directory with a tokenizer.json"
    )
    parser.add_argument("--conversations", type=script.count, help="only the first so many")
    args = parser.parse_args(argv)
    progress = choose(sys.stderr)
    trace = read_trace(args.trace).first(args.conversations, None)
    tokens = TraceTokens(Tokenizer.load(args.tokenizer))
    tables = measure(trace.conversations, tokens, progress)
    progress.close()
    script.show(tables, as_json=args.json)


if __name__ == "__main__":
    sys.exit(script.run(main))
