"""Each graph of a package put into a place where all it reads is real."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np

from thor_dflash.runtime.engine import Call
from thor_dflash.runtime.model import Model

FILL: Mapping[str, int | float] = {
    "forced": -1, "soft": -1, "stop": -1, "strict": -1, "close": -1,
    "drafted": 0, "rule": 0, "top_k": 1, "margin": 0.0, "soft_margin": 0.0,
}  # fmt: skip
"""What bounds of a block say where nobody bounds it."""


def walks(model: Model) -> dict[str, Callable[[Sequence[int], int], Call]]:
    """Graph -> what makes its call ready with some tokens, at their block `at` where it works on
    blocks. The sequence is begun anew for it, and must be again once the call has run by steps.
    """
    found: dict[str, Callable[[Model, Sequence[int], int], Call]] = {
        "prefill": prefill,
        "verify": verify,
        "accept": accept,
    }
    if model.manifest.drafter is not None:
        found |= {"observe_chunk": observe_chunk, "propose": propose, "observe": observe}
    return {name: partial(ready, model) for name, ready in found.items()}


def verify(model: Model, tokens: Sequence[int], at: int) -> Call:
    """The block `at` of the tokens, those before it committed."""
    model.state.reset()
    for start in range(0, at * model.block, model.block):
        model.write_tokens(tokens[start : start + model.block])
        model.verify()
        model.state.commit(model.block)
    model.write_tokens(tokens[at * model.block : (at + 1) * model.block])
    return _placed(model, "verify")


def accept(model: Model, tokens: Sequence[int], at: int) -> Call:
    """Of that block's logits; nothing is forced, stopped or drafted."""
    verify(model, tokens, at)
    model.verify()
    call = model.call("accept")
    _write(model, call, {"cap": model.block, **FILL})
    return call


def prefill(model: Model, tokens: Sequence[int], at: int) -> Call:
    """The first chunk."""
    del at
    model.state.reset()
    part = list(tokens[: model.chunk])
    call = _placed(model, "prefill")
    padded = np.array([*part, *[0] * (model.chunk - len(part))], np.int32)
    model.engine.write(call.inputs["tokens"], padded)
    _write(model, call, {"valid": len(part)})
    return call


def observe_chunk(model: Model, tokens: Sequence[int], at: int) -> Call:
    """The taps of the first chunk."""
    del at
    model.state.reset()
    model.prefill(tokens[: model.chunk], observe=False)
    call = model.call("observe_chunk")
    _write(model, call, {"length": 0})
    return call


def propose(model: Model, tokens: Sequence[int], at: int) -> Call:
    """After the first chunk."""
    del at
    model.state.reset()
    model.prefill(tokens[: model.chunk], observe=True)
    model.write_first(0)
    model.write_last(tokens[-1])
    call = _placed(model, "propose")
    _write(model, call, FILL)
    return call


def observe(model: Model, tokens: Sequence[int], at: int) -> Call:
    """The taps of the block `at`."""
    verify(model, tokens, at)
    model.verify()
    return _placed(model, "observe")


def _placed(model: Model, name: str) -> Call:
    call = model.call(name)
    _write(model, call, {"length": model.state.length, "accepted": model.state.accepted})
    return call


def _write(model: Model, call: Call, numbers: Mapping[str, int | float]) -> None:
    """Fill whole inputs, those of the names that the call has."""
    for name, value in numbers.items():
        if (tensor := call.inputs.get(name)) is not None:
            spec = tensor.spec
            model.engine.write(tensor, np.full(spec.at({}), value, spec.dtype.numpy))
