"""Times the cycles of a full-size model under a JSON schema, and the same cycles without one.

    python tests/gpu/grammar_cycles.py

The weights are random and the vocabulary is filled up with random words, so the model cannot plan.
The ids of a plan are forced instead, a whole block in every cycle: so the walk over the grammar and
the masks are as long as they can be, and every cycle commits all of its rows.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT)]

from thor_dflash.calib.studies import script
from thor_dflash.cli.commands.bench import hollow, variants
from thor_dflash.config.tree import Config
from thor_dflash.core.progress import Progress as Reporter
from thor_dflash.core.progress import choose
from thor_dflash.package import tokenizer_files as files
from thor_dflash.runtime.decoding.block import Block, DecodeProgress, Policy
from thor_dflash.runtime.decoding.model_runner import ModelRunner
from thor_dflash.runtime.decoding.proposers import DflashDrafter, NoDrafter, Proposer
from thor_dflash.runtime.engines.cuda.engine import CudaEngine
from thor_dflash.runtime.grammar.policy import Constrain, Place
from thor_dflash.runtime.measure.bench_report import CONTEXT
from thor_dflash.runtime.measure.profile import HOST, PROMPT
from thor_dflash.runtime.measure.random_weights import RandomWeights
from thor_dflash.runtime.session import Request, Session
from thor_dflash.runtime.text.tokenizer import Tokenizer
from thor_dflash.serving.planner.plan_schema import from_skills

WARM, RUNS = 3, 15
"""Answers of each kind, without and with their times."""
FIRST, LAST = 2_000, 200_000
"""Range of the prompt's ids, in which there are only random words."""


OBJECTS = [f"object_{i}" for i in range(40)]
SKILLS = {f"skill_{i}": {"object": "object", "on": "object"} for i in range(10)}


def filled(directory: Path, ids: int, out: Path) -> Path:
    """A copy of a tokenizer with random words up to `ids`."""
    for name in files.tokenizer_files(directory):
        shutil.copy(directory / name, out / name)
    table, rng = json.loads((out / files.TOKENIZER).read_text(encoding="utf-8")), random.Random(0)
    vocab: dict[str, int] = table["model"]["vocab"]
    # A learned vocabulary with a gap would move the ids of the added tokens.
    vocab |= {token["content"]: token["id"] for token in table["added_tokens"]}
    parts, first = [word for word in vocab if len(word) > 1], files.addressed_ids(out)
    while first < ids:
        word = "".join(rng.choice(parts) for _ in range(rng.choice((2, 2, 3))))
        first += vocab.setdefault(word, first) == first
    (out / files.TOKENIZER).write_text(json.dumps(table), encoding="utf-8")
    return out


def plan(text: Tokenizer) -> list[int]:
    """A plan of eight steps."""
    steps = [
        {
            "id": i + 1,
            "skill": f"skill_{i}",
            "args": {"object": OBJECTS[i], "on": OBJECTS[-1]},
            "on_fail": "retry",
        }
        for i in range(8)
    ]
    value = {"goal": "[a->b]", "steps": steps, "needs_clarification": None}
    return text.encode(json.dumps(value, separators=(",", ":")))


@dataclass(frozen=True, slots=True)
class Forced(Policy):
    """Forces the ids of an answer, block by block."""

    answer: list[int]

    def shape(self, progress: DecodeProgress, block: Block) -> Block:
        """See Policy."""
        at = len(progress.tokens)
        return block.forcing(self.answer[at : at + block.cap], "forced")


class Timed(Constrain):
    """Counts the time of walks by itself."""

    walks = 0.0
    """Seconds."""

    def look(self, tokens: tuple[int, ...], block: Block) -> Block:
        """See Look."""
        before = self.seconds
        seen = super().look(tokens, block)
        self.walks += self.seconds - before
        return seen


