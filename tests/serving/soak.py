"""The long checks of serving, run by hand: what docs/measurements reports.

    python tests/serving/soak.py PKG control|overhead|hostile|soak [COUNT]

From the repository root, with PYTHONPATH=.:tests. Each prints what it found and fails loudly.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hostile import attack
from soaking import Soak

from thor_dflash.config import EngineConfig
from thor_dflash.progress import Silent
from thor_dflash.serve_config import ServeConfig
from thor_dflash.serving.client import Ask, Options, RemotePlanner

RUN = "import sys; from thor_dflash.cli import main; sys.exit(main())"
PROMPT = "Bring the cup to the table, then the plate to the kitchen."


@contextmanager
def server(*args: str) -> Iterator[tuple[str, int]]:
    """A server process on a free port: its endpoint and process id."""
    command = [sys.executable, "-c", RUN, "serve", "--bind", "tcp://127.0.0.1:*", *args]
    with tempfile.TemporaryFile() as log:
        child = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert child.stderr
        endpoint = next(line.split()[-1] for line in child.stderr if line.startswith("ready"))
        drain = threading.Thread(
            target=lambda: [log.write(line.encode()) for line in child.stderr or ()]
        )
        drain.start()
        try:
            yield endpoint, child.pid
        finally:
            assert child.poll() is None, "the server ended by itself"
            child.terminate()
            assert child.wait(60) == 0
            drain.join()
            log.seek(0)
            assert b"Traceback" not in log.read()


def resident(pid: int) -> float:
    """Memory of a process, MB."""
    text = Path(f"/proc/{pid}/status").read_text()
    line = next(line for line in text.splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1024


def percentiles(values: list[float]) -> str:
    """p50, p99 and the worst, without interpolation."""
    ranked = sorted(values)
    p99 = ranked[min(len(ranked) - 1, len(ranked) * 99 // 100)]
    return f"p50 {ranked[len(ranked) // 2]:.2f}, p99 {p99:.2f}, max {ranked[-1]:.2f} ms"


def control(package: str, count: int) -> None:
    """Control operations while plans are decoded."""
    with server("--package", package) as (endpoint, _):
        over = threading.Event()

        def plans() -> None:
            with RemotePlanner(endpoint) as planner:
                while not over.is_set():
                    planner.plan(Ask(prompt=PROMPT, max_tokens=256))

        thread = threading.Thread(target=plans)
        thread.start()
        with RemotePlanner(endpoint) as planner:
            while planner.health()["state"] != "busy":
                time.sleep(0.01)
            for op in ("ping", "health", "stats", "hello"):
                ask = {
                    "ping": planner.ping,
                    "health": planner.health,
                    "stats": planner.stats,
                    "hello": planner.hello,
                }[op]
                times: list[float] = []
                for _ in range(count):
                    begin = time.perf_counter()
                    ask()
                    times.append(1e3 * (time.perf_counter() - begin))
                    time.sleep(0.002)
                print(f"control {op}: {count} while a plan decodes, {percentiles(times)}")
            bound = planner.hello()["limits"]["cancel_bound_ms"]
            print(f"cancel bound published: {bound:.0f} ms")
        over.set()
        thread.join()


def overhead(package: str, count: int) -> None:
    """What of a plan's time at the client is not spent inside the decode loop."""
    from thor_dflash.runtime.session import Chunk, Request, Session, open_session
    from thor_dflash.serving.live import LiveBackend
    from thor_dflash.serving.server import serving

    inside = [0.0]

    class Clocked(Session):
        """Times the loop itself: the same request, the same moment, whatever else goes on."""

        def generate(self, request: Request) -> Iterator[Chunk]:
            chunks = super().generate(request)
            while True:
                begin = time.perf_counter()
                chunk = next(chunks, None)
                inside[0] += time.perf_counter() - begin
                if chunk is None:
                    return
                yield chunk

    plain = open_session(Path(package), EngineConfig(), Silent())
    session = Clocked(plain.model, plain.text)
    config = ServeConfig(bind=("tcp://127.0.0.1:*",))
    ask = Ask(prompt=PROMPT, thinking="off", max_tokens=192, parts=("tokens",))
    sys.setswitchinterval(0.0005)
    with (
        serving(lambda: LiveBackend(session, config), config) as running,
        RemotePlanner(running.endpoints[0]) as planner,
    ):
        planner.plan(ask)
        shares: list[float] = []
        for _ in range(count):
            inside[0], begin = 0.0, time.perf_counter()
            planner.plan(ask)
            whole = time.perf_counter() - begin
            shares.append(100 * (whole - inside[0]) / whole)
    ranked = sorted(shares)
    print(
        f"overhead: {ranked[count // 2]:.2f} % of a plan's time at the client is outside the loop "
        f"(best {ranked[0]:.2f}, worst {ranked[-1]:.2f}; {count} plans of 192 tokens)"
    )


def hostile(package: str, count: int) -> None:
    """Hostile frames, with a well-behaved client throughout."""
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
                assert planner.plan(Ask(prompt="x", priority=9)).status == "ok"
                served += 1
                time.sleep(0.005)
            attacked.join()
            stats = planner.stats()
        seconds = time.monotonic() - begin
        print(f"hostile: {count} frames in {seconds:.0f} s, {stats['refused']}")
        print(f"hostile: {served} plans and pings of a good client meanwhile, {percentiles(times)}")
        tenth, last = sizes[len(sizes) // 10], sizes[-1]
        print(f"hostile: memory {tenth:.1f} MB after a tenth, {last:.1f} MB at the end")
        assert stats["refused"].get("internal", 0) == 0
        assert last < 1.1 * tenth + 8


def soak(package: str, count: int) -> None:
    """Plans with random cancels, disconnects, preempts and deadlines."""
    with server("--package", package) as (endpoint, pid):
        it = Soak(endpoint, seed=2)
        begin = time.monotonic()
        it.run(count // 10)
        before = resident(pid)
        it.run(count)
        after, seconds = resident(pid), time.monotonic() - begin
        it.close()
        print(f"soak: {it.asked} plans in {seconds:.0f} s, {dict(it.tally)}")
        print(f"soak: memory {before:.1f} MB after a tenth, {after:.1f} MB at the end")
        print(f"soak: cancel to final answer, {len(it.late)} times, {percentiles(it.late)}")
        assert after < 1.05 * before + 16


if __name__ == "__main__":
    what = {"control": control, "overhead": overhead, "hostile": hostile, "soak": soak}
    what[sys.argv[2]](sys.argv[1], int(sys.argv[3]) if len(sys.argv) > 3 else 100)
