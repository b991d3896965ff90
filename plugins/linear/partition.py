"""Who makes what: the steps of every group of columns, cut into runs of equal bytes.

A block streams one run from its first byte to its last. Where runs meet inside a group, each block
makes a part of the group's K, and the parts are added in order of k whoever ends last: the cut is
a function of the shapes and of the number of blocks, so a sum has the same bits every time.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from math import inf

import numpy as np

from thor_dflash.plugins.linear.layout import Group, Layout
from thor_dflash.tensors import Array

OFFSET_UNIT = 512
"""Bytes; offsets of groups are given to the kernel in this unit."""


@dataclass(frozen=True, slots=True)
class Item:
    """Steps k0..k1 of one group, made by one block."""

    group: Group
    k0: int
    k1: int
    first: int
    """Index of the group's first partial sum; 0 where there is one item."""
    order: int
    """Which of the group's items this is."""
    parts: int
    """How many items the group has."""


@dataclass(frozen=True, slots=True)
class Partition:
    """The items of every block, in the order in which the block makes them."""

    blocks: tuple[tuple[Item, ...], ...]

    @property
    def parts(self) -> int:
        """Partial sums that are kept, of 256 columns each."""
        return sum(item.parts > 1 for items in self.blocks for item in items)

    @property
    def most_items(self) -> int:
        """Items of the block that has most."""
        return max(map(len, self.blocks))

    def item_table(self) -> Array:
        """int32 [blocks, most_items, 8]: offset / 512, k0, k1, kind | tiles << 8 | last << 16,
        column, first, order, parts.
        """
        table = np.zeros((len(self.blocks), self.most_items, 8), np.int32)
        for block, items in zip(table, self.blocks, strict=True):
            for row, i in zip(block, items, strict=False):
                shape = i.group.kind | i.group.tiles << 8 | (i is items[-1]) << 16
                row[:4] = i.group.offset // OFFSET_UNIT, i.k0, i.k1, shape
                row[4:] = i.group.column, i.first, i.order, i.parts
        return table


EVEN = 0.9
"""Share of the mean run that the longest may exceed it by, inverted, for groups to be cut evenly: a
block then ends one item only, and ending one in the middle of a run stops its stream for long."""


@lru_cache(maxsize=256)
def partition(plan: Layout, blocks: int) -> Partition:
    """Cut a layout for at most so many blocks; none of them is left without work."""
    pieces = _evenly(plan, blocks) or _in_runs(plan, blocks)
    counts = [0] * len(plan.groups)
    for group, _, _ in (piece for block in pieces for piece in block):
        counts[group] += 1
    firsts = [0, *accumulate(count if count > 1 else 0 for count in counts)]
    seen = [0] * len(plan.groups)
    made: list[tuple[Item, ...]] = []
    for block in pieces:
        items: list[Item] = []
        for g, k0, k1 in block:
            first = firsts[g] if counts[g] > 1 else 0
            items.append(Item(plan.groups[g], k0, k1, first, seen[g], counts[g]))
            seen[g] += 1
        made.append(tuple(items))
    return Partition(tuple(made))


def _evenly(plan: Layout, blocks: int) -> list[list[tuple[int, int, int]]]:
    """Every group in equal pieces, each a block; none where that is too uneven."""
    sizes = [plan.steps * group.step_bytes for group in plan.groups]
    mean = sum(sizes) / blocks
    counts = [min(plan.steps, max(1, int(size / (mean * EVEN)))) for size in sizes]
    while sum(counts) > blocks:
        ratios = [
            size / count if count > 1 else inf for size, count in zip(sizes, counts, strict=True)
        ]
        if (least := min(ratios)) == inf:
            return []
        counts[ratios.index(least)] -= 1
    longest = max(
        -(-plan.steps // count) * group.step_bytes
        for group, count in zip(plan.groups, counts, strict=True)
    )
    if mean < EVEN * longest:
        return []
    edges = [[plan.steps * i // count for i in range(count + 1)] for count in counts]
    return [[(g, a, b)] for g, cuts in enumerate(edges) for a, b in pairwise(cuts)]


def _in_runs(plan: Layout, blocks: int) -> list[list[tuple[int, int, int]]]:
    """One run of bytes after the other, wherever it begins and ends."""
    steps = plan.steps
    starts = [0, *accumulate(steps * group.step_bytes for group in plan.groups)]
    cuts = {0, steps * len(plan.groups)}
    for i in range(1, blocks):
        byte = starts[-1] * i // blocks
        at = bisect_right(starts, byte) - 1
        size = plan.groups[at].step_bytes
        cuts.add(at * steps + (byte - starts[at] + size // 2) // size)
    return [_pieces(a, b, steps) for a, b in pairwise(sorted(cuts))]


def _pieces(begin: int, end: int, steps: int) -> list[tuple[int, int, int]]:
    """(group, k0, k1) of the units begin..end, a unit being one step of one group."""
    made: list[tuple[int, int, int]] = []
    while begin < end:
        group, k0 = divmod(begin, steps)
        k1 = min(steps, k0 + end - begin)
        made.append((group, k0, k1))
        begin += k1 - k0
    return made
