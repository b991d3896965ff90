"""How far logits may differ from a reference: the default limits, and a tolerance that is given."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.loop_models import session

from thor_dflash.calib.check.compare import Reference, compare, make, some_tokens
from thor_dflash.core.progress import Silent


def test_a_tolerance_of_0_is_not_the_default() -> None:
    s = session()
    golden = make(s, None, some_tokens(s), Silent())
    near = Reference(replace(golden, logits=golden.logits * (1 + 1e-6)))
    found = [compare(s, None, near, golden.tokens, "none", x, Silent()) for x in (None, 0.0)]
    assert [report.right for report in found] == [True, False]


@pytest.mark.parametrize(("rounds", "limit"), [(False, 0.002), (True, 0.06)])
def test_a_reference_of_an_engine_that_rounds_has_a_wider_default_limit(
    rounds: bool, limit: float
) -> None:
    s = session()
    golden = make(s, None, some_tokens(s), Silent())
    for share, right in ((0.8 * limit, True), (1.2 * limit, False)):
        near = Reference(replace(golden, logits=golden.logits * (1 + share), rounds=rounds))
        assert compare(s, None, near, golden.tokens, "none", None, Silent()).right is right
