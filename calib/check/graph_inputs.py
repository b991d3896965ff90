"""Prepares a call of each graph of a package so that all its inputs are realistic."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np

from thor_dflash.core.model_dims import MERGE, PATCH
from thor_dflash.package.manifest import encoder_name
from thor_dflash.runtime.decoding.model_runner import ModelRunner
from thor_dflash.runtime.engines.protocol import Call
from thor_dflash.runtime.vision.picture import Picture

Prepare = Callable[[ModelRunner, Sequence[int], int], Call]
"""Prepares a graph's call for some tokens, at their block `at` if it works on blocks."""
FILL: Mapping[str, int | float] = {
    "forced": -1, "soft": -1, "stop": -1, "strict": -1, "close": -1,
    "drafted": 0, "rule": 0, "top_k": 1, "margin": 0.0, "soft_margin": 0.0,
    "sampling.seed": 5, "sampling.temperature": 0.75, "sampling.top_k": 50, "sampling.top_p": 0.9,
    "sampling.min_log_p": -7.0,
}  # fmt: skip
"""Inputs of a block that is not constrained: nothing forced, stopped, drafted or relaxed; and a
draw with every truncation."""
SHOWN = 4
"""Rows of an image that a prefill step begins with."""


def walks(model: ModelRunner) -> dict[str, Callable[[Sequence[int], int], Call]]:
    """Return graph -> function that prepares its call for some tokens, at their block `at` if it
    works on blocks. Preparing resets the sequence; reset it again after running the call by steps.
    """
    found: dict[str, Prepare] = {
        **_sizes(model, "prefill", prefill),
        "verify": verify,
        "accept": accept,
    }
    drawn: dict[str, Prepare] = {"accept_sampled": partial(accept, step="accept_sampled")}
    if model.manifest.drafter is not None:
        found |= _sizes(model, "observe_chunk", observe_chunk)
        found |= {"propose": propose, "observe": observe}
        drawn |= {
            "sample_drafts": sample_drafts,
            "sample_drafts_rejection": partial(sample_drafts, step="sample_drafts_rejection"),
            "accept_rejection": accept_rejection,
        }
    found |= {name: _loaded(ready) for name, ready in drawn.items()}
    sizes = model.manifest.image_patches
    found |= {encoder_name(size): partial(encode, size=size) for size in sizes}
    return {name: partial(ready, model) for name, ready in found.items()}


def _loaded(ready: Prepare) -> Prepare:
    """Return the preparation for a graph that an engine may load only when it is needed."""

    def prepare(model: ModelRunner, tokens: Sequence[int], at: int) -> Call:
        model.load_drawing(rejection=True)
        return ready(model, tokens, at)

    return prepare


def _sizes(
    model: ModelRunner, step: str, ready: Callable[[ModelRunner, Sequence[int], int, int], Call]
) -> dict[str, Prepare]:
    """Return the preparations for a prefill step's graphs, the largest first."""

    def of(rows: int) -> Prepare:
        return lambda model, tokens, at: ready(model, tokens, at, rows)

    return {model.sized(step, rows): of(rows) for rows in sorted(model.chunks, reverse=True)}


def verify(model: ModelRunner, tokens: Sequence[int], at: int) -> Call:
    """Prepare a verify of block `at` of the tokens, with the blocks before it committed."""
    model.state.reset()
    for start in range(0, at * model.block, model.block):
        model.write_tokens(tokens[start : start + model.block])
        model.verify()
        model.state.commit(model.block)
    model.write_tokens(tokens[at * model.block : (at + 1) * model.block])
    return _placed(model, "verify")


def accept(model: ModelRunner, tokens: Sequence[int], at: int, step: str = "accept") -> Call:
    """Prepare an accept of that block's logits; nothing is forced, stopped or drafted."""
    verify(model, tokens, at)
    model.verify()
    call = model.call(step)
    _write(model, call, {"cap": model.block, "length": model.state.length, **FILL})
    return call


