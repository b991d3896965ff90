"""fill_drafts: puts drafts into the free places of a block's tokens.

Dimensions
    R   rows of the block     B   drafts

Inputs
    ids          int32 [R]; a token, or a negative number for a free place
    best         int32 [B]; draft i is for place `at` + i. -1: the row that drafted it had no best
                 id; it counts as 0, since any id will do: the target decides

Attributes
    at           place of the first draft; `at` + B is at most R

Outputs
    tokens       int32 [R]; ids, with drafts in the free places from `at` to `at` + B - 1
    first        int32 [1]; tokens[at]

A place that is free and has no draft keeps its negative number.
"""

from pathlib import Path

from thor_dflash.core.tensors import DType
from thor_dflash.plugins.contract import Op, Port
from thor_dflash.plugins.fill_drafts.reference import reference

OP = Op(
    name="fill_drafts",
    inputs=(Port("ids", (DType.I32,), ("R",)), Port("best", (DType.I32,), ("B",))),
    outputs=(Port("tokens", (DType.I32,), ("R",)), Port("first", (DType.I32,), (1,))),
    attributes={"at": 0},
    reference=reference,
    folder=Path(__file__).parent,
    rtol=0.0,
)