@contextmanager
def opened(shape: str, reporter: Reporter) -> Iterator[Session]:
    """A session of random weights whose tokenizer has as many ids as the shape."""
    variant = next(variants(Config(), ablations=False))
    build = replace(variant.build, engine="cuda")
    with tempfile.TemporaryDirectory() as name, tempfile.TemporaryDirectory() as words:
        made = hollow(shape, Path(name), replace(variant, build=build))
        with reporter.task("filling the vocabulary"):
            tokens = filled(ROOT / "models/planner-nano/target", made.target.vocab, Path(words))
            text = Tokenizer.load(tokens)
        made = replace(made, stop_tokens=files.stop_tokens(tokens), tokenizer=True)
        fill = RandomWeights(Path(name), variant.engine.cubins_directory)
        with closing(CudaEngine(Path(name), variant.engine, reporter, fill)) as engine:
            yield Session(ModelRunner(engine, made, made.capacity, made.block), text)


def measure(session: Session) -> list[tuple[object, ...]]:
    """The table: a row for each kind of cycle. What it was measured with is printed on stderr."""
    assert session.tokenizer is not None
    begin = time.perf_counter()
    grammar = session.grammar(from_skills(SKILLS, {"object": OBJECTS}, numbered=True))
    print(
        f"{session.model.engine.device}; a schema of {len(grammar.schema)} bytes compiled in "
        f"{grammar.compile_ms:.0f} ms, {time.perf_counter() - begin:.2f} s with its vocabulary",
        file=sys.stderr,
    )
    answer = plan(session.tokenizer)
    print(f"{len(answer)} ids after a prompt of {CONTEXT}; medians of {RUNS} answers, ms per cycle",
          file=sys.stderr)  # fmt: skip
    prompt = np.random.default_rng(0).integers(FIRST, LAST, CONTEXT).tolist()
    request = Request(
        prompt=tuple(prompt),
        max_tokens=len(answer),
        stop=frozenset(session.manifest.stop_tokens),
        grammar=grammar,
    )
    rows: list[tuple[object, ...]] = [
        ("cycle", "by the clock, ms", "on the device, ms", "apart, ms", "walk, ms", "masks, ms")
    ]
    for name, proposer in (("drafter", DflashDrafter()), ("no drafter", NoDrafter())):
        for kind, asked in (("schema", request), ("no schema", replace(request, grammar=None))):
            rows.append((f"{name}, {kind}", *cycle(session, asked, proposer, answer)))
    return rows


def cycle(
    session: Session, request: Request, proposer: Proposer, answer: list[int]
) -> tuple[object, ...]:
    """The times of one kind of cycle, ms; without a grammar in the request, without a schema."""
    found: dict[str, list[float]] = {}
    for i in range(WARM + RUNS):
        policies: list[Policy] = [Forced(answer)]
        if request.grammar is not None:
            policies.append(constrain := Timed(request.grammar, Place(thinking=False)))
        for _ in session.run(request, proposer, tuple(policies)):
            pass
        if i < WARM:
            continue
        report = session.report()
        assert report.completion_tokens == len(answer)
        graphs = report.phases_ms.items()
        parts = {n: ms for n, ms in graphs if n != HOST and not n.startswith(PROMPT)}
        times = {"clock": report.timings.decode_ms, "device": sum(parts.values())}
        if request.grammar is not None:
            walks = 1e3 * constrain.walks
            times |= {"walk": walks, "masks": 1e3 * constrain.seconds - walks}
        for key, each in times.items():
            found.setdefault(key, []).append(each / report.spec.cycles)
    ms = {key: round(statistics.median(each), 3) for key, each in found.items()}
    apart = round(ms["clock"] - ms["device"], 3)
    return ms["clock"], ms["device"], apart, ms.get("walk", ""), ms.get("masks", "")


def main(arguments: list[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--shape", default="qwen3.6-27b", metavar="NAME", help="a model's sizes")
    parser.add_argument("--json", action="store_true", help="print the table as JSON")
    args = parser.parse_args(arguments)
    reporter = choose(sys.stderr)
    with opened(args.shape, reporter) as session:
        reporter.close()
        script.show([("cycles", measure(session))], as_json=args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
