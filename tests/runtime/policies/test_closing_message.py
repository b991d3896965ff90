"""The message that closes thinking must leave room for an answer."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.constrained_model import asked, session

from thor_dflash.config.decode import BudgetConfig
from thor_dflash.core.errors import RequestError


@pytest.mark.parametrize("message", ["stop <|im_end|></think>", "stop</think><|im_end|>"])
def test_a_closing_message_does_not_end_the_answer(message: str) -> None:
    own = BudgetConfig(tokens=4, reply=120, message=message)
    with pytest.raises(RequestError, match=r"^decode.budget.message must hold no token that ends"):
        session().generate(replace(asked(True), budget=own))
    free = replace(asked(True), budget=own, stop=frozenset())
    session().generate(free)  # its token ends no answer here
