"""sample: draws an id for each row of logits by noise that depends on seed, position and id alone.

Dimensions
    T   rows     V   stored vocabulary rows     W   ceil(vocab / 32) or more     K   candidates

Inputs
    logits       float32 [T, V]
    id_map       int32 [V]; the vocabulary id of each stored row (a reduced draft vocabulary)
    mask         int32 [T, W]; as in `accept`; absent: all allowed
    length       int32 [1]; row i draws for absolute position length + first + i
    seed         int32 [2]; low and high word
    temperature  float32 [1], positive
    top_k        int32 [1]; 0: off
    top_p        float32 [1]; 1 and above: off
    min_log_p    float32 [1], at most 0: the logarithm of min_p; minus infinity: off
    tokens       int32 [T]; the block: row i's draft is tokens[i + 1]
    drawn        int32 [1], below T: rows before it have drafts that were drawn
    candidates   int32 [T, K], distinct ids, or -1 for unused places
    scores       float32 [T, K]; row i's draft was drawn from softmax(scores[i]) of its candidates;
                 all four for rejection, or none

Attribute vocab: stored rows at and past it are padding and never chosen; 0 means V.
Attribute first: see length.

Outputs
    choice   int32 [T]; the drawn id; -1 if a logit below vocab is NaN or positive infinity, or
             none is allowed
    last     int32 [T]; the stored row of the lowest-ranked logit that could be drawn, or -1

The processed logits of a row, in the order of transformers' warpers (temperature, top-k, top-p,
min-p), each an exact definition: every float operation is float32, rounded once, in the order
written, with numpy_noise's functions, so that all engines agree on equal logits.

    rank   allowed logits x by (logit descending, stored row ascending); m is the largest
    z      (x - m) * (1 / temperature)
    top_k  the first top_k ranks
    top_p  of those, the shortest prefix whose weights sum to at least ceil(top_p * their total),
           and to 1; a weight is rint(exp(z) * 2^31), an integer, so that sums do not depend on
           their order; the product is float64
    min_p  of those, the ones with z >= min_log_p
    draw   the largest z + noise(seed, position, id); among equals the lowest id

The draw has exactly the law softmax(z) over what is left (Gumbel-max).

Rejection. In a row before `drawn` whose draft d is one of its candidates, the choice is d if d is
accepted, else a draw from what p has more than q. Over the law of d its law is that of the draw
above, and it equals d as often as can be. A draft that is no candidate is a point mass: the draw.

    w(z)    the weight rint(exp(z) * 2^44), an integer; P, Q: sums over what is left, and over the
            candidates with z = score - the largest score. From here on everything is float64
    q(c)    w(z) / Q of a candidate; 0 of any other id
    accept  (u * q(d)) * P < w(d), u = (word of id 0 at the position, purpose ACCEPT, + 1/2) / 2^32
    else    the largest s + noise(RESIDUAL); s = z where q is 0, else log(r * 2^-44) in float32 for
            r = w - q * P above 0; among equals the lowest id. None left, by rounding: d

Source: transformers' logits warpers; Gumbel-max, Maddison et al. 2014; coupled acceptance, Daliri,
Musco and Suresh 2024; rejection, Leviathan et al. 2023, algorithm 1. That its draws share no noise:
vLLM #54282.
"""

from pathlib import Path

from thor_dflash.core.tensors import DType
from thor_dflash.plugins.contract import Op, Port
from thor_dflash.plugins.sample.reference import reference

_F32, _I32 = (DType.F32,), (DType.I32,)

OP = Op(
    name="sample",
    inputs=(
        Port("logits", _F32, ("T", "V")),
        Port("id_map", _I32, ("V",), optional=True),
        Port("mask", _I32, ("T", "W"), optional=True),
        Port("length", _I32, (1,)),
        Port("seed", _I32, (2,)),
        Port("temperature", _F32, (1,)),
        Port("top_k", _I32, (1,)),
        Port("top_p", _F32, (1,)),
        Port("min_log_p", _F32, (1,)),
        Port("tokens", _I32, ("T",), optional=True),
        Port("drawn", _I32, (1,), optional=True),
        Port("candidates", _I32, ("T", "K"), optional=True),
        Port("scores", _F32, ("T", "K"), optional=True),
    ),
    outputs=(Port("choice", _I32, ("T",)), Port("last", _I32, ("T",))),
    attributes={"vocab": 0, "first": 0},
    reference=reference,
    folder=Path(__file__).parent,
    rtol=0.0,
)