def prefill(model: ModelRunner, tokens: Sequence[int], at: int, rows: int) -> Call:
    """Prepare a prefill step of `rows` rows at the beginning of the sequence."""
    del at
    model.state.reset()
    part = list(tokens[:rows])
    call = _placed(model, "prefill", rows)
    model.engine.write(
        call.inputs["tokens"], np.array([*part, *[0] * (rows - len(part))], np.int32)
    )
    _write(model, call, {"valid": len(part)})
    if (image := call.inputs.get("image")) is not None:
        rng, shape = np.random.default_rng(0), (SHOWN, *image.spec.at({})[1:])
        positions = np.arange(rows, dtype=np.int32)[:, None] + np.zeros(3, np.int32)
        positions[:SHOWN, 1:] = rng.integers(0, SHOWN, (SHOWN, 2))
        ids = np.array([*range(-1, -1 - SHOWN, -1), *part[SHOWN:]], np.int32)
        model.engine.write(call.inputs["tokens"], np.resize(ids, rows))
        model.engine.write(call.inputs["at"], positions)
        model.engine.write(image, rng.standard_normal(shape).astype(image.spec.dtype.numpy))
    return call


def encode(model: ModelRunner, tokens: Sequence[int], at: int, size: int) -> Call:
    """Prepare a run of the vision tower on a random picture of a few patches less than `size`."""
    del tokens, at
    shape = MERGE * PATCH, max(MERGE, size // MERGE - MERGE) * PATCH, 3
    pixels = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    return model.encoding(Picture(pixels), size)


def observe_chunk(model: ModelRunner, tokens: Sequence[int], at: int, rows: int) -> Call:
    """Prepare an observe of the taps of that prefill step."""
    model.engine.run([prefill(model, tokens, at, rows)])
    call = model.call("observe_chunk", rows)
    _write(model, call, {"length": 0})
    return call


def propose(model: ModelRunner, tokens: Sequence[int], at: int) -> Call:
    """Prepare a propose after the first chunk."""
    del at
    model.state.reset()
    model.prefill(tokens[: model.chunk], observe=True)
    model.write_first(0)
    model.write_last(tokens[-1])
    call = _placed(model, "propose")
    _write(model, call, FILL)
    return call


def sample_drafts(
    model: ModelRunner, tokens: Sequence[int], at: int, step: str = "sample_drafts"
) -> Call:
    """Prepare a draw of the drafts of that propose."""
    model.engine.run([propose(model, tokens, at)])
    call = _placed(model, step)
    _write(model, call, FILL)
    return call


def accept_rejection(model: ModelRunner, tokens: Sequence[int], at: int) -> Call:
    """Prepare an accept of block 0 with the drafts that were drawn for it, all of them."""
    model.engine.run([sample_drafts(model, tokens, at, "sample_drafts_rejection")])
    model.verify()
    call = model.call("accept_rejection")
    drafts = model.block - 1
    numbers = {**FILL, "cap": model.block, "drafted": drafts, "drawn": drafts, "mask": -1}
    _write(model, call, {**numbers, "length": model.state.length})
    return call


def observe(model: ModelRunner, tokens: Sequence[int], at: int) -> Call:
    """Prepare an observe of the taps of block `at`."""
    verify(model, tokens, at)
    model.verify()
    return _placed(model, "observe")


def _placed(model: ModelRunner, name: str, rows: int = 0) -> Call:
    call = model.call(name, rows)
    _write(model, call, {"length": model.state.length, "accepted": model.state.accepted})
    return call


def _write(model: ModelRunner, call: Call, numbers: Mapping[str, int | float]) -> None:
    """Fill each named input that the call has with one number."""
    for name, value in numbers.items():
        if (tensor := call.inputs.get(name)) is not None:
            spec = tensor.spec
            model.engine.write(tensor, np.full(spec.at({}), value, spec.dtype.numpy))
