"""Cases of gdn with the kernels' sizes of a head."""

from __future__ import annotations

import numpy as np
from support.op_cases import OpCase, gdn_case

from thor_dflash.core.tensors import DType
from thor_dflash.plugins.contract import Attribute


def case_of(
    seed: int,
    rows: int,
    held: int,
    accepted: int,
    heads: tuple[int, int] = (1, 2),
    **attributes: Attribute,
) -> OpCase:
    """A case with the kernels' head dimensions; rows are bf16. `heads`: key heads, value heads."""
    keys, values = heads
    sizes: dict[str, Attribute] = {
        "key_dim": 128, "value_dim": 128, "key_heads": keys, "value_heads": values
    }  # fmt: skip
    rng = np.random.default_rng(seed)
    return gdn_case(rng, rows, held, accepted, sizes | attributes, DType.BF16)


def prefill(case: OpCase, valid: int) -> OpCase:
    """The case with `valid` as its number of valid rows."""
    return OpCase(case.name, {**case.inputs, "valid": np.array([valid], np.int32)}, case.attributes)


def poisoned(case: OpCase) -> OpCase:
    """The case with NaN in all rows and records beyond the counts `valid` and `accepted`."""
    x = {name: value.copy() for name, value in case.inputs.items()}
    for name in x:
        if name.startswith(("record", "states")):
            x[name][int(x["accepted"][0]) :] = np.nan
    for name in ("qkv", "b", "a"):
        if "valid" in x:
            x[name][int(x["valid"][0]) :] = np.nan
    return OpCase(case.name, x, case.attributes)
