"""The process that renders chat templates.

A template is a program that came with a checkpoint: it may loop for ever or fill the memory, and no
thread can be stopped in the middle of that. So templates are rendered, and compiled, in a process
of their own that has limits. One serves all templates of this process; it starts with the first
rendering, is replaced after a limit has ended it, and ends with its parent.
"""

from __future__ import annotations

import atexit
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Literal, cast

import msgspec

from thor_dflash.core.errors import ThorError

SECONDS = 2
"""Processor time of one rendering, s. An ordinary one takes a thousandth of that."""
MEMORY = 1 << 30
"""Memory of the process, bytes: many times a text of LENGTH."""
LENGTH = 16 << 20
"""Most characters of a rendered text: far more than fit the context of any model."""

NOTHING: Mapping[str, object] = {}
_WORKER = Path(__file__).with_name("template_worker.py")
_START = "import runpy, sys; sys.path[:] = sys.argv[4:]; runpy.run_path({!r}, None, '__main__')"
"""The process has the import path of this one, and skips the slow search for it."""

Kind = Literal["text", "invalid", "refused"]


class TemplateProcess:
    """Renders templates, one at a time. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None

    def render(
        self,
        source: str,
        names: Mapping[str, str],
        messages: object,
        tools: Sequence[object] = (),
        options: Mapping[str, object] = NOTHING,
    ) -> tuple[Kind, str]:
        """Return the text, or that the template is invalid or refuses the messages, and why. With
        None for the messages, only compile the template; the text is then a JSON list of the
        variables that it reads. `options` are further variables.

        Raises:
            ThorError: the system gives no process.
        """
        request = {"source": source, "names": names, "tools": tools, "options": options}
        try:
            # Without escapes, which would take several times as long. Messages are most of it, and
            # their texts need nothing that only Python's own encoder has.
            line = json.dumps(request, ensure_ascii=False).encode()
            lines = b"%b\n%b\n" % (line, msgspec.json.encode(messages))
        except UnicodeEncodeError as e:
            return "invalid", str(e)
        with self._lock:
            child = self._running()
            try:
                found = _exchange(child, lines)
            except BaseException:  # Ctrl-C: the next request must not get this answer
                child.kill()
                self._ended(child)
                raise
            if found is None:
                return "refused", self._ended(child)
        return found

    def close(self) -> None:
        """End the process; a later rendering starts another one."""
        with self._lock:
            if self._child is not None:
                self._child.kill()
                self._ended(self._child)

    def _running(self) -> subprocess.Popen[bytes]:
        if self._child is not None and self._child.poll() is not None:
            self._ended(self._child)  # killed from outside while it had nothing to do
        if self._child is None:
            limits = [str(SECONDS), str(MEMORY), str(LENGTH)]
            start = _START.format(str(_WORKER))
            command = [sys.executable, "-I", "-S", "-c", start, *limits, *sys.path]
            try:
                # A group of its own: Ctrl-C is for this process, which then ends the other.
                self._child = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    process_group=0,
                )
            except OSError as e:
                raise ThorError(
                    f"the system must start a process for chat templates (got: {e.strerror})"
                ) from e
        return self._child

    def _ended(self, child: subprocess.Popen[bytes]) -> str:
        """Forget the process, which has closed its pipes; return what ended it."""
        self._child, status = None, child.wait()
        for pipe in (child.stdin, child.stdout):
            with suppress(BrokenPipeError):  # of a request that it did not read to the end
                cast("IO[bytes]", pipe).close()
        if status == -signal.SIGPROF:
            return f"more than {SECONDS} s"
        return f"a process that ended with status {status}, out of memory perhaps"


def _exchange(child: subprocess.Popen[bytes], lines: bytes) -> tuple[Kind, str] | None:
    """Send a request; return the answer, None if the process ended instead."""
    streams: Any = child
    try:
        streams.stdin.write(lines)
        streams.stdin.flush()
    except BrokenPipeError:
        return None
    head: list[bytes] = streams.stdout.readline().split()
    if not head:
        return None
    text: bytes = streams.stdout.read(int(head[1]))
    kind: Any = head[0].decode()
    return (kind, text.decode()) if len(text) == int(head[1]) else None


PROCESS = TemplateProcess()
"""The process of all templates."""
atexit.register(PROCESS.close)
