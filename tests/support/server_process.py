"""A server as a process of its own, as the long checks of serving run it."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

RUN = "import sys; from thor_dflash.cli.main import main; sys.exit(main())"


@contextmanager
def server(*args: str) -> Iterator[tuple[str, int]]:
    """A server process on a free port: its endpoint and process id."""
    command = [sys.executable, "-c", RUN, "serve", "--bind", "tcp://127.0.0.1:*", *args]
    with tempfile.TemporaryFile() as log:
        child = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert child.stderr
        endpoint = next(line.split()[-1] for line in child.stderr if " ready after " in line)
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
