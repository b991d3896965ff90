"""For tests on the emulator and on a GPU: a row's result does not depend on the rows after it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
from support.kernel_cases import cases_of
from support.kernel_runner import Call
from support.op_cases import OpCase

from thor_dflash.core.tensors import Array
from thor_dflash.plugins.contract import Op


def same_bits(got: Mapping[str, Array], want: Mapping[str, Array]) -> None:
    """Check that arrays are equal bit for bit."""
    for name, value in want.items():
        np.testing.assert_array_equal(got[name].view(np.uint8), value.view(np.uint8), name)


def cut(op: Op, case: OpCase, rows: slice) -> OpCase:
    """The case, reduced to some of its rows."""
    a = op.complete(case.attributes)
    by_row = {p.name for p in op.inputs_of(a) if p.shape[0] == "T"}
    inputs = {n: x[rows] if n in by_row else x for n, x in case.inputs.items()}
    return OpCase(case.name, inputs, case.attributes)


def rows_of(op: Op, case: OpCase) -> int:
    """Number of rows of a case: of its first input."""
    first = op.inputs_of(op.complete(case.attributes))[0].name
    return len(case.inputs[first])


def served_apart(op: Op, rows: int) -> int:
    """Largest number of rows that is computed differently from `rows`, 0 if none: by another kernel
    or with another cut of a product's K or of the drafter's context, of which there is one for up
    to 16 rows and one for 32.
    """
    bounds = (16, 32) if op.name in ("linear", "head", "draft_attention") else (32,)
    return max((bound for bound in bounds if bound < rows), default=0)


def outputs_by_row(op: Op, got: dict[str, Array], call: Call) -> dict[str, Array]:
    """The outputs that have one row for each row of the input."""
    names = {p.name for p in op.outputs_of(call.site.attributes) if p.shape[0] == "T"}
    return {name: x for name, x in got.items() if name in names}


def prefixes(op: Op) -> Iterator[str]:
    """Names of the cases whose rows must not depend on later rows."""
    if op.name in ("linear", "head", "verify_attention"):
        yield from cases_of(op)
    for name, case in cases_of(op).items():
        if (op.name == "gdn" and case.attributes.get("mode") != "prefill") or (
            op.name == "draft_attention" and case.attributes["causal"] == 1
        ):
            yield name
