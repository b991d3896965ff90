"""The figures of a bench: what is measured for each, how it is judged, and how it is reported."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from thor_dflash.core.progress import Silent
from thor_dflash.runtime.measure import bench_report
from thor_dflash.runtime.measure.bench_report import Figure
from thor_dflash.runtime.measure.cuda_bench import (
    CudaBench,
    Keep,
    LoopTiming,
    StepGroup,
    Timing,
    everything,
)

READ = 3e12
STEP = SimpleNamespace


class Known:
    """A stand-in for a Bench with given times, step -> ms. Its model has three layers with 1 GB of
    weights each.
    """

    device = "a device"
    block = 8
    chunk = 512
    memory: Mapping[str, int] = {"weights": 3 * 10**9, "cache": 10**9}
    engine = SimpleNamespace(tuned_launches=())

    def __init__(self, ms: Mapping[str, float]) -> None:
        self.ms = ms
        self.length = 0
        self.measured = 0

    def bandwidth(self) -> float:
        return READ

    def captured(self) -> int:
        return 5 * 10**6

    def bytes(self, name: str, ops_: Sequence[str]) -> int:
        return {"verify": 3 * 10**9, "propose": 10**8, "observe": 10**7}[name]

    def shares(self, name: str, ops_: Sequence[str]) -> dict[str, StepGroup]:
        return {"layers.*.down": StepGroup(frozenset({"a", "b"}), 3 * 10**9)}

    def operators(self, name: str) -> tuple[str, ...]:
        return ("linear", "head", "draft_attention")

    def launches(self, names: Sequence[str]) -> int:
        return 100 * len(names)

    def cache_bytes(self) -> int:
        return 32768

    def state_bytes(self) -> int:
        return 3 * 10**8

    def steps(self, names: Sequence[str], keep: Keep = everything) -> Timing:
        key = "+".join(names)
        if keep is not everything:
            parts = [r for r in ("linear", "gdn") if keep(STEP(op=r, name="a"))]  # type: ignore[arg-type]
            key += f":{parts[0] if len(parts) == 1 else 'other'}"
        grown = 32768 * max(0, self.length - 2048) / READ * 1e3 * self.ms["growth"]
        self.measured += 1
        drifted = self.measured * self.ms.get("drift", 0.0)
        ms = self.ms.get(key, 1.0) + (grown + drifted if key == "verify" else 0)
        return Timing(ms, ms, ms, 1)

    def repeated(self, names: Sequence[str], seconds: float) -> Timing:
        return Timing(7.7, 7.5, 8.25, 600)

    def at(self, length: int, accepted: int) -> None:
        assert accepted == self.block
        self.length = length

    def prefill(self, tokens: int) -> float:
        return self.ms["prefill"]

    def loop(self, prompt: int, cycles: int) -> LoopTiming:
        return LoopTiming(0.0100, 0.0098, 0.0002, 0.0004)


def measured(**ms: float) -> dict[str, Figure]:
    """The bench's figures, by section and name, for the usual times and those given."""
    times = {"verify:linear": 1.25, "verify:gdn": 0.3, "verify": 6.0, "growth": 1.12,
             "propose+verify+accept+observe": 7.5, "verify.1:linear": 1.25,
             "verify.32:linear": 1.5, "verify+accept": 6.06, "prefill": 0.5, **ms}  # fmt: skip
    rows = list(bench_report.figures(cast("CudaBench", Known(times)), Silent()))
    return {f"{row.section}/{row.name}": row for row in rows}


def test_figures_are_judged_by_their_required_values() -> None:
    rows = measured()
    want = {
        "linears of a verify, share of read rate": (80, "missed"),
        "the same linears at 1 row": (1.0, "aim"),
        "the same linears at 32 rows": (1.2, "missed"),
        "gdn of a verify": (0.3, "reached"),
        "verify at 2048": (6.0, "reached"),
        "cycle at 2048": (7.5, "missed"),
        "plain step": (1.01, "aim"),
        "growth from 2048 to 8192": (1.12, "reached"),
        "growth from 2048 to 32768": (1.12, "reached"),
        "prefill of 2048 tokens": (0.5, "missed"),
        "host time of a cycle outside the graph": (2.0, "reached"),
    }
    assert want.keys() == bench_report.TARGETS.keys()
    for name, (value, verdict) in want.items():
        row = rows[f"figures/{name}"]
        assert row.value == pytest.approx(value), name
        assert row.verdict == verdict, name


def test_growth_is_of_neighbours_while_clocks_drift() -> None:
    """Each measurement of a verify takes 0.1 ms more than the one before, which is more than 6,144
    tokens of context cost.
    """
    rows = measured(drift=0.1)
    for length in bench_report.LONG:
        assert rows[f"figures/growth from 2048 to {length}"].value == pytest.approx(1.12)


def test_a_feature_is_compared_with_all_of_them() -> None:
    known: Any = Known({"verify": 9.0, "propose+verify+accept+observe": 15.0, "growth": 1.0})
    rows = bench_report.brief(known, "no graph", {"verify": 6.0, "cycle": 7.5})
    assert [(row.name, row.value, row.note) for row in rows] == [
        ("no graph: verify", 9.0, "1.50x, 100 launches"),
        ("no graph: cycle", 15.0, "2.00x, 400 launches"),
    ]
