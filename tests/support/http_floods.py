"""Clients that would keep a gateway from answering others: connections that bring no request, or
only a part of one, and begin again where the gateway closes them.

    python -m support.http_floods [--seconds 10] [--connections 1000]

measures each kind for docs/performance/serving.md, from the repository root and with
PYTHONPATH=.:tests. Gateway and flood are processes of their own; /health is asked for on new
connections meanwhile. Prints a table as JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.waiting import until

from thor_dflash.config.serving import ServeConfig
from thor_dflash.serving.gateway import http_server
from thor_dflash.serving.planner.mock_backend import MockBackend
from thor_dflash.serving.server.server import serving

POST = "POST {} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
NUMBERS = '{"messages": [], "metadata": {"a": [' + ",".join(["1e308"] * 170_000) + "]}}"
LARGE = POST.format("/v1/chat/completions") + f"Content-Length: {len(NUMBERS)}\r\n\r\n{NUMBERS}"
LONG = "Content-Length: 999999\r\n\r\n"
FLOODS: dict[str, tuple[str, str]] = {
    "idle connections": ("", ""),
    "slow headers": ("GET /health HTTP/1.1\r\nX-A: ", "a"),
    "slow bodies": (POST.format("/v1/chat/completions") + LONG + "{", " "),
    "bodies sent to no route": (POST.format("/nothing") + LONG, "x"),
    "bodies of a wrong method": (POST.format("/health") + LONG, "x"),
    "no HTTP": ("\x16\x03\x01\x02\r\n\r\n", ""),
    "large bodies": (LARGE, LARGE),
    "upgrades": ("GET /a HTTP/1.1\r\nHost: localhost\r\nConnection: upgrade\r\n"
                 "Upgrade: websocket\r\n\r\n", ""),
}  # fmt: skip
"""Name -> what a connection sends at first, and what it sends again and again."""


@dataclass
class Flood:
    """A number of such connections at a time."""

    host: str
    port: int
    first: str
    more: str
    connections: int
    pause_s: float = 0.2
    """Time between two pieces of a connection."""
    opened: int = 0
    ended: bool = False

    async def run(self) -> None:
        """Hold the connections until `ended`."""
        await asyncio.gather(*(self._client() for _ in range(self.connections)))

    async def _client(self) -> None:
        while not self.ended:
            try:
                reader, writer = await asyncio.open_connection(self.host, self.port)
            except OSError:
                await asyncio.sleep(self.pause_s)
                continue
            self.opened += 1
            with suppress(OSError):
                writer.write(self.first.encode("latin-1"))
                while not self.ended and await self._goes_on(reader):
                    writer.write(self.more.encode())
            writer.close()

    async def _goes_on(self, reader: asyncio.StreamReader) -> bool:
        try:
            async with asyncio.timeout(self.pause_s):
                return bool(await reader.read(1 << 16))
        except TimeoutError:
            return True


@contextmanager
def flooded(address: str, kind: str, connections: int) -> Iterator[Flood]:
    """Flood a gateway from a thread of this process."""
    host, _, port = address.removeprefix("http://").partition(":")
    flood = Flood(host, int(port), *FLOODS[kind], connections)
    thread = threading.Thread(target=asyncio.run, args=(flood.run(),))
    thread.start()
    try:
        yield flood
    finally:
        flood.ended = True
        thread.join(20)


RUN = "import sys; from thor_dflash.cli.main import main; sys.exit(main())"
DESCRIPTORS = http_server.FEWEST + http_server.SPARE + http_server.OF_SERVER
"""As few as a gateway accepts."""
USUAL = 8192
PROBE_S = 0.02
"""Time between two requests of /health."""
AFTER_S = 2.0
"""Time after a flood for which /health is asked for, too."""


@dataclass(frozen=True)
class Measured:
    """What a flood did to a gateway."""

    kind: str
    opened: int
    """Connections that it opened."""
    failed: int
    """Requests of /health without an answer."""
    ms: tuple[float, ...]
    """Times of the answers during the flood, in ascending order."""
    after_ms: tuple[float, ...]
    """Those after it."""
    descriptors: int
    """Most descriptors that the gateway had."""
    log_bytes: int
    memory_mb: float
    """What the gateway's memory grew by."""
    cpu: float
    """Processor time of the gateway for each second."""


