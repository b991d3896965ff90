"""Replaying calls on tensors that change place: nobody reads where a state was."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from fake_cuda import fake

from thor_dflash.plugins.cuda.driver import Driver
from thor_dflash.runtime.engine import Call
from thor_dflash.runtime.engines.cuda.board import Board
from thor_dflash.runtime.engines.cuda.bound import cuda, where
from thor_dflash.runtime.engines.cuda.capture import Captured
from thor_dflash.tensors import DType, TensorSpec

LARGE = TensorSpec("gdn.0.record", DType.F32, (64, 256))


class Noted(Board):
    """Captures nothing but the addresses that calls would use, and notes them when replayed."""

    ran: list[list[int]]

    def _capture(self, calls: Sequence[Call]) -> Captured:
        at: list[int] = []
        for call in calls:
            turns = self._turns[id(call)]
            at += [cuda(tensor).now for tensor in call.inputs.values()]
            at += [where(call, name, turns) for name in call.outputs]
            self._turn(call)
        return Captured("noted", self._driver, lambda: self.ran.append(at))


def call(name: str, reads: dict[str, Any], writes: dict[str, Any]) -> Call:
    return Call(SimpleNamespace(name=name), reads, writes)  # type: ignore[arg-type]


@pytest.mark.parametrize("order", list(itertools.product("ab", repeat=4)), ids="".join)
def test_who_only_reads_a_state_reads_where_it_is(
    order: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A renews it beside what it reads, b reads it: as verify and prefill do with the records."""
    fake(monkeypatch)
    board = Noted(Driver())
    board.ran = []
    state = board.empty(LARGE, {})
    calls = {"a": call("a", {"x": state}, {"next.x": state}), "b": call("b", {"x": state}, {})}
    board._take_turns([(one, ()) for one in calls.values()])
    board._allocate(board._count_tensors())
    first, second = cuda(state).places
    now = first
    for step in order:
        board.run([calls[step]])
        other = second if now == first else first
        assert board.ran[-1] == ([now, other] if step == "a" else [now])
        now = other if step == "a" else now
        assert cuda(state).now == now


def test_what_is_written_over_itself_has_one_place(monkeypatch: pytest.MonkeyPatch) -> None:
    fake(monkeypatch)
    board = Noted(Driver())
    board.ran = []
    state = board.empty(LARGE, {})
    renew = call("a", {"x": state}, {"next.x": state})
    board._take_turns([(renew, {"next.x"})])
    board._allocate(board._count_tensors())
    [place] = cuda(state).places
    board.run([renew])
    assert board.ran == [[place, place]]
