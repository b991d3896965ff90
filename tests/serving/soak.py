"""The long checks of serving, which are run by hand and reported in docs/performance/serving.md.

    python tests/serving/soak.py PKG CHECK[=COUNT] ... [--json]

CHECK is control, overhead, cancel, hostile or soak. From the repository root, with
PYTHONPATH=.:tests. Each check returns rows of a table, and fails loudly.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

import zmq
from support.hostile_peers import attack
from support.server_process import resident, server
from support.soak_clients import Robot, Soak

from thor_dflash.calib.studies import script
from thor_dflash.cli.commands.serve import SWITCH_S
from thor_dflash.config.engine import EngineConfig
from thor_dflash.config.serving import ServeConfig
from thor_dflash.core.progress import Silent
from thor_dflash.runtime.session import Request, open_session
from thor_dflash.serving.client import Message, Options, PlanRequest, RemotePlanner
from thor_dflash.serving.planner.session_backend import SessionBackend
from thor_dflash.serving.server.server import serving
from thor_dflash.serving.server.workers import lower_priority

PROMPT = "Bring the cup to the table, then the plate to the kitchen."
HELDOUT = Path(__file__).parent.parent.parent / "models/planner-nano/heldout.jsonl"
LONGEST = 512
"""Longest answer, tokens; the plans of planner-nano end by themselves before."""


Rows = list[tuple[str, object]]
"""Measurements and their values."""


def percentiles(name: str, values: list[float]) -> Rows:
    """p50, p99 and the maximum, ms, without interpolation."""
    ranked = sorted(values)
    p99 = ranked[min(len(ranked) - 1, len(ranked) * 99 // 100)]
    found = {"p50": ranked[len(ranked) // 2], "p99": p99, "most": ranked[-1]}
    return [(f"{name}, {key}, ms", round(value, 2)) for key, value in found.items()]


def control(package: str, count: int) -> Rows:
    """Time control operations while plans are decoded."""
    rows: Rows = []
    with server("--package", package) as (endpoint, _):
        over = threading.Event()

        def plans() -> None:
            with RemotePlanner(endpoint) as planner:
                while not over.is_set():
                    planner.plan(PlanRequest(prompt=PROMPT, max_tokens=256))

        thread = threading.Thread(target=plans)
        thread.start()
        with RemotePlanner(endpoint) as planner:
            while planner.health()["state"] != "busy":
                time.sleep(0.01)
            for op in ("ping", "health", "stats", "hello"):
                ask = getattr(planner, op)
                times: list[float] = []
                for _ in range(count):
                    begin = time.perf_counter()
                    ask()
                    times.append(1e3 * (time.perf_counter() - begin))
                    time.sleep(0.002)
                rows += percentiles(f"{op} while a plan decodes, {count} times", times)
        over.set()
        thread.join()
    return rows


def tasks(count: int) -> list[tuple[Message, ...]]:
    """`count` chats as robots send them: planner-nano's held-out tasks, in turn."""
    lines = HELDOUT.read_text(encoding="utf-8").splitlines()
    chats = [json.loads(line)["messages"] for line in lines]
    chosen = [chats[i % len(chats)] for i in range(count)]
    return [tuple(Message(role=m["role"], content=m["content"]) for m in chat) for chat in chosen]


