"""What one block under a grammar costs on the CPU, for the tokenizer of a checkpoint or package.

    python -m thor_dflash.calib.studies.grammar_cost models/planner-nano/target [--ids 248320]

`--ids` fills the vocabulary up with random words, for the cost of one of that size.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from thor_dflash.calib.studies import script
from thor_dflash.core.errors import PackageError
from thor_dflash.package import tokenizer_files as files
from thor_dflash.runtime.decoding.block import Block
from thor_dflash.runtime.grammar.compiler import Grammar, Grammars
from thor_dflash.runtime.grammar.policy import Constrain, Place
from thor_dflash.runtime.text.tokenizer import Tokenizer
from thor_dflash.serving.planner.plan_schema import from_skills

ROWS = 16
OBJECTS = [f"object_{i}" for i in range(40)]
SKILLS = {f"skill_{i}": {"object": "object", "on": "object"} for i in range(10)}


def filled(directory: Path, ids: int, out: Path) -> Path:
    """A copy of a tokenizer with random words up to `ids`.

    Raises:
        PackageError: there is none.
    """
    if not (directory / files.TOKENIZER).is_file():
        raise PackageError(f"{directory} must hold a {files.TOKENIZER} (got none)")
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


def blocks(grammar: Grammar, tokens: list[int]) -> tuple[list[float], list[float]]:
    """us of the walk and of the masks, a block at every third token."""
    walks, masks = list[float](), list[float]()
    for at in range(0, len(tokens) - ROWS, 3):
        policy = Constrain(grammar, Place(thinking=False))
        policy.follow(tokens[:at])
        begin = time.perf_counter()
        block = policy.look((0, *tokens[at : at + ROWS - 1]), Block(cap=ROWS))
        middle = time.perf_counter()
        assert block.mask is not None
        block.mask()
        walks.append(1e6 * (middle - begin))
        masks.append(1e6 * (time.perf_counter() - middle))
    return walks, masks


def main(argv: Sequence[str] | None = None) -> None:
    """Read the arguments, run, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("--ids", type=int, default=0)
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        directory = filled(args.tokenizer, args.ids, Path(folder))
        text, begin = Tokenizer.load(directory), time.perf_counter()
        size = args.ids or files.addressed_ids(directory)
        grammars = Grammars(text, size, files.stop_tokens(directory))
        print(f"vocabulary of {size} ids: {time.perf_counter() - begin:.2f} s")
    for numbered in (True, False):
        schema = from_skills(SKILLS, {"object": OBJECTS}, numbered=numbered)
        grammar = grammars.compile(schema)
        print(f"schema of {len(grammar.schema)} bytes: {grammar.compile_ms:.1f} ms")
        for name, times in zip(("walk", "masks"), blocks(grammar, plan(text)), strict=True):
            low, high = np.percentile(times, [50, 99])
            print(f"  {name}: median {low:.0f} us, 99th percentile {high:.0f} us")


if __name__ == "__main__":
    sys.exit(script.run(main))
