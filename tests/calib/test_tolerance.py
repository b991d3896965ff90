"""How far logits may be apart, where the caller says it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from decoding import session

from thor_dflash.calib.check.compare import Reference, compare, make, some_tokens
from thor_dflash.progress import Silent


def test_no_tolerance_is_no_default() -> None:
    s = session()
    golden = make(s, None, some_tokens(s), Silent())
    near = Reference(replace(golden, logits=golden.logits * (1 + 1e-6)))
    found = [compare(s, None, near, golden.tokens, "none", x, Silent()) for x in (None, 0.0)]
    assert [report.right for report in found] == [True, False]


@pytest.mark.parametrize(("rounds", "limit"), [(False, 0.002), (True, 0.06)])
def test_what_an_engine_that_rounds_has_said_is_held_to_a_wider_limit(
    rounds: bool, limit: float
) -> None:
    s = session()
    golden = make(s, None, some_tokens(s), Silent())
    for share, right in ((0.8 * limit, True), (1.2 * limit, False)):
        near = Reference(replace(golden, logits=golden.logits * (1 + share), rounds=rounds))
        assert compare(s, None, near, golden.tokens, "none", None, Silent()).right is right
