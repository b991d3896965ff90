"""accept: from the target's logits to the rows that are committed, in one small record.

Letters
    R   rows of the block     V  stored vocabulary rows     W  ceil(vocab / 32)

Inputs
    logits   float32 [R, V]; row i follows tokens[0..i]
    tokens   int32 [R]; [last committed, drafts or forced tokens...]
    forced   int32 [R]; the id that must follow row i, or -1 where the model decides
    drafted  int32 [1], 0..R - 1: tokens after the first that hold a draft or a forced id
    cap      int32 [1], 1..R: most rows to commit
    stop     int32 [S]; ids that end the request, -1 for unused places
    mask     int32 [R, W]; bit v % 32 of word v // 32 allows id v after row i; absent: all allowed
    rule     int32 [1]; 0 strict, 1 log margin, 2 probability delta
    top_k    int32 [1], margin float32 [1]; the relaxed rules' bounds
    close    int32 [1]; a draft of this id ends relaxed acceptance, itself included; -1: none
    strict   int32 [Z]; ids never accepted relaxed, -1 for unused places
    soft     int32 [R]; the id row i prefers to its best one if that is near, or -1
    soft_margin  float32 [1]; how near: log-probability, nats, at least 0

Attribute vocab: ids at and past it are padding and never chosen; 0 means V.
Attribute rows: R.

Output
    record   int32 [5 + 2R], see Record

Row i's choice is forced[i]; else soft[i] if it is allowed and its log-probability is at least the
best one minus soft_margin; else the allowed id with the largest logit, the first of equals. A draft
agrees when it is the choice; or, where the choice is the best id, under a relaxed rule when its
rank (logit descending, id ascending) is below top_k and its log-probability (1) is at least the
best one minus margin, or its probability (2) is at least the best one minus margin. margin 0 and
top_k 1 are strict. Tokens past `drafted` are padding and never agree. Rows commit up to the first
that does not agree, which adds the target's own choice; a stop id among the tokens ends the commit
there. NaN or infinity in a row, or nothing left to choose, makes it a fault: its choice is -1 and
nothing after it agrees. Nothing is clamped.

Source: Leviathan et al. 2023, algorithm 1, at temperature 0; TensorRT-LLM's relaxed acceptance for
rule 2, FlashRT's for rule 1 (logit and log-probability margins are the same number); Lucebox's soft
close (a ratio p(soft) / p(best) of at least r is a margin of -ln r).
"""

from pathlib import Path

from thor_dflash.plugins.accept.reference import HEADER, Record, cases, reference
from thor_dflash.plugins.op import Attributes, Op, Port
from thor_dflash.tensors import DType

__all__ = ["OP", "Record"]

_I32 = (DType.I32,)


def _derived(a: Attributes) -> dict[str, int]:
    return {"L": HEADER + 2 * a.integer("rows")}


OP = Op(
    name="accept",
    inputs=(
        Port("logits", (DType.F32,), ("R", "V")),
        Port("tokens", _I32, ("R",)),
        Port("forced", _I32, ("R",)),
        Port("drafted", _I32, (1,)),
        Port("cap", _I32, (1,)),
        Port("stop", _I32, ("S",)),
        Port("mask", _I32, ("R", "W"), optional=True),
        Port("rule", _I32, (1,)),
        Port("top_k", _I32, (1,)),
        Port("margin", (DType.F32,), (1,)),
        Port("close", _I32, (1,)),
        Port("strict", _I32, ("Z",)),
        Port("soft", _I32, ("R",)),
        Port("soft_margin", (DType.F32,), (1,)),
    ),
    outputs=(Port("record", _I32, ("L",)),),
    attributes={"vocab": 0, "rows": 16},
    derived=_derived,
    reference=reference,
    cases=cases,
    room=Path(__file__).parent,
    rtol=0.0,
)