def overhead(package: str, count: int) -> Rows:
    """Time plans in pairs, by the decoding loop itself and by the server: same session, same
    prompts, same tokens.

    The loop gets token ids and returns token ids; the server gets a chat over TCP and returns a
    plan. The loop runs on a thread with the priority of the server's engine thread, so that only
    the server makes a difference. Which of a pair goes first alternates.
    """
    session = open_session(Path(package), EngineConfig(), Silent())
    text = session.tokenizer
    assert text
    config = ServeConfig(bind=("tcp://127.0.0.1:*",))
    sys.setswitchinterval(SWITCH_S)
    pairs: list[tuple[float, float]] = []
    with (
        ThreadPoolExecutor(1, initializer=lower_priority) as pool,
        serving(lambda: SessionBackend(session, config), config, log=lambda line: None) as running,
        RemotePlanner(running.endpoints[0]) as planner,
    ):
        for number, chat in enumerate([*tasks(2), *tasks(count)]):
            messages = [{"role": m.role, "content": m.content} for m in chat]
            prompt = tuple(text.encode(text.render(messages, thinking=False)))
            request = Request(
                prompt=prompt, max_tokens=LONGEST, stop=frozenset(session.manifest.stop_tokens)
            )
            ask = PlanRequest(messages=chat, thinking="off", max_tokens=LONGEST,
                      parts=("plan", "text", "timings", "tokens"))  # fmt: skip

            def loop(request: Request = request) -> list[int]:
                return [t for chunk in session.generate(request) for t in chunk.tokens]

            def served(ask: PlanRequest = ask) -> list[int]:
                return list(planner.plan(ask).tokens or ())

            ways: list[Callable[[], list[int]]] = [lambda: pool.submit(loop).result(), served]
            took, tokens = [0.0, 0.0], [list[int](), list[int]()]
            for way in (0, 1) if number % 2 else (1, 0):
                begin = time.perf_counter()
                tokens[way] = ways[way]()
                took[way] = 1e3 * (time.perf_counter() - begin)
            assert tokens[0] == tokens[1], "a server that changes the plan"
            if number >= 2:  # the first two warm everything up
                pairs.append((took[0], took[1]))
    shares = sorted(100 * (server / loop - 1) for loop, server in pairs)
    medians = [median(pair[way] for pair in pairs) for way in (0, 1)]
    low, high = shares[len(shares) // 4], shares[len(shares) * 3 // 4]
    return [
        (f"overhead of the server, median of {count} pairs, %", round(median(shares), 2)),
        ("overhead, quartiles, %", f"{low:.2f}, {high:.2f}"),
        ("a plan by the loop, median, ms", round(medians[0], 1)),
        ("a plan by the server, median, ms", round(medians[1], 1)),
    ]


def cancel(package: str, count: int) -> Rows:
    """Time cancels at random moments of prefill and decode against the bound that hello gives."""
    rng, late = random.Random(3), list[float]()
    chat = [{"role": "user", "content": "Bring the cup to the table. " * 60}]
    with (
        server("--package", package) as (endpoint, _),
        RemotePlanner(endpoint) as planner,
        Robot(zmq.Context(), endpoint, "r") as robot,
    ):
        limits = planner.hello()["limits"]
        whole = planner.plan(PlanRequest(prompt=chat[0]["content"], thinking="off", max_tokens=64))
        assert whole.timings
        for number in range(count):
            plan = {"v": 1, "op": "plan", "id": f"p{number}", "messages": chat, "thinking": "off",
                    "max_tokens": 64}  # fmt: skip
            robot.send(plan)
            time.sleep(rng.random() * 0.9e-3 * whole.timings.e2e_ms)
            begin = time.perf_counter()
            robot.send({"v": 1, "op": "cancel", "id": f"c{number}", "target": plan["id"]})
            while (reply := robot.receive())["id"] != plan["id"]:
                pass
            if reply.get("code") == "cancelled":
                late.append(1e3 * (time.perf_counter() - begin))
            robot.drain()
    over = sum(ms > limits["cancel_bound_ms"] for ms in late)
    assert not over
    rows = percentiles(f"cancel to the plan's last message, {len(late)} of {count}", late)
    return [*rows, ("cancel bound that hello publishes, ms", limits["cancel_bound_ms"])]


def hostile(package: str, count: int) -> Rows:
    """Send hostile frames while a well-behaved client is served throughout."""
    with server("--mock", "--set", "serve.max_message=100000") as (endpoint, pid):
        sizes: list[float] = []
        attacked = threading.Thread(
            target=lambda: attack(endpoint, count, 1, lambda i: sizes.append(resident(pid)))
        )
        begin = time.monotonic()
        attacked.start()
        served, times = 0, list[float]()
        with RemotePlanner(endpoint, Options(retries=1000)) as planner:
            while attacked.is_alive():
                start = time.perf_counter()
                assert planner.ping()["status"] == "ok"
                times.append(1e3 * (time.perf_counter() - start))
                assert planner.plan(PlanRequest(prompt="x", priority=9)).status == "ok"
                served += 1
                time.sleep(0.005)
            attacked.join()
            stats = planner.stats()
        seconds = time.monotonic() - begin
        tenth, last = sizes[len(sizes) // 10], sizes[-1]
        assert stats["refused"].get("internal", 0) == 0
        assert last < 1.1 * tenth + 8
        return [
            (f"{count} hostile messages, s", round(seconds)),
            ("plans of a good client meanwhile", served),
            *percentiles("its pings", times),
            ("memory after a tenth, MB", round(tenth, 1)),
            ("memory at the end, MB", round(last, 1)),
        ]


def soak(package: str, count: int) -> Rows:
    """Request plans, with random cancels, disconnects, preemptions and deadlines."""
    with server("--package", package) as (endpoint, pid):
        it = Soak(endpoint, seed=2)
        begin = time.monotonic()
        it.run(count // 10)
        before = resident(pid)
        it.run(count)
        after, seconds = resident(pid), time.monotonic() - begin
        it.close()
        assert after < 1.05 * before + 16
        return [
            (f"soak of {it.asked} plans, s", round(seconds)),
            *((f"soak: {name}", number) for name, number in it.tally.items()),
            *percentiles("soak: cancel to the plan's last message", it.late),
            ("soak: memory after a tenth, MB", round(before, 1)),
            ("soak: memory at the end, MB", round(after, 1)),
        ]


CHECKS = {
    "control": control, "overhead": overhead, "cancel": cancel, "hostile": hostile, "soak": soak,
}  # fmt: skip


def main() -> None:
    """Run the checks and show one table."""
    parser = argparse.ArgumentParser(description="the long checks of serving")
    parser.add_argument("package")
    parser.add_argument("checks", nargs="+", metavar="CHECK[=COUNT]")
    parser.add_argument("--json", action="store_true", help="print the table as JSON")
    args = parser.parse_args()
    rows: Rows = []
    for check in args.checks:
        name, _, count = check.partition("=")
        rows += CHECKS[name](args.package, int(count or 100))
    script.show([("serving", [("measurement", "value"), *rows])], as_json=args.json)


if __name__ == "__main__":
    main()
