"""Floods a mock server and measures what a well-behaved client sees: the long check of its limits.

    python -m support.flood [KIND ...] [--clients 40] [--seconds 5] [--json]

From the repository root, with PYTHONPATH=.:tests. Reported in docs/performance/serving.md.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from dataclasses import dataclass, field

import zmq
from support import flood_peers
from support.flood_peers import BODIES, FRAMES
from support.server_process import resident, server
from support.soak_clients import Robot

from thor_dflash.calib.studies import script
from thor_dflash.serving.client import Options, RemotePlanner

CYCLE_MS = 20
CONTROL_MS = 150
"""What 99 of 100 control operations must take at most, during a flood and after it."""
MEMORY_MB = 200
"""What a flood may add to the memory of the server."""
SETTLE_S = 2.0
"""Time after a flood within which the server must be as before."""


@dataclass(slots=True)
class Flooded:
    """What a client measured during one kind of flood; ms and MB."""

    kind: str
    sent: int
    control: list[float] = field(default_factory=list[float])
    acks: list[float] = field(default_factory=list[float])
    """From a cancel to its answer."""
    stops: list[float] = field(default_factory=list[float])
    """From a cancel to the end of the running plan."""
    after: list[float] = field(default_factory=list[float])
    """Control operations once SETTLE_S have passed."""
    bound: float = 0.0
    """The bound of a cancel that hello publishes."""
    memory: float = 0.0
    """The most resident memory during the flood, beyond that before it."""
    memory_after: float = 0.0


def p99(values: list[float]) -> float:
    """The 99th percentile without interpolation."""
    ranked = sorted(values)
    return ranked[min(len(ranked) - 1, len(ranked) * 99 // 100)]


def timed(planner: RemotePlanner, op: str) -> float:
    """Run a control operation; its time, ms."""
    begin = time.perf_counter()
    getattr(planner, op)()
    return 1e3 * (time.perf_counter() - begin)


def cancelled(robot: Robot, number: int) -> tuple[float, float] | None:
    """Begin a plan and cancel it: ms to the answer, and to the plan's end; None if the plan did not
    run.
    """
    plan = {"v": 1, "op": "plan", "id": f"p{number}", "prompt": "x " * 500, "session": "good",
            "stream": "all", "priority": 9, "preempt": "lower"}  # fmt: skip
    robot.send(plan)
    if robot.receive()["type"] != "chunk":
        return None
    begin, at = time.perf_counter(), dict[str, float]()
    robot.send({"v": 1, "op": "cancel", "id": f"c{number}", "target": plan["id"]})
    while len(at) < 2:
        if (reply := robot.receive())["type"] != "chunk":
            at[reply["id"]] = 1e3 * (time.perf_counter() - begin)
    return at[f"c{number}"], at[f"p{number}"]


def measure(kind: str, clients: int, seconds: float, size: int = 1_000_000) -> Flooded:
    """Flood a new server, and be its client meanwhile and afterwards."""
    with (
        server("--mock", "--mock-cycle-ms", str(CYCLE_MS)) as (endpoint, pid),
        RemotePlanner(endpoint, Options(timeout_s=60)) as planner,
        Robot(zmq.Context(), endpoint, "good") as robot,
    ):
        planner.ping()
        before = resident(pid)
        command = [sys.executable, flood_peers.__file__, endpoint, kind, str(clients)]
        flood = subprocess.Popen(
            [*command, str(seconds), str(size)], stdout=subprocess.PIPE, text=True
        )
        found, number = Flooded(kind, 0), 0
        found.bound = planner.hello()["limits"]["cancel_bound_ms"]
        while flood.poll() is None:
            for op in ("ping", "health", "stats"):
                found.control.append(timed(planner, op))
            if number % 5 == 0 and (times := cancelled(robot, number)):
                found.acks.append(times[0])
                found.stops.append(times[1])
            number += 1
            found.memory = max(found.memory, resident(pid) - before)
            time.sleep(0.01)
        ended = time.monotonic()
        assert flood.stdout
        assert flood.returncode == 0
        found.sent = int(flood.stdout.read())
        planner.ping()
        time.sleep(max(0.0, ended + SETTLE_S - time.monotonic()))
        found.after = [timed(planner, "ping") for _ in range(50)]
        assert planner.health()["error"] is None
        found.memory_after = resident(pid) - before
        return found


HEAD = ("flood", "sent", "control p99, ms", "control most, ms", "cancel answered most, ms",
        "plan ended most, ms", "2 s later p99, ms", "memory most, MB", "memory later, MB",
)  # fmt: skip


def row(found: Flooded) -> tuple[object, ...]:
    """One row of the table."""
    times = (p99(found.control), max(found.control), max(found.acks, default=0.0),
             max(found.stops, default=0.0), p99(found.after))  # fmt: skip
    memory = (found.memory, found.memory_after)
    return found.kind, found.sent, *(round(t, 1) for t in times), *(round(m) for m in memory)


def main() -> None:
    """Measure floods and show one table."""
    parser = argparse.ArgumentParser(description="floods of a plan server")
    parser.add_argument("kinds", nargs="*", metavar="KIND", default=[*BODIES, FRAMES])
    parser.add_argument("--clients", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--json", action="store_true", help="print the table as JSON")
    args = parser.parse_args()
    rows: list[tuple[object, ...]] = []
    for kind in args.kinds:
        rows.append(row(measure(kind, args.clients, args.seconds)))
        print(rows[-1], file=sys.stderr)
    script.show([("flood", [HEAD, *rows])], as_json=args.json)


if __name__ == "__main__":
    main()
