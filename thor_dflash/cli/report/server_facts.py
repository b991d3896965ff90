"""What `status` and `stats` print of a server: its state, and how its plans went."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MAIN_RAILS = ("VDD_GPU", "VIN_SYS_5V0", "VDD_CPU_SOC_MSS")
"""Power rails of a Thor that come first."""


@dataclass(frozen=True, slots=True)
class Fact:
    """One line."""

    name: str
    text: str
    trend: Sequence[float] = ()
    """The values of the last plans, oldest first."""


@dataclass(frozen=True, slots=True)
class ServerReport:
    """The answers of a server."""

    health: Mapping[str, Any]
    hello: Mapping[str, Any]
    stats: Mapping[str, Any]

    @property
    def accept_len(self) -> float | None:
        """Mean tokens per cycle since the start; None before there was a cycle."""
        spec = self.stats["spec"]
        cycles = spec.get("cycles", 0)
        return 1 + spec["accepted"] / cycles if cycles else None

    @property
    def tok_s(self) -> float | None:
        """Median tokens per second of the last plans."""
        return statistics.median(found) if (found := self.last("tok_s")) else None

    @property
    def watts(self) -> dict[str, float]:
        """Mean power of each rail during the plans; empty without sensors."""
        energy: dict[str, Any] = self.stats.get("energy") or {}
        joules: dict[str, float] = energy.get("joules") or {}
        return {rail: each / energy["seconds"] for rail, each in joules.items()}

    def last(self, name: str) -> list[float]:
        """A value of the last plans that have it, oldest first."""
        return [plan[name] for plan in self.stats["last"] if plan.get(name)]

    def table(self) -> dict[str, Any]:
        """All answers, for JSON."""
        return {"health": self.health, "hello": self.hello, "stats": self.stats}

    def facts(self) -> Iterator[Fact]:
        """The lines. Those of which nothing is known yet are left out."""
        yield from self._server()
        if self.accept_len is not None:
            accepted = self.last("accept_len")
            yield Fact("accept length", f"{self.accept_len:.2f} tokens a cycle", accepted)
        if self.tok_s is not None:
            yield Fact("tokens/s", f"{self.tok_s:.1f} (median of the last)", self.last("tok_s"))
        if watts := self.watts:
            rails = sorted(watts, key=lambda rail: (rail not in MAIN_RAILS, rail))
            yield Fact("watts", ", ".join(f"{rail} {watts[rail]:.1f}" for rail in rails))
        if deadlines := self.stats.get("deadlines"):
            counts = ", ".join(f"{deadlines.get(w, 0)} {w}" for w in ("met", "missed", "refused"))
            yield Fact("deadlines", counts)
        for name, key in (("first token", "ttft_ms"), ("end to end", "e2e_ms")):
            if (times := self.stats["percentiles"][key]) is not None:
                text = f"p50 {times['p50']:.0f} ms, p90 {times['p90']:.0f} ms"
                yield Fact(name, text, self.last(key))

    def _server(self) -> Iterator[Fact]:
        health, server = self.health, self.hello["server"]
        model: Mapping[str, Any] = self.hello["model"] or {}
        error = f": {health['error']}" if health["error"] else ""
        yield Fact("state", health["state"] + error)
        yield Fact("server", f"{server['name']} {server['version']}, up {health['uptime_s']:.0f} s")
        engine = model.get("engine") or "no engine"
        yield Fact("model", f"{model.get('model', 'none yet')} ({engine})")
        yield Fact("queue", f"{health['running']} running, {health['waiting']} waiting")
        yield Fact("plans", _counted(self.stats["finished"]) or "none yet")
        yield Fact("refused", _counted(self.stats["refused"]) or "none")


def _counted(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items())
