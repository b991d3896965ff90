"""selector: DFlash2's choice of the drafts, each among candidates by the draft before it.

Dimensions
    R   rows of the block, `rows`     W   columns of the logits     V   vocabulary
    C   columns of a codebook         K   candidates of a row, `top_k`; W of them if W < K

Inputs
    logits        float32 [R, W], raw; row j is for the token after row j - 1. Row 0 is not used
    id_map        int32 [W]; the vocabulary id of each column (a reduced draft vocabulary)
    hidden        rows [R, C], projected from the head's normed rows
    predecessors, successors   codebooks [V, C], by vocabulary id; all three, or none: no edges
    last          int32 [1]; the last committed token
    forced        int32 [R]; the id that must follow row t, or -1
    length, seed, temperature   as in `sample`; absent: greedy

Attributes
    vocab         columns below it may be chosen; 0 means all may be
    top_k, rows
    multiplier, softcap   U = multiplier * logit, then softcap * tanh(U / softcap) if it is not 0
    rejection     1: drawn by noise of its own, DRAFT, and with the law of each draw

Outputs
    tokens        int32 [R]: `last`, then for each row j from 1 on forced[j - 1] if that is an id,
                  else the candidate c with the largest score U[c] + sum over columns of
                  predecessors[p] * hidden[j] * successors[c], p being token j - 1. Drawn tokens:
                  with the largest score / temperature + noise(seed, length + j, c) instead, the
                  noise that `sample` adds for the same position
    candidates    int32 [R, K], scores float32 [R, K], with `rejection`: what tokens[j + 1] was
                  drawn from in row j, and score / temperature of each, given token j; -1 and minus
                  infinity for unused places and scores that are not finite

Candidates are the K largest logits, the smaller column first among equals; among equal scores the
first candidate is chosen. Minus infinity is no candidate. A row without candidates, or with a NaN
among its logits, gives 0.

Source: z-lab/dflash model.py CandidateSelector; vLLM spec_decode/dflash2. Multiplier and softcap
are applied to the candidates only, as vLLM and SGLang do: tanh saturates and would make ties. The
coupled draw: arXiv 2408.07978.
"""

from pathlib import Path

from thor_dflash.core.tensors import DType
from thor_dflash.plugins.contract import ACTIVATION, Op, Port
from thor_dflash.plugins.selector.reference import reference

_PLAIN = (DType.BF16, DType.F16, DType.F32)
LAW = ("candidates", "scores")
"""The outputs of rejection."""

OP = Op(
    name="selector",
    inputs=(
        Port("logits", (DType.F32,), ("R", "W")),
        Port("id_map", (DType.I32,), ("W",), optional=True),
        Port("hidden", ACTIVATION, ("R", "C"), optional=True),
        Port("predecessors", _PLAIN, ("V", "C"), optional=True),
        Port("successors", _PLAIN, ("V", "C"), optional=True),
        Port("last", (DType.I32,), (1,)),
        Port("forced", (DType.I32,), ("R",)),
        Port("length", (DType.I32,), (1,), optional=True),
        Port("seed", (DType.I32,), (2,), optional=True),
        Port("temperature", (DType.F32,), (1,), optional=True),
    ),
    outputs=(
        Port("tokens", (DType.I32,), ("R",)),
        Port("candidates", (DType.I32,), ("R", "K")),
        Port("scores", (DType.F32,), ("R", "K")),
    ),
    attributes={
        "vocab": 0,
        "rows": 8,
        "top_k": 16,
        "multiplier": 1.0,
        "softcap": 0.0,
        "rejection": 0,
    },
    derived=lambda a: {"K": a.integer("top_k")},
    absent=lambda a: frozenset() if a.integer("rejection") else frozenset(LAW),
    reference=reference,
    folder=Path(__file__).parent,
)
