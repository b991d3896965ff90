"""accept: decides from the target's logits which rows are committed; the result is a small record.

Dimensions
    R   rows of the block     V  stored vocabulary rows     W  ceil(vocab / 32) or more

Inputs
    logits   float32 [R, V]; row i follows tokens[0..i]
    tokens   int32 [R]; [last committed, drafts or forced tokens...]
    forced   int32 [R]; the id that must follow row i, or -1 if the model decides
    drafted  int32 [1], 0..R - 1: tokens after the first that hold a draft or a forced id
    cap      int32 [1], 1..R: maximum number of rows to commit
    stop     int32 [S]; ids that end the request, -1 for unused places
    mask     int32 [R, W]; bit v % 32 of word v // 32 allows id v after row i; absent: all allowed
    rule     int32 [1]; 0 strict, 1 log margin, 2 probability delta
    top_k    int32 [1], margin float32 [1]; the relaxed rules' bounds
    close    int32 [1]; from the first draft of this id on, acceptance is strict; -1: none
    strict   int32 [Z]; ids never accepted by a relaxed rule, -1 for unused places
    soft     int32 [R]; an id to prefer over row i's best id if its logit is near, or -1
    soft_margin  float32 [1]; how near: difference of log-probabilities, nats, at least 0
    sampled, last  int32 [R]; choice and last of `sample` for the same logits, with
    temperature  float32 [1]; all three, or none for greedy decoding

Attribute vocab: ids at and past it are padding and never chosen; 0 means V.
Attribute rows: R.

Output
    record   int32 [5 + 2R], see Record

Row i's choice is forced[i]; else soft[i] if it is allowed and its log-probability is at least the
best one minus soft_margin; else sampled[i], or without it the allowed id with the largest logit,
the first among equals. A draft agrees if it equals the choice: coupled acceptance, so that tokens
do not depend on drafts. It also agrees under a relaxed rule if the choice is neither forced nor
soft, the draft's rank (logit descending, id ascending) is below top_k, and its log-probability
(rule 1) or probability (rule 2) is at least the best one minus margin; with `sampled`, both are
those at this temperature over the ranks up to last[i], and the draft's is one of them. A margin of
0 or a top_k of 1 amounts to strict acceptance, if nothing is sampled. Tokens past `drafted` are
padding and never agree. Rows are committed up to the first one whose draft does not agree; that row
adds the target's own choice. A stop id among the tokens ends the commit there. A row is a fault if
it has NaN or positive infinity, or if it is not forced and no id is allowed: its choice is -1 and
no row after it is committed. Nothing is clamped.

Source: Leviathan et al. 2023, algorithm 1, at temperature 0; coupled acceptance, Daliri, Musco and
Suresh 2024; TensorRT-LLM's relaxed acceptance for
rule 2, FlashRT's for rule 1 (logit and log-probability margins are the same number); Lucebox's soft
close (a ratio p(soft) / p(best) of at least r is a margin of -ln r).
"""

from pathlib import Path

from thor_dflash.core.tensors import DType
from thor_dflash.plugins.accept.record import HEADER, Record
from thor_dflash.plugins.accept.reference import reference
from thor_dflash.plugins.contract import Attributes, Op, Port

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
        Port("sampled", _I32, ("R",), optional=True),
        Port("last", _I32, ("R",), optional=True),
        Port("temperature", (DType.F32,), (1,), optional=True),
    ),
    outputs=(Port("record", _I32, ("L",)),),
    attributes={"vocab": 0, "rows": 16},
    derived=_derived,
    reference=reference,
    folder=Path(__file__).parent,
    rtol=0.0,
)
