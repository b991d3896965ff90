"""Decides which of several launches is the fastest, or that a measurement cannot tell.

The first launch is the rule's. Another replaces it only if it wins twice: in a first measurement of
all, and in a second one against the rule's alone, in nearly every round of it, or in most of many
rounds. A launch that is not faster wins that second measurement once in fifty times.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Times = tuple[float, ...]
"""Times of one launch in each context that is measured."""
Sample = Callable[[int], Times]
"""Measures one of the launches once."""

ROUNDS = 6
"""Rounds of the first measurement."""
EARLY, HOPELESS = 2, 1.02
"""Rounds after which a launch that was slower in all of them is dropped, if its median exceeds the
rule's by this factor."""
SECOND, WINS, LOST = 10, 9, 5
"""Rounds of the second measurement; how many won decide it, and with how few it is lost."""
THIRD, MOST_WINS = 30, 22
"""Rounds in all if that decides nothing, and how many a launch must win."""
MARGIN = 0.001
"""Smallest gain that counts, as a share of the chain's time."""


@dataclass(frozen=True, slots=True)
class SearchResult:
    """What was measured."""

    chosen: int
    """0: the rule's."""
    medians: tuple[Times, ...]
    """Median of each launch, by context."""


def search(count: int, sample: Sample) -> SearchResult:
    """Measure `count` launches in turn, every second round backwards, so that a drift of the clock
    affects all alike.
    """
    samples: list[list[Times]] = [[] for _ in range(count)]
    alive = list(range(count))
    for number in range(ROUNDS):
        for i in alive if number % 2 == 0 else reversed(alive):
            samples[i].append(sample(i))
        if number + 1 == EARLY:
            alive = [i for i in alive if i == 0 or not _hopeless(samples[i], samples[0])]
    best = min(alive, key=lambda i: sum(_medians(samples[i])))
    if best and not _wins(best, sample, samples):
        best = 0
    return SearchResult(best, tuple(_medians(each) for each in samples))


def _hopeless(mine: Sequence[Times], rule: Sequence[Times]) -> bool:
    slower = all(sum(a) > sum(b) for a, b in zip(mine, rule, strict=True))
    return slower and sum(_medians(mine)) > HOPELESS * sum(_medians(rule))


def _wins(best: int, sample: Sample, samples: Sequence[list[Times]]) -> bool:
    """Measure again, and add these samples: those that were chosen for their speed would make the
    launch appear faster than it is. A launch must not be slower in any context.
    """
    rule, mine = list[Times](), list[Times]()
    wins, rounds = 0, SECOND
    for number in range(THIRD):
        for i in (0, best) if number % 2 == 0 else (best, 0):
            (rule if i == 0 else mine).append(sample(i))
        wins += sum(mine[-1]) < sum(rule[-1])
        if number + 1 == SECOND:
            if not LOST < wins < WINS:
                break
            rounds = THIRD
    samples[0].extend(rule)
    samples[best].extend(mine)
    before, after = _medians(rule), _medians(mine)
    each = all(a <= b * (1 + MARGIN) for a, b in zip(after, before, strict=True))
    enough = wins >= (WINS if rounds == SECOND else MOST_WINS)
    return enough and each and sum(after) < sum(before) * (1 - MARGIN)


def _medians(samples: Sequence[Times]) -> Times:
    return tuple(statistics.median(times) for times in zip(*samples, strict=True))