def measure(kind: str, connections: int, seconds: float, descriptors: int) -> Measured:
    """Flood a gateway process that may have so many descriptors."""
    config = ServeConfig(bind=("tcp://127.0.0.1:*",))
    quiet: list[str] = []
    with (
        serving(lambda: MockBackend(ServeConfig()), config, log=quiet.append) as server,
        _gateway(server.endpoints[0], descriptors) as (process, log),
    ):
        port = int(log.read_text().split(":")[-1].split("/")[0])
        until(lambda: _ask(port) is not None)
        memory, cpu, size = _memory_mb(process.pid), _cpu_s(process.pid), log.stat().st_size
        context = multiprocessing.get_context("spawn")
        ready, opened = context.Barrier(3), context.Queue()
        job = (kind, port, connections // 2, seconds, ready, opened)
        floods = [context.Process(target=attack, args=job) for _ in range(2)]
        for flood in floods:
            flood.start()
        ready.wait()
        begun = time.monotonic()
        times, most = _probe(port, seconds, process.pid)
        number = opened.get() + opened.get()
        after, _ = _probe(port, AFTER_S, process.pid)
        each_s = (_cpu_s(process.pid) - cpu) / (time.monotonic() - begun)
        return Measured(
                kind, number, times.count(None) + after.count(None), _sorted(times), _sorted(after),
                most, log.stat().st_size - size, _memory_mb(process.pid) - memory, each_s,
            )  # fmt: skip


def attack(kind: str, port: int, connections: int, seconds: float, ready: Any, opened: Any) -> None:
    """Flood a gateway from this process, and put into a queue how many connections were opened."""
    flood = Flood("127.0.0.1", port, *FLOODS[kind], connections)

    def end() -> None:
        flood.ended = True

    ready.wait()
    threading.Timer(seconds, end).start()
    asyncio.run(flood.run())
    opened.put(flood.opened)


@contextmanager
def _gateway(endpoint: str, descriptors: int) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """A gateway process and its log."""
    args = [sys.executable, "-c", RUN, "gateway", "--server", endpoint, "--listen", "127.0.0.1:0"]

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))

    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with log.open("wb") as out:
            process = subprocess.Popen(args, stderr=out, preexec_fn=limit)
        try:
            until(lambda: "listening" in log.read_text())
            yield process, log
            assert process.poll() is None, "the gateway ended by itself"
            if os.path.exists("/tmp/Bdbg"):
                print(log.read_text(), file=sys.stderr)
        finally:
            process.terminate()
            process.wait(60)


def _probe(port: int, seconds: float, pid: int) -> tuple[list[float | None], int]:
    """Times of /health, ms, and the most descriptors of a process meanwhile."""
    times: list[float | None] = []
    most, end = 0, time.monotonic() + seconds
    while time.monotonic() < end:
        times.append(_ask(port))
        most = max(most, len(os.listdir(f"/proc/{pid}/fd")))
        time.sleep(PROBE_S)
    return times, most


def _ask(port: int) -> float | None:
    begun = time.monotonic()
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=10) as reply:
            reply.read()
    except OSError:
        return None
    return 1e3 * (time.monotonic() - begun)


def _sorted(times: list[float | None]) -> tuple[float, ...]:
    return tuple(sorted(one for one in times if one is not None))


def _memory_mb(pid: int) -> float:
    text = Path(f"/proc/{pid}/status").read_text().partition("VmRSS:")[2]
    return int(text.split()[0]) / 1024


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Measure every kind of flood."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--connections", type=int, default=1000)
    args = parser.parse_args()
    table: list[list[object]] = [[
        "flood", "opened", "/health unanswered", "p50, ms", "p99, ms", "most, ms",
        "p99 after it, ms", "most descriptors", "log, bytes", "memory, MB", "CPU, s/s",
    ]]  # fmt: skip
    few = [(kind, DESCRIPTORS) for kind in ("idle connections", "slow headers")]
    for kind, descriptors in [*((kind, USUAL) for kind in FLOODS), *few]:
        print(f"{kind} ...", file=sys.stderr)
        number = 40 if kind == "large bodies" else args.connections
        one = measure(kind, number, args.seconds, descriptors)
        p99, after = one.ms[int(0.99 * (len(one.ms) - 1))], one.after_ms
        row = [statistics.median(one.ms), p99, one.ms[-1], after[int(0.99 * (len(after) - 1))]]
        name = kind if descriptors == USUAL else f"{kind}, {descriptors} descriptors"
        table.append([
            name, one.opened, one.failed, *(round(ms, 1) for ms in row), one.descriptors,
            one.log_bytes, round(one.memory_mb, 1), round(one.cpu, 2),
        ])  # fmt: skip
    json.dump({"http floods": table}, sys.stdout, indent=1)


if __name__ == "__main__":
    main()
