"""An interrupt between any two steps of a session: what comes after it is as if it had not been."""

from __future__ import annotations

import pytest
from support.loop_models import DEAD, answer, oracle, prompt, session

from thor_dflash.core.errors import TransactionError
from thor_dflash.core.tensors import Array
from thor_dflash.runtime.decoding.block import Block, DecodeProgress, Policy
from thor_dflash.runtime.decoding.proposers import NoDrafter
from thor_dflash.runtime.engines.protocol import Tensor
from thor_dflash.runtime.session import Request, Session


def interrupt(s: Session, monkeypatch: pytest.MonkeyPatch, tensor: Tensor) -> None:
    """Interrupt after the next write to a tensor, once."""
    kind, write = type(s.model.engine), type(s.model.engine).write

    def once(engine: object, to: Tensor, values: Array) -> None:
        write(engine, to, values)  # type: ignore[arg-type]
        if to is tensor:
            monkeypatch.setattr(kind, "write", write)
            raise KeyboardInterrupt

    monkeypatch.setattr(kind, "write", once)


class Forcing(Policy):
    """Forces the same ids in every block, and commits no more than those."""

    def shape(self, progress: DecodeProgress, block: Block) -> Block:
        return block.forcing((5, 6, 7), "test").capped(3, "test")


@pytest.mark.parametrize("name", ["forced", "cap"])
def test_what_was_written_before_an_interrupt_is_written_again(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    s, asked = session(), Request(prompt=prompt(40, 1), max_tokens=16)
    truth = answer(s, asked, NoDrafter())
    want, spec = answer(s, asked, oracle(truth)), s.report().spec
    assert want == truth
    interrupt(s, monkeypatch, s.model._inputs[name])
    with pytest.raises(KeyboardInterrupt):
        answer(s, asked, DEAD, (Forcing(),))
    assert answer(s, asked, oracle(truth)) == truth
    assert s.report().spec == spec


def test_a_restore_that_is_interrupted_has_ended_the_earlier_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    s, whole = session(), prompt(90, 3)
    s.prefixes.put("it", whole)
    first = s.run(Request(prompt=prompt(40, 1), max_tokens=40), DEAD)
    next(first)
    state = next(n for n in s.model.state.tensors if n.endswith(".state"))
    interrupt(s, monkeypatch, s.model.state.tensors[state])
    with pytest.raises(KeyboardInterrupt):
        answer(s, Request(prompt=whole, max_tokens=4), NoDrafter())
    s.prefixes.drop("it")
    with pytest.raises(TransactionError, match="must have the state to itself"):
        next(first)
