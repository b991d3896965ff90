"""How far logits may be apart, where the caller says it."""

from __future__ import annotations

from dataclasses import replace

from decoding import session

from thor_dflash.calib.check.compare import Reference, compare, make, some_tokens
from thor_dflash.progress import Silent


def test_no_tolerance_is_no_default() -> None:
    s = session()
    golden = make(s, None, some_tokens(s), Silent())
    near = Reference(replace(golden, logits=golden.logits * (1 + 1e-6)))
    found = [compare(s, None, near, golden.tokens, "none", x, Silent()) for x in (None, 0.0)]
    assert [report.right for report in found] == [True, False]
