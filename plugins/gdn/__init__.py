"""gdn: causal convolution, gates and the gated delta rule for a block of rows.

The state is never rolled back. A call first folds the rows accepted since the last call into the
state, then runs its own rows from there. In verify mode these rows are saved as records and do not
change the state; the next call gets the number of accepted ones. In prefill mode every valid
row is final and updates the state.

Dimensions
    T   rows        C   conv channels: q and k of every key head, then v of every value head
    Hk, Hv  key and value heads     Dk, Dv  their dimensions      J   conv kernel - 1
    R   rows the records hold (verify: the rows of the previous block)

Inputs
    qkv          rows [T, C], before the convolution; [q | k | v], head-major
    b, a         rows [T, Hv]; beta = sigmoid(b), decay = exp(-exp(a_log) * softplus(a + dt_bias))
    conv_weight  [C, 1, J + 1]; the last tap is multiplied with the current row
    a_log, dt_bias  [Hv]
    accepted     int32 [1], 0..R: records to fold
    valid        int32 [1], 1..T: number of valid rows of a prefill; absent in verify mode
    state        float32 [Hv, Dk, Dv], as of the last folded row
    tail         rows [J, C]: the convolution's inputs before the records
    records      record_qkv rows [R, C], record_k float32 [R, Hk, Dk], record_d float32 [R, Hv, Dv],
                 record_decay float32 [R, Hv]; absent in saves="states"
    states       float32 [R, Hv, Dk, Dv]: the state after each row; only with saves="states", which
                 of the records has record_qkv alone

Outputs
    o            rows [T, Hv * Dv]; zero past `valid`
    next_state, next_tail   after the fold (verify) or after the last valid row (prefill)
    next_record_*, next_states   of this call's rows; verify mode only

Recurrence, per value head, float32 throughout (k, q of head j // (Hv / Hk), L2-normalised, q
scaled by Dk^-0.5):
    S <- decay S;  d = beta (v - S^T k);  S <- S + k d^T;  o = S^T q
A record is (k, d, decay), so folding it is S <- decay S + k d^T: the operations that computed the
row, hence the same bits whether rows are folded at once, one by one, or ran in a single block.

Source: Qwen3.5 modeling (transformers models/qwen3_5, torch_recurrent_gated_delta_rule).
"""

from pathlib import Path

from thor_dflash.core.tensors import DType
from thor_dflash.plugins.contract import ACTIVATION, Attributes, Op, Port
from thor_dflash.plugins.gdn.reference import reference

_PLAIN = (DType.BF16, DType.F16, DType.F32)
_F32 = (DType.F32,)
_I32 = (DType.I32,)

_RECORDS = (
    Port("record_qkv", ACTIVATION, ("R", "C")),
    Port("record_k", _F32, ("R", "Hk", "Dk"), optional=True),
    Port("record_d", _F32, ("R", "Hv", "Dv"), optional=True),
    Port("record_decay", _F32, ("R", "Hv"), optional=True),
    Port("states", _F32, ("R", "Hv", "Dk", "Dv"), optional=True),
)


def _derived(a: Attributes) -> dict[str, int]:
    return {"VD": a.integer("value_heads") * a.integer("value_dim")}


def _absent(a: Attributes) -> frozenset[str]:
    parts = {"next_record_k", "next_record_d", "next_record_decay"}
    if a.word("mode") == "prefill":
        return frozenset(parts | {"next_record_qkv", "next_states"})
    return frozenset(parts if a.word("saves") == "states" else {"next_states"})


OP = Op(
    name="gdn",
    inputs=(
        Port("qkv", ACTIVATION, ("T", "C")),
        Port("b", ACTIVATION, ("T", "Hv")),
        Port("a", ACTIVATION, ("T", "Hv")),
        Port("conv_weight", _PLAIN, ("C", 1, "J1")),
        Port("a_log", _PLAIN, ("Hv",)),
        Port("dt_bias", _PLAIN, ("Hv",)),
        Port("accepted", _I32, (1,)),
        Port("valid", _I32, (1,), optional=True),
        Port("state", _F32, ("Hv", "Dk", "Dv")),
        Port("tail", ACTIVATION, ("J", "C")),
        *_RECORDS,
    ),
    outputs=(
        Port("o", ACTIVATION, ("T", "VD"), like="qkv"),
        Port("next_state", _F32, ("Hv", "Dk", "Dv")),
        Port("next_tail", ACTIVATION, ("J", "C"), like="tail"),
        Port("next_record_qkv", ACTIVATION, ("T", "C"), like="record_qkv"),
        Port("next_record_k", _F32, ("T", "Hk", "Dk")),
        Port("next_record_d", _F32, ("T", "Hv", "Dv")),
        Port("next_record_decay", _F32, ("T", "Hv")),
        Port("next_states", _F32, ("T", "Hv", "Dk", "Dv")),
    ),
    attributes={
        "mode": "verify",
        "saves": "records",
        "key_heads": 1,
        "value_heads": 1,
        "key_dim": 128,
        "value_dim": 128,
        "conv_kernel": 4,
    },
    derived=_derived,
    absent=_absent,
    reference=reference,
    folder=Path(__file__).parent,
)
