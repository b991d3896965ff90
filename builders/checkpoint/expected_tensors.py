"""The tensors that a model consists of, and the check that a directory holds exactly these."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

from thor_dflash.builders.checkpoint.linear_weights import PLAIN, Linear, locate
from thor_dflash.builders.checkpoint.shards import Shards
from thor_dflash.core.errors import CheckpointError

MOST_NAMED = 4
"""Most problems that an error message lists; the rest are counted."""


@dataclass(frozen=True, slots=True)
class ExpectedTensors:
    """The tensors of a model. Names are relative to the checkpoint's prefix."""

    matrices: Mapping[str, tuple[int, int]]
    """Linears, without `.weight` -> [N, K]."""
    tensors: Mapping[str, tuple[int, ...]]
    """All other tensors, of floats -> shape."""


def gated_mlp(stem: str, hidden: int, intermediate: int) -> dict[str, tuple[int, int]]:
    """Return the linears of one gated feed-forward layer."""
    return {
        f"{stem}.gate_proj": (intermediate, hidden),
        f"{stem}.up_proj": (intermediate, hidden),
        f"{stem}.down_proj": (hidden, intermediate),
    }


def check(
    shards: Shards,
    layout: ExpectedTensors,
    stored_name: Callable[[str], str],
    *,
    besides: Collection[str] = (),
) -> dict[str, Linear]:
    """Compare the directory with the layout and return where each linear is stored.

    `stored_name` turns a name of the layout into the stored one. `besides` are further stored names
    that are allowed.
    Raises: CheckpointError naming missing, misshapen and extra tensors.
    """
    linears: dict[str, Linear] = {}
    problems: list[str] = []
    expected = {stored_name(name) for name in layout.tensors} | set(besides)
    for name, shape in layout.matrices.items():
        try:
            linears[name] = locate(shards, stored_name(name), name, shape)
            expected |= linears[name].parts
        except CheckpointError as error:
            problems.append(str(error))
            expected |= {s for s in shards if s.startswith(f"{stored_name(name)}.")}
    problems += _misfits(shards, layout, stored_name)
    problems += [
        f"{name} must be absent, no such tensor belongs to this model (got the tensor)"
        for name in shards
        if name not in expected
    ]
    if problems:
        more = f"; and {len(problems) - MOST_NAMED} more" * (len(problems) > MOST_NAMED)
        raise CheckpointError(f"{shards.directory}: {'; '.join(problems[:MOST_NAMED])}{more}")
    return linears


def _misfits(
    shards: Shards, layout: ExpectedTensors, stored_name: Callable[[str], str]
) -> Iterator[str]:
    for name, shape in layout.tensors.items():
        stored = stored_name(name)
        found = str(shards.entry(stored)) if stored in shards else "nothing"
        fits = stored in shards and shards.entry(stored).shape == shape
        if not fits or shards.entry(stored).dtype.name not in PLAIN:
            yield f"{stored} must be {' | '.join(PLAIN)} {list(shape)} (got {found})"
