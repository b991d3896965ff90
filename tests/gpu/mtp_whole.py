"""Decodes with a full-size MTP layer of random weights: the tokens are those of plain decoding, and
a cycle of the loop takes so long.

    python tests/gpu/mtp_whole.py
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import numpy as np
from support.full_size import opened

from thor_dflash.core.progress import choose
from thor_dflash.runtime.decoding.block import DecodeProgress, Sampling
from thor_dflash.runtime.decoding.loop import DecodeRequest, decode
from thor_dflash.runtime.decoding.model_runner import ModelRunner
from thor_dflash.runtime.decoding.mtp import MtpDrafter
from thor_dflash.runtime.decoding.proposers import NoDrafter, Proposer
from thor_dflash.runtime.decoding.telemetry import RequestMeter

PROMPT, TOKENS, CYCLES = 700, 48, 100


def answer(
    model: ModelRunner, proposer: Proposer, sampling: Sampling | None = None
) -> tuple[list[int], int]:
    """The tokens after one random prompt, and the cycles that they took."""
    ids = np.random.default_rng(1).integers(1, model.manifest.target.vocab, PROMPT)
    prompt = tuple(int(token) for token in ids)
    request = DecodeRequest(
        prompt=prompt,
        max_tokens=TOKENS,
        max_answer=TOKENS,
        stop=(),
        proposer=proposer,
        policies=(),
        sampling=sampling,
    )
    meter = RequestMeter(model.block, model.engine.busy())
    chunks = [c.tokens for c in decode(model, request, DecodeProgress(prompt), meter) if c.tokens]
    return [token for tokens in chunks for token in tokens], len(chunks)


def main() -> int:
    """Check, measure and print."""
    reporter = choose(sys.stderr)
    with opened("qwen3.6-27b", True, reporter, mtp=True) as bench:
        # Nearly even laws have many draws; a sharp one often repeats itself.
        for sampling in (None, Sampling(temperature=1.0, seed=5)):
            plain, _ = answer(bench.model, NoDrafter(), sampling)
            drafted, cycles = answer(bench.model, MtpDrafter(), sampling)
            assert drafted == plain, (plain, drafted)
            print(f"{len(set(plain))} different tokens, {cycles} cycles", file=sys.stderr)
        seconds = bench.prefill(2048)
        loop = bench.loop(2048, CYCLES)
        found = {
            "device": bench.device,
            "block": bench.block,
            "prefill of 2048 tokens, s": seconds,
            "cycle of the loop, ms": 1e3 * loop.clock,
            "in the graph, ms": 1e3 * loop.graph,
            "host, us": 1e6 * loop.host,
        }
    reporter.close()
    print(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
